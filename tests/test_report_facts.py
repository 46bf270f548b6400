"""The reports of the three nodes say the same in facts as in words, when they run and after a sampling."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from int8_node import int8_layers
from offload_node import DEEP, budget_for, on_gpu
from sol_node import LONG, require_cpu, tally_of
from stand_in_lane import HostLane

pytestmark = pytest.mark.usefixtures("inference")

MakeTiny = Callable[..., TinyModel]
Report = inprocess.pack_module("kernels_glue.report").Report
STEPS = 3


def check_shape(made: Any, node: str) -> None:
    """It comes back from its JSON, and no line is without facts."""
    assert made.node == node
    assert Report.from_json(made.to_json()) == made
    assert [line for line in made.lines if not line.facts] == []


def told(made: Any, pattern: str) -> tuple[str, ...]:
    """The groups of a pattern that fits one line of the text."""
    [found] = [match for line in made.shown if (match := re.fullmatch(pattern, line))]
    return found.groups()


@pytest.mark.core
def test_int8(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    apply, config = (comfy.pack_module(f"kernels_glue.quantization.{name}") for name in ("apply", "config"))
    shown: list[Any] = []
    settings = config.QuantizeConfig(ignored_layers="blocks.0\nnot_there")
    quantized, first = apply.quantize_model(source, settings, shown.append)
    comfy.sample(quantized, model, steps=STEPS)
    linear = [
        name
        for name, module in source.model.diffusion_model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    for made in (first, shown[-1]):
        check_shape(made, config.NODE)
        facts = made.facts
        assert facts["int8_layers"] == int8_layers(quantized)
        assert (facts["quantized"], facts["layers"]) == (len(facts["int8_layers"]), len(linear))
        kept = [name for names in facts["kept"].values() for name in names]
        assert sorted(kept + facts["int8_layers"]) == sorted(linear) and facts["kept_layers"] == len(kept)
        assert all(name.startswith("blocks.0.") for name in facts["kept"]["in ignored_layers (blocks.0)"])
        assert facts["remarks"] == ["ignored_layers: 'not_there' matches no linear layer."]
        assert sum(facts["group_sizes"].values()) == facts["quantized"]
        before, after = told(made, r"weights ([\d.]+) MiB -> ([\d.]+) MiB")
        assert (before, after) == tuple(
            f"{facts[f'bytes_{when}'] / 2**20:.2f}" for when in ("before", "after")
        )
        assert facts["bytes_before"] == comfy_bytes(source)
        assert (facts["lora_on_int8"], facts["lora_on_others"]) == (0, 0)


def comfy_bytes(patcher: Any) -> int:
    import comfy.model_management

    return comfy.model_management.module_size(patcher.model.diffusion_model)


@pytest.mark.core
def test_sol(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("flux")
    apply, config = (comfy.pack_module(f"kernels_glue.attention.{name}") for name in ("apply", "config"))
    shown: list[Any] = []
    settings = config.SolConfig.of(
        {
            "provider": "reference",
            "dense_steps": 1,
            "dense_layers": "0,-1,9",
            "sink_start": 2,
            "profile": True,
        }
    )
    patched, first, _ = apply.patch_attention(comfy.load_unet(model.path), settings, shown.append)
    check_shape(first, config.NODE)
    facts = first.facts
    assert (facts["kernels"], facts["dense_backend"]) == (["reference"], "fa")
    assert facts["block_lists"] == {"double_blocks": 2, "single_blocks": 2}
    assert (facts["layers"], facts["dense_layers"]) == (4, [0, 3])
    assert (facts["steps"], facts["sparse_steps"], facts["scheduler"]) == (20, 19, "simple")
    assert facts["without_effect"] == ["sink_start"]
    assert facts["sink_rule"] == {"by_hand": None, "family": "Flux", "keys": True, "queries": False}

    comfy.sample(patched, model, steps=STEPS, **LONG["flux"])
    [after] = shown
    check_shape(after, config.NODE)
    facts, tally = after.facts, tally_of(patched)
    assert facts["sparse_calls"] == dict(tally.sparse) == {"reference": 4}
    assert sum(facts["dense_calls"].values()) == sum(facts["dense_because"].values()) == 8
    assert facts["taus"] == [1.0, 1.0] and facts["tokens"] == [1040]
    assert facts["sinks"] == [{"rows": [0, 16], "queries": False, "source": "Flux"}]
    assert told(after, r"exact blocks: ([\d.]+)%") == (f"{100 * facts['density']:.1f}",)
    [milliseconds] = told(after, r"mean time a call: .*sparse reference ([\d.]+) ms")
    assert milliseconds == f"{1e3 * facts['seconds_a_call']['sparse reference']:.2f}"


def test_a_warning_has_its_facts_too(comfy: ModuleType, tiny: MakeTiny) -> None:
    require_cpu("the sequence is too short for any kernel there")
    model = tiny("wan")
    apply, config = (comfy.pack_module(f"kernels_glue.attention.{name}") for name in ("apply", "config"))
    shown: list[Any] = []
    settings = config.SolConfig.of({"provider": "reference", "min_tokens": 10**5, "dense_steps": 1})
    patched, *_ = apply.patch_attention(comfy.load_unet(model.path), settings, shown.append)
    comfy.sample(patched, model, steps=STEPS)
    [after] = shown
    check_shape(after, config.NODE)
    assert after.warns and after.shown[0].startswith("WARNING: nothing was sparse, because of: ")
    [(reason, count)] = after.facts["nothing_sparse_because"].items()
    assert after.shown[0].endswith(f": {reason} {count}")
    assert after.facts["dense_because"][reason] == count


@pytest.mark.core
def test_offload(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan", **DEEP["wan"])
    source = comfy.load_unet(model.path)
    apply, config = (comfy.pack_module(f"kernels_glue.offload.{name}") for name in ("apply", "config"))
    sizes = comfy.pack_module("kernels_glue.offload.patcher").sizes_of(source.model)
    shown: list[Any] = []
    budget = budget_for(source, resident=2)
    settings = config.OffloadConfig(vram_budget_gb=budget, strategy="stream")
    lane_for = None if on_gpu() else HostLane
    patched, first = apply.offload_model(source, settings, shown.append, lane_for)
    comfy.sample(patched, model, steps=STEPS)
    [after] = shown
    comfy.unload_all()
    for made in (first, after):
        check_shape(made, config.NODE)
        facts = made.facts
        assert (facts["streamed"], facts["resident"], facts["budget"]) == (4, 2, settings.budget)
        assert (facts["strategy"], facts["strategy_because"]) == ("stream", "as set on the node")
    facts = first.facts
    assert facts["block_lists"] == {"blocks": 6} and facts["bytes_in_blocks"] == sum(sizes.blocks)
    assert (facts["bytes_outside"], facts["prefetch_blocks"], facts["resident_blocks"]) == (
        sizes.outside,
        settings.prefetch_blocks,
        None,
    )
    facts = after.facts
    assert facts["steps"] == STEPS and facts["bytes_in_slabs"] == 2 * max(sizes.blocks)
    assert facts["bytes_on_device"] == sizes.outside + 4 * max(sizes.blocks) <= facts["budget"]
    # Four blocks a step, and up to two slabs for a step that never comes.
    assert 4 * STEPS <= STEPS * facts["bytes_a_step"] / max(sizes.blocks) <= 4 * STEPS + 2
    mib, seconds, share = told(
        after, r"copied ([\d.]+) MiB a step; the compute waited ([\d.]+) s a step for copies \((\d+)%\)"
    )
    assert mib == f"{facts['bytes_a_step'] / 2**20:.2f}"
    assert (seconds, share) == (
        f"{facts['waited_seconds_a_step']:.3f}",
        f"{100 * facts['waited_share']:.0f}",
    )


def test_a_model_that_passes_through_says_so_in_facts(comfy: ModuleType, tiny: MakeTiny) -> None:
    require_cpu("offload works on a GPU")
    apply, config = (comfy.pack_module(f"kernels_glue.offload.{name}") for name in ("apply", "config"))
    source = comfy.load_unet(tiny("wan").path)
    _, first = apply.offload_model(source, config.OffloadConfig(), lambda report: None)
    check_shape(first, config.NODE)
    assert first.facts == {"passed_through": True, "device": "cpu"}
    assert first.text.startswith("passed through unchanged: ")
