"""Exceptions, interrupts, full devices and copies that fail: the next call of a block is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from offload_blocks import COUNT, Model, build, right
from stand_in_lane import HostCopy, HostLane, Sources

lateness = pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])


class Broken(RuntimeError):
    """What a test lets happen."""


@lateness
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_an_exception_in_a_block_leaves_everything_right(prefetch: int, late: bool) -> None:
    model = build(HostLane(late=late))
    plan = model.place(2, prefetch)
    model()

    def fail(module: torch.nn.Module, args: Any) -> None:
        raise Broken

    for i in range(COUNT):
        hook = model.blocks[i].register_forward_pre_hook(fail)
        with pytest.raises(Broken):
            model()
        hook.remove()
        model.check_home(plan.streamed)
        assert torch.equal(model(), right())
        original = model.blocks[i].forward
        model.blocks[i].forward = lambda x: fail(model, x)
        with pytest.raises(Broken):
            model()
        model.blocks[i].forward = original
        model.check_home(plan.streamed)
        assert torch.equal(model(), right())
    model.streaming.release()
    model.check_home()


class Interrupt(BaseException):
    """Like comfy.model_management.InterruptProcessingException, which every layer of a block may raise."""


@lateness
def test_after_an_interrupt_in_a_block_the_next_run_is_right(late: bool) -> None:
    model = build(HostLane(late=late))
    model.place(2)
    for i in (3, 0, 6):
        check_interrupted(model, i)
        assert torch.equal(model(), right())
    check_interrupted(model, 4)
    model.streaming.release()
    model.check_home()


@lateness
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_after_an_interrupt_the_weights_go_home_when_the_sampling_ends(prefetch: int, late: bool) -> None:
    """Torch calls no hook where what is raised is no Exception; the end of the sampling settles it."""
    model = build(HostLane(late=late))
    plan = model.place(2, prefetch)
    for index in plan.streamed:
        check_interrupted(model, index)
        model.streaming.settle()
        model.check_home(plan.streamed)
        assert torch.equal(model(), right())


def test_a_block_that_runs_settles_the_one_that_was_interrupted() -> None:
    model = build()
    plan = model.place(2, 1)
    first, second = plan.streamed[1], plan.streamed[3]
    check_interrupted(model, first)
    model([second])
    model.check_home(plan.streamed)


def test_there_is_nothing_to_settle_between_calls() -> None:
    model = build()
    model.streaming.settle()
    plan = model.place(2, 1)
    model()
    started = model.lane.started
    model.streaming.settle()
    assert model.lane.started == started
    model.check_home(plan.streamed)
    assert torch.equal(model(), right())


def check_interrupted(model: Model, index: int) -> None:
    block = model.blocks[index]

    def interrupt(x: torch.Tensor) -> torch.Tensor:
        raise Interrupt

    block.forward = interrupt
    with pytest.raises(Interrupt):
        model()
    del block.forward


@dataclass
class FailingLane(HostLane):
    """Fails at what a test says, a number of times."""

    fail_allocate: int = -1
    fail_copies: int = 0

    def allocate(self, size: int) -> torch.Tensor:
        if self.fail_allocate == 0:
            raise torch.cuda.OutOfMemoryError("the device is full")
        self.fail_allocate -= 1
        return super().allocate(size)

    def copy(
        self, target: torch.Tensor, sources: Sources, after: object, previous: object, pinned: bool
    ) -> HostCopy:
        if self.fail_copies:
            self.fail_copies -= 1
            raise Broken
        return super().copy(target, sources, after, previous, pinned)


@pytest.mark.parametrize("at", range(5))
def test_a_full_device_in_the_middle_of_placing_leaves_a_way_out(at: int) -> None:
    """Three resident blocks and two slots; one of the five does not fit."""
    for then in ("release", "place again", "another place"):
        lane = FailingLane(fail_allocate=at)
        model = build(lane)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            model.place(3)
        assert model.streaming.plan is None
        lane.fail_allocate = -1
        if then == "release":
            model.streaming.release()
            model.check_home()
            assert model.streaming.device_bytes == 0
        plan = model.place(1 if then == "another place" else 3)
        assert model.streaming.device_bytes == plan.device_bytes
        assert torch.equal(model(), right()) and torch.equal(model(), right())
        model.check_home(plan.streamed)


def test_a_full_device_while_streaming_becomes_another_plan() -> None:
    lane = FailingLane()
    model = build(lane)
    model.place(1)
    model()
    lane.fail_allocate = 2
    with pytest.raises(torch.cuda.OutOfMemoryError):
        model.place(5)
    assert model.streaming.plan is None
    model.streaming.release()
    model.check_home()
    assert model.streaming.device_bytes == 0 and not model.streaming._hooks
    assert torch.equal(model(), right())


@pytest.mark.parametrize("stop", range(6))
def test_placing_that_was_interrupted_goes_on(stop: int) -> None:
    model = build()
    calls = 0

    def between() -> None:
        nonlocal calls
        calls += 1
        if calls == stop + 1:
            raise Broken

    with pytest.raises(Broken):
        model.place(6, between=between)
    model.place(6)
    # Each of the six was uploaded once, and the seventh has the one slot.
    assert len(model.lane.allocated) == 7
    assert torch.equal(model(), right())


def test_a_copy_that_fails_to_start_leaves_the_slot_empty() -> None:
    lane = FailingLane()
    model = build(lane)
    plan = model.place(0, 2)
    for failing in range(1, 5):
        lane.fail_copies = failing
        with pytest.raises(Broken):
            model()
        held = [i for i in range(COUNT) if model.streaming._rotation.slot_of(i) is not None]
        assert len(held) <= 2
        lane.fail_copies = 0
        model.check_home(plan.streamed)
        assert torch.equal(model(), right())
        model.streaming.changed()


def test_what_a_slot_held_is_not_trusted_after_a_copy_into_it_failed() -> None:
    lane = FailingLane()
    model = build(lane)
    model.place(0, 0)
    model()
    assert model.streaming._rotation.slot_of(0) == 0
    lane.fail_copies = 1
    with pytest.raises(Broken):
        model.streaming.before(3)
    assert not any(model.streaming._rotation.slot_of(i) is not None for i in range(COUNT))


@dataclass
class BrokenLater(HostLane):
    """A copy that was started fails, as one in a thread may, and so does each wait for it."""

    broken: HostCopy | None = None
    armed: bool = False

    def copy(
        self, target: torch.Tensor, sources: Sources, after: object, previous: object, pinned: bool
    ) -> HostCopy:
        if not self.armed:
            return super().copy(target, sources, after, previous, pinned)
        self.armed = False
        self.broken = HostCopy(None)
        return self.broken

    def wait(self, copy: HostCopy) -> None:
        if copy is self.broken:
            raise Broken
        super().wait(copy)


def test_a_copy_that_failed_is_made_again() -> None:
    lane = BrokenLater()
    model = build(lane)
    model.place(COUNT - 1)
    lane.armed = True
    with pytest.raises(Broken):
        model()
    assert torch.equal(model(), right())
