"""The strategy `core`. Dynamic VRAM needs a GPU (test_gpu_offload.py); here a double counts its pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfyui import inprocess
from offload_node import DEEP, GIB, on_gpu

pytestmark = pytest.mark.core

policy = inprocess.pack_module("kernels_glue.offload.core_policy")
OffloadConfig = inprocess.pack_module("kernels_glue.offload.config").OffloadConfig
Strategy = inprocess.pack_module("kernels_glue.offload.strategy").Strategy
PAGE = 32 * 2**20


class Pages:
    """What comfy_aimdo.model_vbar.ModelVBAR does with its limit: pages above it are not kept."""

    def __init__(self, wanted: int):
        self.loaded = self.wanted = wanted
        self.limit = 0

    def set_watermark_limit(self, size_bytes: int) -> None:
        self.limit = size_bytes

    def free_memory(self, size_bytes: int) -> int:
        freed = min(self.loaded, -(-size_bytes // PAGE) * PAGE)
        self.loaded -= freed
        return freed

    def loaded_size(self) -> int:
        return self.loaded


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A device of 64 GiB. `elsewhere`: in use by others; `pages`: by dynamic VRAM."""
    used = {"elsewhere": 3 * GIB, "pages": 0}
    free = lambda *_: (64 * GIB - sum(used.values()), 64 * GIB)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
    return used


@pytest.fixture
def dynamic(comfy: ModuleType, tiny: Callable[..., Any]) -> Callable[[str], tuple[Any, Any, Pages]]:
    """dynamic(family) -> (a patcher that says that it has dynamic VRAM, how to sample it, its pages)."""
    if on_gpu():
        pytest.skip("needs ComfyUI on a CPU: test_gpu_offload.py has the real thing")

    def make(family: str) -> tuple[Any, Any, Pages]:
        model = tiny(family, **DEEP[family])
        patcher, pages = comfy.load_unet(model.path), Pages(0)
        patcher.is_dynamic = lambda: True
        return patcher, model, pages

    yield make
    comfy.unload_all()


def apply(source: Any, pages: Pages, **settings: Any) -> tuple[Any, list[str]]:
    shown: list[str] = []
    config = OffloadConfig(strategy="core", **settings)
    patcher = policy.apply_core(
        source,
        config,
        Strategy("core", "as set on the node"),
        lambda report: shown.append(report.text),
    )
    patcher._vbar_get = lambda create=False: pages
    return patcher, shown


def test_the_limit_leaves_room_for_all_that_is_no_page(dynamic: Any, device: dict[str, int]) -> None:
    source, _, pages = dynamic("wan")
    patcher, _ = apply(source, pages, vram_budget_gb=12)
    patcher.model.model_loaded_weight_memory = fixed = GIB
    pages.loaded = device["pages"] = 20 * GIB
    [loaded] = patcher.get_all_callbacks(CallbacksMP.ON_LOAD)
    loaded(patcher)
    # Two streams, each with a buffer that holds the largest block, which is less than a page here.
    assert 12 * GIB - fixed - 2 * 5 * PAGE <= pages.limit <= 12 * GIB - fixed
    assert pages.limit % PAGE == 0
    assert pages.loaded <= pages.limit


def test_it_is_measured_at_every_block_and_the_limit_follows(
    comfy: ModuleType, dynamic: Any, device: dict[str, int]
) -> None:
    source, model, pages = dynamic("wan")
    patcher, shown = apply(source, pages, vram_budget_gb=8)
    seen: list[int] = []

    def grow(*_: Any) -> None:  # more than core was told
        device["pages"] = pages.loaded = min(pages.loaded + 3 * GIB, 9 * GIB if not seen else pages.limit)
        seen.append(pages.limit)

    blocks = patcher.model.diffusion_model.blocks
    handles = [block.register_forward_pre_hook(grow) for block in blocks]
    try:
        comfy.sample(patcher, model, steps=1)
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == len(blocks)
    assert seen == sorted(seen, reverse=True)
    assert "weights" in shown[-1] and "strategy core" in shown[-1]


def in_block(patcher: Any, number: int, device: dict[str, int], pages: int) -> Any:
    """Has dynamic VRAM take so many bytes when a block begins; returns the hook's handle."""
    block = patcher.model.diffusion_model.blocks[number]
    return block.register_forward_pre_hook(lambda *_: device.update(pages=pages))


