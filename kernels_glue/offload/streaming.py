"""Puts the weights of blocks where the plan wants them, and streams those that are not on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .order import VisitOrder
from .pinning import Pins
from .plan import Plan, evenly
from .rotation import Rotation
from .slab import Block

# (offset in the target, uint8 tensor in host memory): the pieces of a copy.
Sources = Sequence[tuple[int, torch.Tensor]]


class Lane(Protocol):
    """What streaming asks of a device; see lane.CudaLane."""

    def allocate(self, size: int) -> torch.Tensor: ...
    def mark(self) -> Any: ...
    def copy(
        self, target: torch.Tensor, sources: Sources, after: Any, previous: Any, pinned: bool
    ) -> Any: ...
    def wait(self, copy: Any) -> None: ...
    def waited_ms(self) -> float: ...
    def drain(self) -> None: ...


@dataclass
class Slot:
    """One of the device slabs through which streamed blocks rotate.

    Attributes:
        free_after: event behind the last use of its memory.
        copy: the copy that fills it, or the last one that did.
    """

    slab: torch.Tensor
    free_after: Any
    copy: Any = None


@dataclass
class Traffic:
    """What was copied for blocks that were about to run."""

    copies: int = 0
    bytes: int = 0
    misses: int = 0


@dataclass
class Streaming:
    """The blocks of one model on one device.

    Between their calls all streamed blocks have their weights in host memory, so that whoever looks at the
    model from outside finds the right ones.

    Attributes:
        blocks: in the order in which they are expected to run.
        plan: what is where now; None before the first call of `place`.
    """

    blocks: Sequence[Block]
    lane: Lane
    pins: Pins
    plan: Plan | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self):
        self._resident: dict[int, torch.Tensor] = {}
        self._slots: list[Slot] = []
        self._rotation = Rotation(0)
        self._order = VisitOrder(())
        self._pinned: frozenset[int] = frozenset()
        self._hooks: list[Any] = []
        self._running: int | None = None

    @property
    def device_bytes(self) -> int:
        """Weights of blocks on the device now, slabs included."""
        return sum(slab.nbytes for slab in (*self._resident.values(), *(s.slab for s in self._slots)))

    @property
    def unpinned(self) -> tuple[int, ...]:
        """Streamed blocks whose host memory is not page-locked."""
        return tuple(i for i in (self.plan.streamed if self.plan else ()) if i not in self._pinned)

    def place(self, plan: Plan, pin: bool, between: Callable[[], None] = lambda: None) -> None:
        """Moves from what is to what the plan wants; nothing where that is the same.

        Args:
            pin: whether the host memory of streamed blocks is page-locked as far as it can be.
            between: called before each block that is uploaded or pinned; may raise, and then `plan` is None.
        """
        if plan == self.plan:
            return
        self._stop()
        self.plan = None
        for index in [i for i in self._resident if i not in plan.resident]:
            self._evict(index)
        for index in plan.resident:
            if index not in self._resident:
                between()
                self._upload(index)
        self._pin(plan.streamed if pin else (), between)
        slabs = [self.lane.allocate(plan.slot_bytes) for _ in range(plan.slots)]
        self._slots = [Slot(slab, self.lane.mark()) for slab in slabs]
        self._rotation = Rotation(plan.slots)
        self._order = VisitOrder(plan.streamed)
        self._hook(plan.streamed)
        self.plan = plan

    def release(self) -> None:
        """Takes everything off the device. All weights are in host memory afterwards."""
        self._stop()
        for index in list(self._resident):
            self._evict(index)
        self.plan = None

    def changed(self) -> None:
        """The weights in host memory change: what the slots hold is not to be used any more."""
        self.settle()
        self.lane.drain()
        self._rotation.forget()

    # --- the calls of streamed blocks -----------------------------------------------------------

    def before(self, index: int) -> None:
        """A streamed block is about to run: its weights are on the device when its kernels are."""
        self.settle()
        self._order.visit(index)
        slot = self._rotation.slot_of(index)
        if slot is None:
            slot = self._rotation.victim(self._order.upcoming())
            self._fill(index, slot)
            self.traffic.misses += 1
        try:
            self.lane.wait(self._slots[slot].copy)
        except BaseException:
            self._rotation.put(None, slot)
            raise
        self._running = index
        self.blocks[index].bind(self._slots[slot].slab)
        self._prefetch(busy=slot)

    def after(self, index: int) -> None:
        """It has run, or failed: the slot may be filled anew when the device has come to this point."""
        self._running = None
        block = self.blocks[index]
        block.bind_host()
        slot = self._rotation.slot_of(index)
        if slot is not None:
            self._slots[slot].free_after = self.lane.mark()
            self._prefetch()

    def settle(self) -> None:
        """Ends the call of a block that never came to its end: torch calls no hook for an interrupt."""
        if self._running is not None:
            self.after(self._running)

    def _prefetch(self, busy: int | None = None) -> None:
        while fill := self._rotation.next_fill(self._order.upcoming(), busy):
            self._fill(*fill)

    def _fill(self, index: int, slot: int) -> None:
        place, block = self._slots[slot], self.blocks[index]
        # Should the copy fail to start, the slot holds nothing.
        self._rotation.put(None, slot)
        target, pinned = place.slab[: block.bytes], index in self._pinned
        place.copy = self.lane.copy(target, block.sources, place.free_after, place.copy, pinned)
        self._rotation.put(index, slot)
        self.traffic.copies += 1
        self.traffic.bytes += block.bytes

    # --- changes of place -----------------------------------------------------------------------

    def _stop(self) -> None:
        """Ends streaming: no hooks, no slots, all streamed blocks in host memory."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self.lane.drain()
        self._running = None
        self._slots.clear()
        self._rotation = Rotation(0)
        for index, block in enumerate(self.blocks):
            if index not in self._resident:
                block.bind_host()
                block.forget()

    def _upload(self, index: int) -> None:
        block = self.blocks[index]
        slab = self.lane.allocate(block.bytes)
        with torch.inference_mode():
            for offset, source in block.sources:
                slab[offset : offset + source.nbytes].copy_(source)
        self._resident[index] = slab
        block.bind(slab)

    def _evict(self, index: int) -> None:
        block = self.blocks[index]
        block.bind_host()
        block.forget()
        del self._resident[index]

    def _pin(self, streamed: Sequence[int], between: Callable[[], None]) -> None:
        """Pins as many blocks as the limit holds, evenly, so that slow copies do not come in a row."""
        limit, chosen = self.pins.limit(), list(streamed)
        slabs = {i: self.blocks[i].slabs for i in streamed}
        while sum(slab.nbytes for i in chosen for slab in slabs[i]) > limit:
            chosen = evenly(streamed, len(chosen) - 1)
        self.pins.keep_only([slab for i in chosen for slab in slabs[i]])
        pinned = set()
        # Every second one first, so that they lie evenly too where the system allows less than the limit.
        for index in (*chosen[::2], *chosen[1::2]):
            between()
            if not all(self.pins.pin(slab) for slab in slabs[index]):
                self.pins.keep_only([slab for i in pinned for slab in slabs[i]])
                break
            pinned.add(index)
        self._pinned = frozenset(pinned)

    def _hook(self, streamed: Iterable[int]) -> None:
        for index in streamed:
            module = self.blocks[index].module
            before, after = _before(self, index), _after(self, index)
            self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
            self._hooks.append(module.register_forward_hook(after, always_call=True))


# Compiled code cannot look into these: torch.compile leaves it before a block and goes on within.
@torch.compiler.disable
def _visit(streaming: Streaming, index: int) -> None:
    streaming.before(index)


@torch.compiler.disable
def _leave(streaming: Streaming, index: int) -> None:
    streaming.after(index)


def _before(streaming: Streaming, index: int) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: Any) -> None:
        _visit(streaming, index)

    return hook


def _after(streaming: Streaming, index: int) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        _leave(streaming, index)

    return hook
