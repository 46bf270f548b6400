"""Streaming with the tensors taken out: what is copied when, for streams of visits of any order.

Blocks are numbers, slabs are the numbers of the blocks that were copied into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from comfyui import inprocess

streaming = inprocess.pack_module("kernels_glue.offload.streaming")
plans = inprocess.pack_module("kernels_glue.offload.plan")


class Cells:
    """A device slab, which holds what was copied into it. A slice of it is all of it."""

    nbytes = 1

    def __init__(self) -> None:
        self.holds: int | None = None

    def __getitem__(self, part: slice) -> Cells:
        return self


@dataclass
class Lane:
    """Counts copies; they are done as soon as they are started.

    Attributes:
        left: copies that one call of a block may still start, so that no mistake copies for ever.
    """

    copied: list[int] = field(default_factory=list)
    left: int = 0

    def allocate(self, size: int) -> Cells:
        return Cells()

    def mark(self) -> object:
        return object()

    def copy(
        self, target: Cells, sources: tuple[tuple[int, int]], after: object, previous: object, pinned: bool
    ) -> Cells:
        [(_, source)] = sources
        assert self.left, "one call starts copies without end"
        self.left -= 1
        self.copied.append(source)
        target.holds = source
        return target

    def wait(self, copy: Cells) -> None:
        pass

    def drain(self) -> None:
        pass


class Module:
    """Takes the hooks, and is never called."""

    def register_forward_pre_hook(self, hook: Any, **kwargs: Any) -> Any:
        return self

    register_forward_hook = register_forward_pre_hook

    def remove(self) -> None:
        pass


class Block:
    """A block of one byte, whose host memory is its number."""

    bytes = 1

    def __init__(self, index: int) -> None:
        self.host = index
        self.sources = ((0, index),)
        self.module = Module()
        self.bound: object = None

    def bind(self, slab: object) -> None:
        self.bound = slab

    def bind_host(self) -> None:
        self.bound = self.host

    def forget(self) -> None:
        pass


class NoPins:
    """Locks nothing."""

    def limit(self) -> int:
        return 0

    def keep_only(self, slabs: list[int]) -> None:
        pass

    def pin(self, slab: int) -> bool:
        return False


class Rounds:
    """The blocks of a model, all of them streamed, and what their calls cost.

    Args:
        count: blocks; they are expected to run in the order of their numbers.
    """

    def __init__(self, count: int, prefetch: int) -> None:
        slots = min(count, prefetch + 1)
        self.lane = Lane()
        self.blocks = [Block(i) for i in range(count)]
        self.streaming = streaming.Streaming(self.blocks, self.lane, NoPins())
        self.streaming.place(plans.Plan((), tuple(range(count)), slots, 1, slots), False)

    def visit(self, block: int) -> bool:
        """Runs a block; whether its copy had to be started only now."""
        before = len(self.lane.copied)
        self.lane.left = 100
        self.streaming.before(block)
        missed = self.lane.copied[before : before + 1] == [block]
        assert self.blocks[block].bound.holds == block, "the block runs with another one's weights"
        self.streaming.after(block)
        assert self.blocks[block].bound == block, "the block is left on the device"
        return missed

    def misses(self, visits: Iterable[int]) -> int:
        """Copies that nobody had started before they were needed; the traffic says the same."""
        before = self.streaming.traffic.misses
        missed = sum(self.visit(block) for block in visits)
        assert self.streaming.traffic.misses - before == missed
        return missed

    def of_each(self, periods: Iterable[Iterable[int]]) -> Iterator[int]:
        """The misses of each period."""
        for period in periods:
            yield self.misses(period)
