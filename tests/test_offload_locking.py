"""Which streamed blocks are page-locked, and that they are copied as what they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from offload_blocks import COUNT, Model, build, right
from offload_modules import Scale
from stand_in_lane import HostCopy, HostLane, Sources

lateness = pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])


class SomePins:
    """Locks slabs up to a limit."""

    def __init__(self, limit: int) -> None:
        self.most = limit
        self.held: dict[int, int] = {}

    def limit(self) -> int:
        return self.most

    def pin(self, slab: torch.Tensor) -> bool:
        if slab.data_ptr() not in self.held and sum(self.held.values()) + slab.nbytes > self.most:
            return False
        self.held[slab.data_ptr()] = slab.nbytes
        return True

    def keep_only(self, slabs: list[torch.Tensor]) -> None:
        kept = {slab.data_ptr() for slab in slabs}
        self.held = {address: size for address, size in self.held.items() if address in kept}


@dataclass
class PinnedLane(HostLane):
    """Remembers which sources were said to be page-locked."""

    said: dict[int, bool] = field(default_factory=dict)

    def copy(
        self, target: torch.Tensor, sources: Sources, after: object, previous: object, pinned: bool
    ) -> HostCopy:
        for _, source in sources:
            self.said[source.data_ptr()] = pinned
        return super().copy(target, sources, after, previous, pinned)


def check_pinned(model: Model, lane: PinnedLane, resident: int, fit: int) -> None:
    """As many blocks as fit are page-locked, and copied as what they are."""
    lane.said.clear()
    pins = model.streaming.pins
    streamed = model.place(resident, pin=True).streamed
    assert torch.equal(model(), right())
    hosts = {model.streaming.blocks[i].host.data_ptr(): i for i in streamed}
    assert set(pins.held) <= set(hosts) and len(pins.held) == min(fit, len(streamed))
    assert lane.said == {address: address in pins.held for address in hosts}
    assert model.streaming.unpinned == tuple(i for address, i in hosts.items() if address not in pins.held)


@pytest.mark.parametrize("resident", [0, 3])
@pytest.mark.parametrize("fit", [0, 1, 3, 5, 7, 9])
def test_what_streams_is_page_locked_as_far_as_it_can_be(fit: int, resident: int) -> None:
    lane = PinnedLane()
    model = build(lane)
    size = model.streaming.blocks[0].bytes
    pins = model.streaming.pins = SomePins(fit * size + size // 2)
    check_pinned(model, lane, resident, fit)
    model.place(resident + 1)
    assert not pins.held and model.streaming.unpinned == model.streaming.plan.streamed


def test_what_is_page_locked_changes_with_the_plan() -> None:
    lane = PinnedLane()
    model = build(lane)
    size = model.streaming.blocks[0].bytes
    model.streaming.pins = SomePins(3 * size)
    for resident in (0, 3, 2, 1, 0):
        check_pinned(model, lane, resident, 3)


def test_a_block_with_other_values_is_page_locked_with_both_of_its_slabs() -> None:
    lane = PinnedLane()
    model = build(lane)
    blocks = model.streaming.blocks
    size = blocks[0].bytes
    blocks[3].patch({"blocks.3.weight": torch.full((300,), 4.0)})  # its own value, elsewhere
    own, other = blocks[3].slabs
    assert size == own.nbytes == other.nbytes
    pins = model.streaming.pins = SomePins((COUNT + 1) * size)
    model.place(0, pin=True)
    assert torch.equal(model(), right())
    assert len(pins.held) == COUNT + 1 and {own.data_ptr(), other.data_ptr()} <= set(pins.held)
    assert model.streaming.unpinned == () and all(lane.said.values())
    # Room for both of them or for none: a copy that waits for one piece is no faster for the other.
    model.streaming.release()
    pins.most = COUNT * size
    model.place(0, pin=True)
    assert len(model.streaming.unpinned) == 1 and sum(pins.held.values()) <= pins.most
    model.streaming.release()
    pins.most = size
    model.place(0, pin=True)
    # Of seven blocks the one in the middle is chosen, which needs two slabs.
    assert model.streaming.unpinned == tuple(range(COUNT)) and not pins.held


def test_what_cannot_be_locked_after_all_is_copied_as_pageable() -> None:
    """The system may refuse what the limit allows."""

    class Refusing(SomePins):
        def pin(self, slab: torch.Tensor) -> bool:
            return len(self.held) < 2 and super().pin(slab)

    lane = PinnedLane()
    model = build(lane)
    pins = model.streaming.pins = Refusing(10**9)
    plan = model.place(0, pin=True)
    assert torch.equal(model(), right())
    # Those that are locked do not lie side by side.
    assert model.streaming.unpinned == tuple(i for i in plan.streamed if i not in plan.streamed[:3:2])
    assert sum(lane.said.values()) == 2 and {a for a, pinned in lane.said.items() if pinned} == set(pins.held)


def test_all_blocks_are_page_locked_where_the_limit_holds_all_of_them() -> None:
    """Flux: few large blocks, and many small ones."""
    lane = PinnedLane()
    model = build(lane, blocks=[Scale(0, 20_000), *(Scale(i) for i in range(1, COUNT))])
    model.streaming.pins = SomePins(sum(block.bytes for block in model.streaming.blocks))
    model.place(0, pin=True)
    assert model.streaming.unpinned == ()
