"""The strategy `core`: ComfyUI's dynamic VRAM moves the weights, and gets the budget and a prefetch.

comfy-aimdo keeps the weights of a model in virtual memory of the device, page by page, up to a watermark;
what lies above it goes through two cast buffers at every call. ComfyUI copies whole blocks ahead for models
whose code asks for it (MiniMax-H3 and LTX audio-video); here the other models get the same.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import comfy.memory_management
import comfy.model_management as management
import comfy.model_prefetch
import torch
from comfy.patcher_extension import CallbacksMP

from ..errors import KitchenSolError
from ..model_code import codes_of
from ..report import Report, Show
from ..requirements import missing_names, refuse
from ..units import size
from . import report
from .config import NODE, OffloadConfig
from .handle import install, offload_of
from .lists import find_blocks
from .strategy import Strategy

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher

# Device memory is mapped in pages of this size (VBAR_PAGE_SIZE of comfy-aimdo).
_PAGE = 32 * 2**20
# What a cast buffer grows by beyond its block, and the pages at the edge.
_MARGIN = 3 * _PAGE
_PREFETCH = "make_prefetch_queue"
_LIMIT = "comfy_aimdo.model_vbar.ModelVBAR.set_watermark_limit"


@dataclass
class _State:
    """What goes on with one model; several GPUs have a copy of it each.

    Attributes:
        baseline: bytes in use on the device that are not of this model.
        watermark: the limit that core has for its pages, in bytes.
        most: the highest use that was measured at a block of this sampling.
        queue: core's prefetch queue of the evaluation that runs.
    """

    baseline: int = 0
    watermark: int = 0
    most: int = 0
    steps: int = 0
    hooks: list[Any] = field(default_factory=list)
    queue: list[Any] | None = None

    def unhook(self) -> None:
        """Takes the hooks off the blocks."""
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()
        self.queue = None


@dataclass
class CorePolicy:
    """One application of the node to a model with dynamic VRAM. Clones of the patcher share it.

    Attributes:
        prefetches: the model's blocks are copied ahead by this node, because its own code does not.
        strategy: the chosen one.
    """

    config: OffloadConfig
    prefetches: bool
    strategy: Strategy
    show: Show
    _states: weakref.WeakKeyDictionary[Any, _State] = field(default_factory=weakref.WeakKeyDictionary)

    def _of(self, model: BaseModel) -> _State:
        return self._states.setdefault(model, _State())

    # --- the budget -----------------------------------------------------------------------------

    def loaded(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_LOAD: core has laid out the weights, and forgets limits after each node."""
        budget, vbar = self.config.budget, patcher._vbar_get()
        if vbar is None:
            return
        state = self._of(patcher.model)
        state.baseline = _outside_of_torch(patcher) - vbar.loaded_size() - _cast_buffers()
        if budget is not None:
            # Core casts through its streams in turn, each with a buffer.
            buffers = max(1, management.NUM_STREAMS) * (_largest_block(patcher) + _MARGIN)
            _limit(state, vbar, budget - patcher.model.model_loaded_weight_memory - buffers)

    def check(self, patcher: ModelPatcher) -> None:
        """Measures the weights on the device, wherever they are, and lowers the limit if need be.

        Raises:
            KitchenSolError: the budget cannot be held.
        """
        state, budget, vbar = self._of(patcher.model), self.config.budget, patcher._vbar_get()
        outside = _outside_of_torch(patcher) - state.baseline
        used = max(0, outside) + patcher.model.model_loaded_weight_memory
        state.most = max(state.most, used)
        if budget is None or used <= budget or vbar is None:
            return
        if state.watermark == 0 and used > budget + _MARGIN:
            raise KitchenSolError(
                NODE,
                f"vram_budget_gb is {self.config.vram_budget_gb:g}, and with strategy 'core' ComfyUI has"
                f" {size(used)} of weights and buffers on the device even where it keeps none.",
                "Choose stream, or raise vram_budget_gb.",
            )
        _limit(state, vbar, state.watermark - (used - budget) - _PAGE)

    # --- a sampling -----------------------------------------------------------------------------

    def begin(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_PRE_RUN: the hooks are on the blocks while this patcher is sampled, and only then."""
        state = self._of(patcher.model)
        state.unhook()
        state.most = state.steps = 0
        for _, module in find_blocks(patcher.model.diffusion_model).blocks:
            state.hooks.append(module.register_forward_pre_hook(self._hook(patcher)))

    def step(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_PREPARE_STATE."""
        self._of(patcher.model).steps += 1

    def end(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_CLEANUP."""
        state = self._of(patcher.model)
        state.unhook()
        if state.steps:
            said = self._report(patcher, state)
            said.log()
            self.show(said)
            state.steps = 0

    def _report(self, patcher: ModelPatcher, state: _State) -> Report:
        ahead = "this node" if self.prefetches else "the model itself"
        if self.prefetches and not management.NUM_STREAMS:
            ahead = ""
        lines = report.core_lines(state.most, patcher.pinned_memory_size(), self.config.budget, ahead)
        return Report.of(NODE, lines, [report.strategy_line(self.strategy)])

    def apply_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrapper of core's apply_model: one evaluation begins and ends here."""
        model = executor.class_obj
        if not self.prefetches or model.current_patcher is None:
            return executor(*args, **kwargs)
        state, device = self._of(model), model.current_patcher.load_device
        wanted = {"prefetch_dynamic_vbars": True}
        state.queue = comfy.model_prefetch.make_prefetch_queue([], device, wanted)
        try:
            return executor(*args, **kwargs)
        finally:
            if state.queue is not None:
                _advance(state, None, device)
                state.queue = None

    def _hook(self, patcher: ModelPatcher) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            _before_block(self, patcher, module)

        return hook


# Compiled code cannot look into this: torch.compile leaves it before a block and goes on within.
@torch.compiler.disable
def _before_block(policy: CorePolicy, patcher: ModelPatcher, module: torch.nn.Module) -> None:
    policy.check(patcher)
    state = policy._of(patcher.model)
    if state.queue is not None:
        _advance(state, module, patcher.load_device)


def _advance(state: _State, module: torch.nn.Module | None, device: torch.device) -> None:
    """Core's queue goes on to a block: it is copied while the device still computes the last one."""
    state.queue[1:] = [None] if module is None else [module, None]
    comfy.model_prefetch.prefetch_queue_pop(state.queue, device, module)


def _limit(state: _State, vbar: Any, allowed: int) -> None:
    state.watermark = max(0, allowed // _PAGE * _PAGE)
    vbar.set_watermark_limit(state.watermark)
    if (over := vbar.loaded_size() - state.watermark) > 0:
        vbar.free_memory(over)


def _largest_block(patcher: ModelPatcher) -> int:
    """Bytes of the block that fills a cast buffer the most."""
    found = find_blocks(patcher.model.diffusion_model)
    return max(sum(map(_cast_bytes, module.modules())) for _, module in found.blocks)


def _outside_of_torch(patcher: ModelPatcher) -> int:
    """Bytes in use on the device that are not torch's: aimdo's pages and buffers, and what others have."""
    free, total = torch.cuda.mem_get_info(patcher.load_device)
    return total - free - torch.cuda.memory_reserved(patcher.load_device)


def _cast_buffers() -> int:
    return sum(buffer.size() for buffer in management.STREAM_AIMDO_CAST_BUFFERS.values())


def apply_core(source: ModelPatcher, config: OffloadConfig, strategy: Strategy, show: Show) -> ModelPatcher:
    """A clone of a patcher with dynamic VRAM that keeps to the budget.

    Raises:
        KitchenSolError: the model is loaded without dynamic VRAM, or a setting is one of streaming alone.
    """
    if offload_of(source) is not None:
        raise KitchenSolError(
            NODE,
            "strategy is 'core', and the model comes from another Layerwise Offload that streams it.",
            "Remove the one before this node.",
        )
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
    policy = CorePolicy(config, not prefetches_itself(source.model.diffusion_model), strategy, show)
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
    return any(_PREFETCH in code.co_names for code in codes_of(diffusion_model))


def _cast_bytes(module: torch.nn.Module) -> int:
    if not hasattr(module, "comfy_cast_weights"):
        return 0
    weights = [getattr(module, "weight", None), getattr(module, "bias", None)]
    return comfy.memory_management.vram_aligned_size(weights)
