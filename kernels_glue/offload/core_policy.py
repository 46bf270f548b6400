"""The strategy `core`: ComfyUI's dynamic VRAM moves the weights, and gets the budget and a prefetch.

comfy-aimdo keeps the weights of a model in virtual memory of the device, page by page, up to a watermark;
what lies above it goes through two cast buffers at every call. ComfyUI copies whole blocks ahead for models
whose code asks for it (MiniMax-H3 and LTX audio-video); here the other models get the same.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import comfy.memory_management
import comfy.model_management as management
import comfy.model_prefetch
import torch
from comfy.patcher_extension import CallbacksMP

from ..errors import KitchenSolError
from ..requirements import missing_names, refuse
from . import report
from .config import NODE, OffloadConfig
from .handle import install
from .lists import find_blocks
from .plan import gib
from .session import Show

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# Device memory is mapped in pages of this size (VBAR_PAGE_SIZE of comfy-aimdo).
_PAGE = 32 * 2**20
# What a cast buffer grows by beyond its block, and the pages at the edge.
_MARGIN = 3 * _PAGE
_PREFETCH = "make_prefetch_queue"
_LIMIT = "comfy_aimdo.model_vbar.ModelVBAR.set_watermark_limit"


@dataclass
class CorePolicy:
    """One application of the node to a model with dynamic VRAM. Clones of the patcher share it.

    Attributes:
        prefetches: the model's blocks are copied ahead by this node, because core does not.
        why: the chosen strategy and the reason.
    """

    config: OffloadConfig
    prefetches: bool
    why: str
    show: Show
    most: int = 0
    steps: int = 0
    _hooks: list[Any] = field(default_factory=list)
    _queue: list[Any] | None = None
    _elsewhere: int = 0
    _room: int = 0

    # --- the budget -----------------------------------------------------------------------------

    def loaded(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_LOAD: core has laid out the weights, and forgets limits after each node."""
        budget, vbar = self.config.budget, patcher._vbar_get()
        if vbar is None:
            return
        self._elsewhere = _outside_of_torch(patcher) - vbar.loaded_size() - _cast_buffers()
        if budget is not None:
            # Core casts through its streams in turn, each with a buffer.
            buffers = max(1, management.NUM_STREAMS) * (self._largest_block(patcher) + _MARGIN)
            self._limit(vbar, budget - patcher.model.model_loaded_weight_memory - buffers)

    def _limit(self, vbar: Any, room: int) -> None:
        self._room = max(0, room // _PAGE * _PAGE)
        vbar.set_watermark_limit(self._room)
        if (over := vbar.loaded_size() - self._room) > 0:
            vbar.free_memory(over)

    def _largest_block(self, patcher: ModelPatcher) -> int:
        """Bytes of the block that fills a cast buffer the most."""
        found = find_blocks(patcher.model.diffusion_model)
        return max(sum(map(_cast_bytes, module.modules())) for _, module in found.blocks)

    def _check(self, patcher: ModelPatcher) -> None:
        """Measures the weights on the device, wherever they are, and lowers the limit if need be."""
        outside = _outside_of_torch(patcher) - self._elsewhere
        used = max(0, outside) + patcher.model.model_loaded_weight_memory
        self.most = max(self.most, used)
        budget, vbar = self.config.budget, patcher._vbar_get()
        if budget is not None and used > budget and vbar is not None:
            self._limit(vbar, self._room - (used - budget) - _PAGE)

    # --- a sampling -----------------------------------------------------------------------------

    def begin(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_PRE_RUN: the hooks are on the blocks while this patcher is sampled, and only then."""
        self._unhook()
        self.most = self.steps = 0
        for _, module in find_blocks(patcher.model.diffusion_model).blocks:
            self._hooks.append(module.register_forward_pre_hook(self._hook(patcher)))

    def step(self, *_: Any) -> None:
        """ON_PREPARE_STATE."""
        self.steps += 1

    def end(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_CLEANUP."""
        self._unhook()
        if self.steps:
            self.show(report.assemble(self._lines(patcher)))
            self.steps = 0

    def _lines(self, patcher: ModelPatcher) -> list[str]:
        limit = "auto" if self.config.budget is None else gib(self.config.budget)
        pinned = gib(patcher.pinned_memory_size())
        lines = [f"device: weights {gib(self.most)} at most (budget {limit}); pinned host memory {pinned}"]
        lines.append(self.why)
        if self.config.budget is not None and self.most > self.config.budget:
            lines.append("WARNING: the budget was exceeded; use strategy stream")
        for line in lines:
            level = logging.WARNING if line.startswith("WARNING") else logging.INFO
            logging.log(level, "%s: %s", NODE, line)
        return lines

    def apply_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrapper of core's apply_model: one evaluation begins and ends here."""
        if not self.prefetches or executor.class_obj.current_patcher is None:
            return executor(*args, **kwargs)
        device = executor.class_obj.current_patcher.load_device
        wanted = {"prefetch_dynamic_vbars": True}
        self._queue = comfy.model_prefetch.make_prefetch_queue([], device, wanted)
        try:
            return executor(*args, **kwargs)
        finally:
            if self._queue is not None:
                self._advance(None, device)
                self._queue = None

    def _hook(self, patcher: ModelPatcher) -> Any:
        device = patcher.load_device

        def before(module: torch.nn.Module, args: Any) -> None:
            _outside_of_compiled_code(self, patcher, module, device)

        return before

    def _advance(self, module: torch.nn.Module | None, device: torch.device) -> None:
        """Core's queue goes on to a block: it is copied while the device still computes the last one."""
        self._queue[1:] = [None] if module is None else [module, None]
        comfy.model_prefetch.prefetch_queue_pop(self._queue, device, module)

    def _unhook(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._queue = None


@torch.compiler.disable
def _outside_of_compiled_code(
    policy: CorePolicy, patcher: ModelPatcher, module: torch.nn.Module, device: torch.device
) -> None:
    policy._check(patcher)
    if policy._queue is not None:
        policy._advance(module, device)


def _outside_of_torch(patcher: ModelPatcher) -> int:
    """Bytes in use on the device that are not torch's: aimdo's pages and buffers, and what others have."""
    free, total = torch.cuda.mem_get_info(patcher.load_device)
    return total - free - torch.cuda.memory_reserved(patcher.load_device)


def _cast_buffers() -> int:
    return sum(buffer.size() for buffer in management.STREAM_AIMDO_CAST_BUFFERS.values())


def apply_core(source: ModelPatcher, config: OffloadConfig, why: str, show: Show) -> ModelPatcher:
    """A clone of a patcher with dynamic VRAM that keeps to the budget.

    Raises:
        KitchenSolError: the model is loaded without dynamic VRAM, or a setting is one of streaming alone.
    """
    if not source.is_dynamic():
        raise KitchenSolError(
            NODE,
            "strategy is 'core', which helps ComfyUI's dynamic VRAM, and this model is loaded without it.",
            "Choose stream or auto, or start ComfyUI without the options that turn dynamic VRAM off.",
        )
    if config.budget is not None:
        refuse(NODE, missing_names([_LIMIT]))
    if config.resident_blocks >= 0:
        raise KitchenSolError(
            NODE,
            f"resident_blocks is {config.resident_blocks}, but with strategy 'core' ComfyUI chooses them.",
            "Set it to -1, or choose stream.",
        )
    patcher = source.clone()
    policy = CorePolicy(config, not prefetches_itself(source.model.diffusion_model), why, show)
    install(
        patcher,
        {
            CallbacksMP.ON_LOAD: policy.loaded,
            CallbacksMP.ON_PRE_RUN: policy.begin,
            CallbacksMP.ON_PREPARE_STATE: policy.step,
            CallbacksMP.ON_CLEANUP: policy.end,
        },
        policy.apply_model,
    )
    return patcher


def prefetches_itself(diffusion_model: torch.nn.Module) -> bool:
    """Whether the model's own code copies blocks ahead under dynamic VRAM."""
    for base in type(diffusion_model).__mro__:
        for member in vars(base).values():
            if _PREFETCH in getattr(getattr(member, "__code__", None), "co_names", ()):
                return True
    return False


def _cast_bytes(module: torch.nn.Module) -> int:
    if not hasattr(module, "comfy_cast_weights"):
        return 0
    weights = [getattr(module, "weight", None), getattr(module, "bias", None)]
    return comfy.memory_management.vram_aligned_size(weights)
