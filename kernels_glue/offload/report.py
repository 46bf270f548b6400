"""What the node says, from values that others found. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..report import Line, detail, headline, note, warning
from ..units import size
from .config import OffloadConfig
from .plan import Plan, Sizes
from .strategy import Strategy


@dataclass(frozen=True)
class Sampled:
    """What a sampling was like.

    Attributes:
        steps: of the sampler.
        seconds: from its beginning to its end.
        copied: bytes that went to the device for streamed blocks.
        waited: seconds that the compute stood still for copies.
        device: bytes of all weights on the device.
        pinned: bytes of page-locked host memory.
    """

    steps: int
    seconds: float
    copied: int
    waited: float
    device: int
    pinned: int


def passed_line(device: str) -> Line:
    """Nothing can be streamed to this device."""
    return headline(
        f"passed through unchanged: this model is for {device}, and streaming needs CUDA",
        passed_through=True,
        device=device,
    )


def found_line(lists: Sequence[tuple[str, int]], sizes: Sizes) -> Line:
    """The model's blocks."""
    names = ", ".join(f"{name} {count}" for name, count in lists)
    blocks = sum(sizes.blocks)
    return headline(
        f"blocks: {names}; {size(blocks)} of weights, and {size(sizes.outside)} outside of them",
        block_lists=dict(lists),
        bytes_in_blocks=blocks,
        bytes_outside=sizes.outside,
    )


def wanted_line(config: OffloadConfig) -> Line:
    """The settings, before anything is placed."""
    budget = "auto (what is free when sampling starts)" if config.budget is None else size(config.budget)
    resident = "as many as fit" if config.resident_blocks < 0 else str(config.resident_blocks)
    return detail(
        f"budget {budget}; resident blocks: {resident}; blocks copied ahead: {config.prefetch_blocks}",
        budget=config.budget,
        resident_blocks=None if config.resident_blocks < 0 else config.resident_blocks,
        prefetch_blocks=config.prefetch_blocks,
    )


def strategy_line(strategy: Strategy) -> Line:
    """Who moves the weights, and why."""
    name, why = strategy.name, strategy.why
    return detail(f"strategy {name}: {why}", strategy=name, strategy_because=why)


def plan_line(plan: Plan, budget: int | None) -> Line:
    """Where the blocks are."""
    limit = _limit(budget)
    streamed, resident = len(plan.streamed), len(plan.resident)
    if streamed:
        text = f"streaming: {streamed} of {streamed + resident} blocks, {resident} resident (budget {limit})"
    else:
        text = f"all {resident} blocks resident (budget {limit})"
    return detail(text, streamed=streamed, resident=resident, budget=budget)


def placed_line(plan: Plan, device: int, pinned: int, seconds: float) -> Line:
    """For the log, when a model was loaded."""
    streamed, resident = len(plan.streamed), len(plan.resident)
    return detail(
        f"{resident} blocks resident, {streamed} streamed through {plan.slots} slabs;"
        f" weights on the device {size(device)}, pinned host memory {size(pinned)};"
        f" placed in {seconds:.1f} s",
        streamed=streamed,
        resident=resident,
        slabs=plan.slots,
        bytes_on_device=device,
        bytes_pinned=pinned,
        placed_in_seconds=seconds,
    )


def sampled_lines(sampled: Sampled, plan: Plan) -> Iterator[Line]:
    """What moved, and what it cost."""
    if plan.streamed and sampled.steps:
        share = sampled.waited / sampled.seconds if sampled.seconds else 0.0
        copied, waited = sampled.copied / sampled.steps, sampled.waited / sampled.steps
        yield detail(
            f"copied {size(copied)} a step; the compute waited"
            f" {waited:.3f} s a step for copies ({share:.0%})",
            steps=sampled.steps,
            bytes_a_step=copied,
            waited_seconds_a_step=waited,
            waited_share=share,
        )
    slab_bytes = plan.slots * plan.slot_bytes
    slabs = f" (slabs {size(slab_bytes)})" if plan.slots else ""
    yield detail(
        f"device: weights {size(sampled.device)}{slabs}; pinned host memory {size(sampled.pinned)}",
        bytes_on_device=sampled.device,
        bytes_in_slabs=slab_bytes,
        bytes_pinned=sampled.pinned,
        seconds=sampled.seconds,
    )


def core_lines(most: int, pinned: int, budget: int | None, ahead: str) -> Iterator[Line]:
    """What ComfyUI's dynamic VRAM made of it.

    Args:
        most: bytes of weights on the device at most.
        pinned: bytes of page-locked host memory.
        ahead: who copies blocks ahead, or empty where nobody can.
    """
    yield detail(
        f"device: weights {size(most)} at most (budget {_limit(budget)}); pinned host memory {size(pinned)}",
        bytes_on_device=most,
        bytes_pinned=pinned,
        budget=budget,
    )
    if ahead:
        yield detail(f"blocks are copied ahead by {ahead}", copied_ahead_by=ahead)
    else:
        yield note(
            "no blocks are copied ahead, because ComfyUI runs without its copy streams", copied_ahead_by=None
        )
    if budget is not None and most > budget:
        yield warning(
            "the budget was exceeded for a moment; strategy stream keeps to it", budget_exceeded=True
        )


def little_room_line(allowed: float) -> Line:
    """ComfyUI has less room than the least that a plan needs."""
    return note(
        f"ComfyUI finds room for {size(allowed)} of weights; the smallest plan is used", allowed=allowed
    )


def less_room_line(budget: int, allowed: float) -> Line:
    """ComfyUI has less room than the user gave."""
    return note(
        f"of the budget of {size(budget)} only {size(allowed)} are free beside the activations",
        budget=budget,
        allowed=allowed,
    )


def unpinned_line(left: int, total: int, why: str) -> Line:
    """Streamed blocks in ordinary memory."""
    return note(
        f"{left} of {total} streamed blocks are not pinned and copied slowly: {why}",
        unpinned=left,
        unpinned_because=why,
    )


def _limit(budget: int | None) -> str:
    return "auto" if budget is None else size(budget)
