"""What the node says: as text, from values that others found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .config import OffloadConfig
from .plan import Plan, Sizes, gib


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


def found_line(lists: Sequence[tuple[str, int]], sizes: Sizes) -> str:
    """The model's blocks."""
    names = ", ".join(f"{name} {count}" for name, count in lists)
    blocks = sum(sizes.blocks)
    return f"blocks: {names}; {gib(blocks)} of weights, and {gib(sizes.outside)} outside of them"


def wanted_line(config: OffloadConfig) -> str:
    """The settings, before anything is placed."""
    budget = "auto (what is free when sampling starts)" if config.budget is None else gib(config.budget)
    resident = "as many as fit" if config.resident_blocks < 0 else str(config.resident_blocks)
    return f"budget {budget}; resident blocks: {resident}; blocks copied ahead: {config.prefetch_blocks}"


def plan_lines(plan: Plan, budget: int | None) -> Iterator[str]:
    """Where the blocks are."""
    limit = "auto" if budget is None else gib(budget)
    total = len(plan.resident) + len(plan.streamed)
    if not plan.streamed:
        yield f"all {total} blocks resident (budget {limit})"
        return
    yield f"streaming: {len(plan.streamed)} of {total} blocks, {len(plan.resident)} resident (budget {limit})"


def placed_line(plan: Plan, device: int, pinned: int, seconds: float) -> str:
    """For the log, when a model was loaded."""
    return (
        f"{len(plan.resident)} blocks resident, {len(plan.streamed)} streamed through {plan.slots} slabs;"
        f" weights on the device {gib(device)}, pinned host memory {gib(pinned)}; placed in {seconds:.1f} s"
    )


def sampled_lines(sampled: Sampled, plan: Plan) -> Iterator[str]:
    """What moved, and what it cost."""
    if plan.streamed and sampled.steps:
        share = sampled.waited / sampled.seconds if sampled.seconds else 0.0
        yield (
            f"copied {gib(sampled.copied / sampled.steps)} a step; the compute waited"
            f" {sampled.waited / sampled.steps:.3f} s a step for copies ({share:.0%})"
        )
    slabs = f" (slabs {gib(plan.slots * plan.slot_bytes)})" if plan.slots else ""
    yield f"device: weights {gib(sampled.device)}{slabs}; pinned host memory {gib(sampled.pinned)}"


def assemble(*groups: Sequence[str]) -> str:
    """The lines, in order, without empty ones."""
    return "\n".join(line for lines in groups for line in lines if line)
