"""Layerwise Offload on a real GPU: tiny models and six blocks of MiniMax-H3's width, float and
INT8, with LoRA and without. Run with dynamic VRAM and without: `python tools/dev.py test --gpu`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from comfyui.lora import write_lora
from int8_node import LORA_A, quantize, static
from offload_node import DEEP, GIB, budget_for, offload, placed, sizes

pytestmark = pytest.mark.gpu

MIB = 2**20
MODELS = {
    # fp16: core loads a bf16 Wan for a clone without dynamic VRAM in two dtypes, and cannot run it.
    "wan": ("wan", {**DEEP["wan"], "dtype": torch.float16}),
    "h3": ("h3", DEEP["h3"]),
    "flux": ("flux", DEEP["flux"]),
    "h3_wide": (
        "h3",
        {
            "hidden_size": 5376,
            "num_layers": 6,
            "num_attention_heads": 56,
            "ffn_hidden_size": 14336,
            "time_embed_dim": 64,
        },
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tiny: Callable[..., TinyModel]) -> TinyModel:
    family, arguments = MODELS[request.param]
    return tiny(family, **arguments)


@pytest.fixture(params=["float", "INT8"])
def source(request: pytest.FixtureRequest, comfy: ModuleType, model: TinyModel) -> Iterator[Any]:
    with torch.inference_mode():
        loaded = comfy.load_unet(model.path)
        yield loaded if request.param == "float" else quantize(comfy, loaded)[0]
        del loaded
        comfy.unload_all()


@pytest.fixture(params=["no LoRA", "LoRA"])
def patched(
    request: pytest.FixtureRequest, comfy: ModuleType, source: Any, model: TinyModel, tmp_path: Path
) -> Any:
    if request.param == "no LoRA":
        return source
    path = tmp_path / "lora.safetensors"
    write_lora(path, model, layers=LORA_A[model.family], seed=1)
    return comfy.apply_lora(source, path, 0.7)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """slow_copies(): from now on every copy takes some 20 ms longer, and the compute does not."""
    track = inprocess.pack_module("kernels_glue.offload.lane")._Track
    copy = track.copy

    def slowed(self: Any, *args: Any) -> Any:
        for stream in self._streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(40_000_000)
        return copy(self, *args)

    return lambda: monkeypatch.setattr(track, "copy", slowed)


def test_streamed_blocks_compute_the_bits_of_resident_ones(
    comfy: ModuleType, patched: Any, model: TinyModel, slow_copies: Callable[[], None]
) -> None:
    comfy.sample(patched, model)  # the first sampling of a process may differ by other libraries' choices
    expected = comfy.sample(static(patched), model)
    comfy.unload_all()
    blocks = len(sizes(patched).blocks)

    def check(slots: int, share: float, **settings: Any) -> None:
        streamed, *_ = offload(patched, vram_budget_gb=64, strategy="stream", **settings)
        assert torch.equal(comfy.sample(streamed, model), expected), settings
        plan = placed(streamed).streaming.plan
        assert (plan.slots, len(plan.streamed) / blocks >= share) == (slots, True)

    for prefetch in (0, 1, 2, blocks):
        check(min(prefetch + 1, blocks), 1.0, prefetch_blocks=prefetch, resident_blocks=0)
    check(2, 0.5, resident_blocks=blocks // 2)
    check(2, 0.5, resident_blocks=blocks // 2, pin_memory="off")
    slow_copies()
    check(1, 1.0, prefetch_blocks=0, resident_blocks=0)
    check(3, 0.5, prefetch_blocks=2, resident_blocks=2)
    check(3, 0.5, prefetch_blocks=2, resident_blocks=2, pin_memory="off")


def test_memory_returns_to_the_start(comfy: ModuleType, source: Any, model: TinyModel) -> None:
    import comfy.model_management as management

    streamed, *_ = offload(source, vram_budget_gb=64, resident_blocks=2, strategy="stream")
    comfy.unload_all()
    device, pinned = torch.cuda.memory_allocated(), management.TOTAL_PINNED_MEMORY
    for _ in range(3):
        comfy.sample(streamed, model)
    assert pinned < management.TOTAL_PINNED_MEMORY
    comfy.unload_all()
    assert torch.cuda.memory_allocated() - device < MIB
    assert pinned == management.TOTAL_PINNED_MEMORY
    comfy.sample(streamed, model)
    del streamed
    gc.collect()
    comfy.unload_all()
    gc.collect()
    assert torch.cuda.memory_allocated() - device < MIB
    assert pinned == management.TOTAL_PINNED_MEMORY


def test_the_budget_holds_device_wide_at_every_block(
    comfy: ModuleType, source: Any, model: TinyModel
) -> None:
    if sizes(source).total < 256 * MIB:
        pytest.skip("smaller than what device memory is handed out by")
    whole, *_ = offload(source, vram_budget_gb=64, strategy="stream")
    budget = budget_for(source, resident=2)
    streamed, *_ = offload(source, vram_budget_gb=budget, strategy="stream")
    comfy.sample(static(source), model)  # kernels and workspaces come with the first use
    comfy.unload_all()
    outside_of_torch = _used() - torch.cuda.memory_reserved()

    def weights(patcher: Any, activations: list[int] | None) -> list[int]:
        found = []

        def look(*_: Any) -> None:
            base = _used() - torch.cuda.memory_reserved() - outside_of_torch
            found.append(base + torch.cuda.memory_allocated())

        blocks = patcher.model.diffusion_model.blocks
        handles = [block.register_forward_pre_hook(look) for block in blocks]
        try:
            comfy.sample(patcher, model, steps=2)
        finally:
            for handle in handles:
                handle.remove()
        loaded = patcher.loaded_size()
        comfy.unload_all()
        return (
            [x - loaded for x in found]
            if activations is None
            else [x - a for x, a in zip(found, activations, strict=True)]
        )

    activations = weights(whole, None)
    peaks = weights(streamed, activations)
    assert max(peaks) <= budget * GIB + 8 * MIB, [p / GIB for p in peaks]


def _used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_core_keeps_to_a_budget_and_to_the_bits(comfy: ModuleType, source: Any, model: TinyModel) -> None:
    if not source.is_dynamic() or sizes(source).total < 256 * MIB:
        pytest.skip("needs dynamic VRAM, and more than it pages by")
    expected = comfy.sample(source, model)
    comfy.unload_all()
    budget = budget_for(source, resident=2)
    helped, _, texts = offload(source, vram_budget_gb=budget, strategy="core")
    assert torch.equal(comfy.sample(helped, model), expected)
    assert "WARNING" not in texts[-1] and "strategy core" in texts[-1]
    assert helped.loaded_size() <= budget * GIB
