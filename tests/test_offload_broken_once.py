"""Faults that a fresh reader found, and that must not come back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from offload_node import DEEP, offload, on_gpu, placed
from test_offload_lifecycle import count_locked

pytestmark = pytest.mark.core


@pytest.fixture
def load(comfy: ModuleType, tiny: Callable[..., Any]) -> Callable[[], tuple[Any, Any]]:
    """load() -> (a model, what it takes to sample it)."""
    model = tiny("wan", **DEEP["wan"])
    yield lambda: (comfy.load_unet(model.path), model)
    comfy.unload_all()


def merge(comfy: ModuleType, one: Any, two: Any) -> Any:
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    return comfy.run_node(ModelMergeSimple, model1=one, model2=two, ratio=0.3)[0]


def live_bytes(sizes: set[int]) -> int:
    """Bytes of all slabs of these sizes that some tensor holds."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for size in storages.values() if size in sizes)


def test_a_merge_while_the_model_is_loaded_keeps_no_device_memory(comfy: ModuleType, load: Any) -> None:
    (source, model), (other, _) = load(), load()
    streamed, *_ = offload(source, vram_budget_gb=64, resident_blocks=3)
    comfy.sample(streamed, model)
    device = {block.bytes for block in placed(streamed).streaming.blocks}
    merged = merge(comfy, other, source)
    comfy.unload_all()
    assert live_bytes(device) == 0  # host slabs are a page longer
    assert torch.isfinite(comfy.sample(merged, model)).all()


def test_a_merge_before_the_model_streams_keeps_no_second_copy(comfy: ModuleType, load: Any) -> None:
    (source, model), (other, _) = load(), load()
    merged = merge(comfy, other, source)
    expected = comfy.sample(merged, model)
    comfy.unload_all()
    streamed, *_ = offload(source, vram_budget_gb=64, resident_blocks=0)
    comfy.sample(streamed, model)
    block = placed(streamed).streaming.blocks[0]
    slab = block.host.untyped_storage().data_ptr()
    held = [value[0][1] for key, value in merged.patches.items() if key.startswith(block.name + ".")]
    tensors = [part for value in held for part in value if isinstance(part, tuple)]
    assert tensors and all(t[0].untyped_storage().data_ptr() == slab for t in tensors)
    comfy.unload_all()
    assert torch.equal(comfy.sample(merged, model), expected)


@pytest.mark.skipif(on_gpu(), reason="counts by a double")
def test_pinned_memory_goes_with_a_branch_that_has_no_node(
    comfy: ModuleType, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = count_locked(monkeypatch)
    source, model = load()
    streamed, *_ = offload(source, vram_budget_gb=64, resident_blocks=2)
    comfy.sample(streamed, model)
    assert held
    comfy.sample(source, model)
    assert not held
    comfy.sample(streamed, model)
    assert held


@pytest.mark.skipif(on_gpu(), reason="counts by a double")
def test_pin_memory_off_holds_beside_a_branch_that_pins(
    comfy: ModuleType, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = count_locked(monkeypatch)
    source, model = load()
    pins, *_ = offload(source, vram_budget_gb=64, resident_blocks=2)
    none, _, texts = offload(source, vram_budget_gb=64, resident_blocks=2, pin_memory="off")
    comfy.sample(pins, model)
    comfy.sample(none, model)
    assert not held and "pinned host memory 0.00 MiB" in texts[-1]


@pytest.mark.parametrize(("sampler", "evaluations"), [("euler", 4), ("heun", 7)])
def test_what_is_copied_is_said_for_a_step_of_the_sampler(
    comfy: ModuleType, load: Any, sampler: str, evaluations: int
) -> None:
    source, model = load()
    streamed, _, texts = offload(source, vram_budget_gb=64, resident_blocks=2)
    comfy.sample(streamed, model, steps=4, sampler=sampler)
    streaming = placed(streamed).streaming
    # What is copied for the next sampling is said of this one too.
    assert streaming.traffic.copies == evaluations * 4 + 2
    said = float(texts[-1].split("copied ")[1].split(" ")[0])
    unit = 2**20 if "MiB a step" in texts[-1] else 2**30
    assert said * unit == pytest.approx(streaming.traffic.bytes / 4, abs=0.01 * unit)
