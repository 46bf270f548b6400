"""The inputs of Layerwise Offload: every setting arrives, and what cannot be is refused before any work."""

from __future__ import annotations

from dataclasses import asdict
from types import ModuleType
from typing import Any

import pytest
from comfyui import inprocess

pytestmark = pytest.mark.core

NODE_ID = "KitchenLayerwiseOffload"
# No setting has its default, and no two have the same value.
SETTINGS = {
    "vram_budget_gb": 7.5,
    "resident_blocks": 3,
    "prefetch_blocks": 2,
    "pin_memory": "on",
    "max_pinned_gb": 20.0,
    "strategy": "core",
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """(model, config) of each call of the way in, which does nothing instead."""
    calls: list[tuple[Any, Any]] = []

    report = inprocess.pack_module("kernels_glue.report")

    def offload_model(source: Any, config: Any, show: Any) -> tuple[Any, Any]:
        calls.append((source, config))
        return "the patcher", report.Report.of("a node", [report.detail("the report")])

    monkeypatch.setattr(inprocess.pack_module("kernels_glue.offload.apply"), "offload_model", offload_model)
    return calls


def test_every_setting_arrives_under_its_name(comfy: ModuleType, asked: list[tuple[Any, Any]]) -> None:
    outputs = comfy.run_node(comfy.pack_nodes()[NODE_ID], model="the model", **SETTINGS)
    [(model, config)] = asked
    assert model == "the model" and asdict(config) == SETTINGS
    assert list(outputs) == ["the patcher", "the report"]


def test_the_defaults_of_the_inputs_are_those_of_the_settings(
    comfy: ModuleType, asked: list[tuple[Any, Any]]
) -> None:
    node = comfy.pack_nodes()[NODE_ID]
    inputs = node.GET_NODE_INFO_V1()["input"]["required"]
    defaults = {name: fields["default"] for name, (_, fields) in inputs.items() if name != "model"}
    comfy.run_node(node, model="the model")
    [(_, config)] = asked
    assert asdict(config) == defaults


@pytest.mark.parametrize(
    ("name", "value", "sentences"),
    [
        ("vram_budget_gb", -1.0, "vram_budget_gb is -1.0. Give a number from 0 to 1024."),
        ("resident_blocks", -2, "resident_blocks is -2. Give a whole number from -1 to 4096."),
        ("prefetch_blocks", 65, "prefetch_blocks is 65. Give a whole number from 0 to 64."),
        ("max_pinned_gb", float("nan"), "max_pinned_gb is nan. Give a number from 0 to 4096."),
        ("pin_memory", "yes", "pin_memory is 'yes'. Choose one of auto, on, off."),
        ("strategy", "dynamic", "strategy is 'dynamic'. Choose one of auto, stream, core."),
    ],
)
def test_a_value_that_cannot_be_is_refused_before_the_model_is_touched(
    comfy: ModuleType, asked: list[tuple[Any, Any]], name: str, value: Any, sentences: str
) -> None:
    with pytest.raises(ValueError) as caught:
        comfy.run_node(comfy.pack_nodes()[NODE_ID], model="the model", **{**SETTINGS, name: value})
    assert str(caught.value) == f"Layerwise Offload: {sentences}" and asked == []


def test_only_what_most_users_set_is_shown_at_first(comfy: ModuleType) -> None:
    inputs = comfy.pack_nodes()[NODE_ID].GET_NODE_INFO_V1()["input"]["required"]
    shown = [name for name, (_, fields) in inputs.items() if not fields.get("advanced")]
    assert shown == ["model", "vram_budget_gb", "resident_blocks"]
