"""One measurement: samples with a patcher and watches its evaluations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import comfy.model_management
import comfy.sampler_helpers
import torch
from comfy.patcher_extension import WrappersMP
from comfyui import inprocess

from ..models import BenchModel
from .device import Cpu, Cuda, Memory
from .plan import UNTIMED_STEPS, reserve_of_partial

_KEY = "kitchen_sol_bench"


@dataclass
class Watch:
    """What was seen while sampling.

    Attributes:
        evaluations: how many there will be. Memory is looked at in the first and in the last one.
        marks: the start of each evaluation.
        blocks: memory at each visit of a block, of the first and then of the last evaluation.
        shapes: of the latents.
        pinned: page-locked bytes, in the last evaluation.
        traffic: says how many bytes the node has copied up to now.
        copied: what it said at the start of each evaluation.
    """

    device: Cuda | Cpu
    evaluations: int
    marks: list[Any] = field(default_factory=list)
    blocks: list[Memory] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    pinned: int = 0
    traffic: Callable[[], int] = lambda: 0
    copied: list[int] = field(default_factory=list)

    def __call__(self, executor: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """A DIFFUSION_MODEL wrapper."""
        self.marks.append(self.device.mark())
        self.copied.append(self.traffic())
        self.shapes = [tuple(part.shape) for part in (x if isinstance(x, (list, tuple)) else [x])]
        if len(self.marks) not in (1, self.evaluations):
            return executor(x, *args, **kwargs)
        self.pinned = comfy.model_management.TOTAL_PINNED_MEMORY
        with self._looking(executor.class_obj):
            out = executor(x, *args, **kwargs)
        # Dynamic VRAM pins as it goes.
        self.pinned = max(self.pinned, comfy.model_management.TOTAL_PINNED_MEMORY)
        return out

    @contextmanager
    def _looking(self, model: torch.nn.Module) -> Iterator[None]:
        def look(*_: Any) -> None:
            self.blocks.append(self.device.memory())

        hooks = [block.register_forward_pre_hook(look) for _, block in blocks_of(model)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(frozen=True)
class Measured:
    """step: median seconds between two evaluations, of `steps`; loaded: bytes of weights as core counts them.

    copied: median bytes that the node copied in these steps.

    buffer: bytes that core's partial loading sets aside for casting. finite: the result has no NaN.
    """

    step: float
    steps: list[float]
    tokens: int
    blocks: list[Memory]
    pinned: int
    loaded: int
    buffer: int
    finite: bool
    seconds: float
    copied: float


def blocks_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The repeated blocks of a diffusion model, as (name of the list, block)."""
    find = inprocess.pack_module("kernels_glue.blocks").find_block_lists
    return [(name, block) for name in find(model) for block in model.get_submodule(name).children()]


def measure(
    patcher: Any,
    model: BenchModel,
    length: str,
    timed: int,
    device: Cuda | Cpu,
    prepare: Callable[..., Any] | None = None,
) -> Measured:
    """Samples with `timed` timed steps between two untimed ones. The patcher stays loaded.

    prepare: a PREPARE_SAMPLING wrapper, called before core loads the model.
    """
    watched = patcher.clone()
    watch = Watch(device, timed + UNTIMED_STEPS, traffic=lambda: _traffic(watched))
    watched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, _KEY, watch)
    if prepare is not None:
        watched.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, _KEY, prepare)
    started = time.perf_counter()
    out = inprocess.sample(watched, model.sampling(length), steps=watch.evaluations)
    seconds = time.perf_counter() - started
    if len(watch.marks) != watch.evaluations:
        raise RuntimeError(f"{len(watch.marks)} evaluations instead of {watch.evaluations}")
    steps = device.seconds(watch.marks)[1:]
    return Measured(
        step=statistics.median(steps),
        steps=steps,
        tokens=model.tokens(watch.shapes),
        blocks=watch.blocks,
        pinned=watch.pinned,
        loaded=watched.loaded_size(),
        buffer=getattr(watched.model, "model_offload_buffer_memory", 0),
        finite=bool(out.isfinite().all()),
        seconds=seconds,
        copied=statistics.median(b - a for a, b in pairwise(watch.copied[1:])),
    )


def _traffic(patcher: Any) -> int:
    placed = inprocess.pack_module("kernels_glue.offload.handle").placed_on(patcher.model)
    return 0 if placed is None else placed.streaming.traffic.bytes


@contextmanager
def partial_budget(budget: float) -> Iterator[Callable[..., Any]]:
    """A PREPARE_SAMPLING wrapper with which core's partial loading gets `budget` bytes.

    The reserve is set right before core reads it, because only there the need for memory is known.
    No model may be loaded.
    """
    before = comfy.model_management.EXTRA_RESERVED_VRAM

    def prepare(executor: Any, patcher: Any, noise_shape: Any, conds: Any, *args: Any, **kwargs: Any) -> Any:
        _, required = comfy.sampler_helpers.estimate_memory(patcher, noise_shape, conds)
        free = comfy.model_management.get_free_memory(patcher.load_device) + patcher.loaded_size()
        comfy.model_management.EXTRA_RESERVED_VRAM = reserve_of_partial(free, required, budget)
        return executor(patcher, noise_shape, conds, *args, **kwargs)

    try:
        yield prepare
    finally:
        comfy.model_management.EXTRA_RESERVED_VRAM = before


@contextmanager
def dynamic_reserve(reserve: float) -> Iterator[None]:
    """What --reserve-vram sets, in a running process: its activations differ by length."""
    import comfy_aimdo.control

    before = comfy.model_management.EXTRA_RESERVED_VRAM
    set_headroom = getattr(comfy_aimdo.control.lib, "set_simple_vram_headroom", None)

    def put(value: float) -> None:
        comfy.model_management.EXTRA_RESERVED_VRAM = value
        if set_headroom is not None:
            set_headroom(int(value))

    put(reserve)
    try:
        yield
    finally:
        put(before)


def clear() -> None:
    """Leave nothing of a measurement on the device."""
    inprocess.unload_all()
    # Core's cast buffers would be counted as weights of the next row.
    comfy.model_management.reset_cast_buffers()
    comfy.model_management.soft_empty_cache()
