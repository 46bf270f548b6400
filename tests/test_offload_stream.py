"""Streamed and resident blocks compute the same bits, on real models with a CPU in the place of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from int8_node import quantize
from offload_node import DEEP, DITS, bits, offload, placed, same


@pytest.fixture
def source(comfy: ModuleType, tiny: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """source(family) -> (loaded model, tiny model); INT8 on request."""

    def load(family: str, int8: bool = False) -> tuple[Any, Any]:
        model = tiny(family, **DEEP[family])
        patcher = comfy.load_unet(model.path)
        return (quantize(comfy, patcher)[0] if int8 else patcher), model

    yield load
    comfy.unload_all()


@pytest.mark.parametrize(
    ("prefetch", "late"),
    [(0, False), pytest.param(1, True, marks=pytest.mark.core), (2, False), (5, True)],
)
@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("family", DITS)
def test_streamed_is_resident(
    comfy: ModuleType, source: Any, family: str, int8: bool, prefetch: int, late: bool
) -> None:
    model, tiny_model = source(family, int8)
    expected = comfy.sample(model, tiny_model)
    before = bits(model)
    with torch.inference_mode():
        comfy.unload_all()
    streamed, _, texts = offload(
        model, late=late, prefetch_blocks=prefetch, resident_blocks=2, vram_budget_gb=64.0
    )
    found = comfy.sample(streamed, tiny_model)
    assert torch.equal(found, expected)
    plan = placed(streamed).streaming.plan
    assert len(plan.resident) == 2 and len(plan.streamed) >= len(plan.resident)
    assert placed(streamed).streaming.traffic.copies >= len(plan.streamed)
    assert len(texts) == 1
    comfy.unload_all()  # outside of inference mode, as ComfyUI's own button does
    assert placed(streamed) is None
    assert same(bits(model), before)
    assert torch.equal(comfy.sample(model, tiny_model), expected)


def test_out_of_memory_while_core_takes_memory_back(
    comfy: ModuleType, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streaming needs slabs, and the device may be too full for them: then the model goes as a whole."""
    model, tiny_model = source("wan")
    streamed, *_ = offload(model, vram_budget_gb=1)
    expected = comfy.sample(streamed, tiny_model)
    before, lane = streamed.loaded_size(), type(placed(streamed).streaming.lane)
    assert placed(streamed).streaming.plan.streamed == ()

    def full(self: Any, size: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no slab")

    with monkeypatch.context() as patch:
        patch.setattr(lane, "allocate", full)
        assert streamed.partially_unload(streamed.offload_device, before // 8) == before
    assert placed(streamed) is None and streamed.loaded_size() == 0
    assert torch.equal(comfy.sample(streamed, tiny_model), expected)
