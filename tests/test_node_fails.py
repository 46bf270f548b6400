"""Cancel and out-of-memory in the middle of a conversion leave nothing behind, and the next run works."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui.builders import TinyModel
from int8_node import int8_layers, on_quantize, quantize

pytestmark = pytest.mark.core

Load = Callable[[], Any]


@pytest.fixture(autouse=True)
def as_in_a_node() -> Iterator[None]:
    """ComfyUI's executor runs nodes, loaders and samplers under inference mode."""
    import comfy.model_management as management

    with torch.inference_mode():
        yield
    # A Cancel that nobody took must not reach the next test.
    management.interrupt_current_processing(False)


@pytest.fixture
def model(tiny: Callable[..., TinyModel]) -> TinyModel:
    return tiny("wan")


@pytest.fixture
def load(comfy: ModuleType, model: TinyModel) -> Load:
    """Loads the model anew, with no other test's copies about."""
    comfy.unload_all()
    return lambda: comfy.load_unet(model.path)


def sample(comfy: ModuleType, patcher: Any, model: TinyModel) -> torch.Tensor:
    return comfy.sample(patcher, model, steps=1)


def big_tensors() -> set[int]:
    """Ids of all tensors as large as a tiny model's smallest quantized weight."""
    gc.collect()
    tensors = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    return {id(tensor) for tensor in tensors if tensor.numel() >= 256 * 256}


def fails_and_leaves_nothing(
    comfy: ModuleType,
    model: TinyModel,
    load: Load,
    expected: type[BaseException],
    layers: int,
    work: list[int],
) -> Any:
    """Run the node, which must raise `expected` at layer `layers`; compare before and after; the source."""
    source = load()
    bits = sample(comfy, source, model)
    before, at_start = big_tensors(), len(work)

    def run() -> None:
        with pytest.raises(expected):
            quantize(comfy, source)

    run()
    assert len(work) - at_start == layers
    assert big_tensors() == before
    assert torch.equal(sample(comfy, source, model), bits)
    assert big_tensors() == before
    return source


@pytest.fixture
def expected_bits(comfy: ModuleType, model: TinyModel, load: Load) -> torch.Tensor:
    """Samples of the node's result; the check of the kernel, which quantizes too, is done after this."""
    return sample(comfy, quantize(comfy, load())[0], model)


@pytest.mark.parametrize("layer", [1, 7, 19])
def test_cancel_between_layers_leaves_nothing(
    comfy: ModuleType,
    model: TinyModel,
    load: Load,
    expected_bits: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    import comfy.model_management as management

    done: list[int] = []

    def cancel_at_layer() -> None:
        done.append(1)
        if len(done) == layer:
            management.interrupt_current_processing(True)

    with monkeypatch.context() as patch:
        on_quantize(patch, cancel_at_layer)
        interrupted = management.InterruptProcessingException
        source = fails_and_leaves_nothing(comfy, model, load, interrupted, layer, done)
    assert not management.processing_interrupted()
    assert torch.equal(sample(comfy, quantize(comfy, source)[0], model), expected_bits)


def test_cancel_from_the_progress_bar_stops_after_one_layer(
    comfy: ModuleType, load: Load, expected_bits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management as management
    from comfy import utils

    seen: list[tuple[int, int]] = []

    def hook(value: int, total: int, preview: Any, node_id: Any = None) -> None:
        seen.append((value, total))
        management.interrupt_current_processing(True)

    layers = len(int8_layers(quantize(comfy, load())[0]))
    done: list[int] = []
    on_quantize(monkeypatch, lambda: done.append(1))
    previous = utils.PROGRESS_BAR_HOOK
    utils.set_progress_bar_global_hook(hook)
    try:
        with pytest.raises(management.InterruptProcessingException):
            quantize(comfy, load())
    finally:
        utils.set_progress_bar_global_hook(previous)
    # The bar counts layers; the first one is announced, done, and the flag is seen before the second.
    assert seen == [(1, layers)] and len(done) == 1


@pytest.mark.parametrize("layer", [1, 7, 20])
def test_out_of_memory_in_the_middle_leaves_nothing(
    comfy: ModuleType,
    model: TinyModel,
    load: Load,
    expected_bits: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    done: list[int] = []

    def fail_at_layer() -> None:
        done.append(1)
        if len(done) == layer:
            raise torch.OutOfMemoryError("tried to allocate more than there is")

    with monkeypatch.context() as patch:
        on_quantize(patch, fail_at_layer)
        source = fails_and_leaves_nothing(comfy, model, load, torch.OutOfMemoryError, layer, done)
    assert torch.equal(sample(comfy, quantize(comfy, source)[0], model), expected_bits)
