"""Frozen workflows give every setting by name, so that no input of a node can change its place unnoticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import ui_workflow
from comfyui.server import ComfyServer
from workflow_files import COMPARE, FROZEN, INT8, OFFLOAD, SOL, Info, differences, read, recorded_api


@pytest.fixture(scope="module")
def info(server: ComfyServer) -> Info:
    """ComfyUI's description of every node it has."""
    return server.get("/object_info")


def test_a_frozen_workflow_gives_every_int8_setting_by_name() -> None:
    """The record itself, by hand: no setting has its default, so that no two can change places."""
    [path] = [path for path in FROZEN if path.stem == "kitchen_int8_wan_nothing_default"]
    [node] = [node for node in recorded_api(path).values() if node["class_type"] == INT8]
    assert node["inputs"] == {
        "model": ["1", 0],
        "group_size": "64",
        "layers": "blocks+modulation",
        "ignored_layers": "blocks.0\nre:.*ffn\\.2$",
        "lora": "bake",
        "device": "cpu",
    }


def test_a_frozen_workflow_gives_every_sol_setting_by_name(info: Info) -> None:
    """By hand, like the one above: apart from the two switches no setting has the value of another."""
    [path] = [path for path in FROZEN if path.stem == "kitchen_sol_wan_nothing_default"]
    [node] = [node for node in recorded_api(path).values() if node["class_type"] == SOL]
    assert node["inputs"] == {
        "model": ["2", 0],
        "provider": "reference",
        "dense_backend": "current",
        "tau": 0.75,
        "curve": "cosine",
        "tau_end": 1.25,
        "thresh_type": "exact",
        "kv_splits": "2",
        "dense_percent": 0.35,
        "dense_steps": 1,
        "dense_layers": "1,-1",
        "sinks": "keys",
        "sink_start": 4,
        "sink_tokens": 24,
        "min_tokens": 192,
        "token_aug": 128,
        "strict": True,
        "profile": True,
        "steps": 12,
    }
    defaults = {slot.name: slot.default for slot in ui_workflow.slots(info[SOL]["input"]) if slot.is_widget}
    # An input that was added later is at its default here.
    assert not [name for name in defaults.keys() & node["inputs"] if defaults[name] == node["inputs"][name]]


def test_a_frozen_workflow_gives_every_offload_setting_by_name(info: Info) -> None:
    """By hand, like the ones above: no setting has its default or the value of another."""
    [path] = [path for path in FROZEN if path.stem == "kitchen_offload_wan_nothing_default"]
    [node] = [node for node in recorded_api(path).values() if node["class_type"] == OFFLOAD]
    assert node["inputs"] == {
        "model": ["2", 0],
        "vram_budget_gb": 7.5,
        "resident_blocks": 1,
        "prefetch_blocks": 2,
        "pin_memory": "off",
        "max_pinned_gb": 3.5,
        "strategy": "stream",
    }
    defaults = {slot.name: slot.default for slot in ui_workflow.slots(info[OFFLOAD]["input"])}
    assert not [name for name in defaults.keys() & node["inputs"] if defaults[name] == node["inputs"][name]]


def test_a_frozen_workflow_gives_every_compare_setting_by_name(info: Info) -> None:
    """By hand, like the ones above: no setting has its default or the value of another."""
    [path] = [path for path in FROZEN if path.stem == "kitchen_compare_wan_nothing_default"]
    [node] = [node for node in recorded_api(path).values() if node["class_type"] == COMPARE]
    assert node["inputs"] == {
        "model": ["3", 0],
        "add_noise": False,
        "noise_seed": 11,
        "cfg": 3.5,
        "positive": ["5", 0],
        "negative": ["6", 0],
        "sampler": ["9", 0],
        "sigmas": ["10", 0],
        "latent_image": ["7", 0],
        "layers": True,
        "keep_psnr": 12.5,
        "lpips": "off",
        "filename_prefix": "compare/%year%/mine",
        "reference": ["2", 0],
        "vae": ["8", 0],
    }
    defaults = {slot.name: slot.default for slot in ui_workflow.slots(info[COMPARE]["input"])}
    assert not [name for name in defaults.keys() & node["inputs"] if defaults[name] == node["inputs"][name]]


def change_inputs(info: Info, change: Callable[[list[tuple[str, Any]]], None]) -> Info:
    changed = copy.deepcopy(info)
    inputs = list(changed[INT8]["input"]["required"].items())
    change(inputs)
    changed[INT8]["input"]["required"] = dict(inputs)
    return changed


def test_an_inserted_or_moved_input_would_be_noticed_and_an_appended_one_is_fine(info: Info) -> None:
    [path] = [path for path in FROZEN if path.stem == "kitchen_int8_wan_nothing_default"]
    new = ("scale", ["STRING", {"default": "row"}])

    def compare(change: Callable[[list[tuple[str, Any]]], None]) -> list[str]:
        changed = change_inputs(info, change)
        return differences(ui_workflow.to_api(read(path), changed), recorded_api(path), changed)

    assert compare(lambda inputs: inputs.append(new)) == []
    assert f"{INT8}.lora is 'cpu' and was 'bake'" in compare(lambda inputs: inputs.insert(3, new))
    assert len(compare(lambda inputs: inputs.insert(1, inputs.pop(2)))) == 2
    assert compare(lambda inputs: inputs.pop(2) and None)