def test_a_budget_that_was_exceeded_is_a_warning(
    comfy: ModuleType, dynamic: Any, device: dict[str, int]
) -> None:
    source, model, pages = dynamic("wan")
    patcher, shown = apply(source, pages, vram_budget_gb=2)
    handles = [in_block(patcher, 2, device, 3 * GIB), in_block(patcher, 3, device, GIB)]
    comfy.sample(patcher, model, steps=2)
    for handle in handles:
        handle.remove()
    assert re.search(r"device: weights 3\.0\d GiB at most \(budget 2\.00 GiB\)", shown[-1])
    assert "WARNING: the budget was exceeded" in shown[-1]


def test_a_budget_that_cannot_be_held_is_refused(
    comfy: ModuleType, dynamic: Any, device: dict[str, int]
) -> None:
    source, model, pages = dynamic("wan")
    patcher, _ = apply(source, pages, vram_budget_gb=2)
    handle = in_block(patcher, 1, device, 4 * GIB)  # and nothing that is freed changes it
    refusal = inprocess.pack_module("kernels_glue.errors").KitchenSolError
    with pytest.raises(refusal, match=r"vram_budget_gb is 2, .* 4\.0\d GiB .* Choose stream"):
        comfy.sample(patcher, model)
    handle.remove()
    assert pages.limit == 0
    assert not patcher.model.diffusion_model.blocks[0]._forward_pre_hooks


def test_blocks_are_copied_ahead_for_models_that_do_not_do_it(
    comfy: ModuleType, dynamic: Any, device: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model, pages = dynamic("wan")
    patcher, _ = apply(source, pages)
    events: list[Any] = []

    def make_prefetch_queue(queue: list[Any], device: Any, transformer_options: dict[str, Any]) -> list[Any]:
        assert transformer_options["prefetch_dynamic_vbars"]
        events.append("begin")
        return [None, *queue, None]

    def prefetch_queue_pop(queue: list[Any], device: Any, module: Any) -> None:
        queue.pop(0)
        events.append(queue[0])

    monkeypatch.setattr(policy.comfy.model_prefetch, "make_prefetch_queue", make_prefetch_queue)
    monkeypatch.setattr(policy.comfy.model_prefetch, "prefetch_queue_pop", prefetch_queue_pop)
    comfy.sample(patcher, model, steps=2)
    one = ["begin", *patcher.model.diffusion_model.blocks, None]
    assert events == one * 2
    assert not patcher.model.diffusion_model.blocks[0]._forward_pre_hooks


@pytest.mark.parametrize(("family", "itself"), [("wan", False), ("h3", True), ("flux", False)])
def test_which_models_copy_ahead_themselves(dynamic: Any, family: str, itself: bool) -> None:
    source, *_ = dynamic(family)
    assert policy.prefetches_itself(source.model.diffusion_model) is itself


def test_it_is_refused_where_it_cannot_be(comfy: ModuleType, dynamic: Any) -> None:
    refusal = inprocess.pack_module("kernels_glue.errors").KitchenSolError
    source, _, pages = dynamic("wan")
    with pytest.raises(refusal, match="resident_blocks is 3"):
        apply(source, pages, resident_blocks=3)
    source.is_dynamic = lambda: False
    with pytest.raises(refusal, match="loaded without it"):
        apply(source, pages)


def test_streaming_after_it_leaves_nothing_of_it(dynamic: Any) -> None:
    source, _, pages = dynamic("wan")
    first, _ = apply(source, pages, vram_budget_gb=8)
    first.is_dynamic = lambda: True
    apply_module = inprocess.pack_module("kernels_glue.offload.apply")
    config = OffloadConfig(strategy="stream")
    with torch.inference_mode():
        second, _ = apply_module.offload_model(first, config, lambda _: None, lambda device: None)
    left = [c for kind in second.callbacks.values() for group in kind.values() for c in group]
    owners = {getattr(getattr(callback, "__self__", None), "__class__", type(None)) for callback in left}
    assert policy.CorePolicy not in owners
    assert not second.get_all_wrappers(WrappersMP.APPLY_MODEL)
