"""The order that CudaLane gives its copies, with doubles that take down who waits for whom.

The doubles stand for torch's streams and events, which need a GPU; test_gpu_offload.py has the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui import inprocess

lane_module = inprocess.pack_module("kernels_glue.offload.lane")
DEVICE = torch.device("cpu")
PIECE = 1024


class Step:
    """A piece of work on a stream. `behind`: all that is over when it begins."""

    def __init__(self, behind: set[Step]):
        self.behind = set(behind)
        for step in behind:
            self.behind |= step.behind


class Stream:
    def __init__(self, device: torch.device | None = None):
        self.before: set[Step] = set()

    def wait_event(self, event: Event) -> None:
        self.before |= event.before

    def wait_stream(self, stream: Stream) -> None:
        self.before |= stream.before

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, enable_timing: bool = False):
        self.before: set[Step] = set()

    def record(self, stream: Stream) -> None:
        self.before = set(stream.before)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its `compute` is the compute stream, `copies` the steps in the order in which they were queued."""
    compute = Stream()
    state = SimpleNamespace(compute=compute, current=[compute], copies=[])

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        state.current.append(stream)
        yield
        state.current.pop()

    @contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield

    real = torch.Tensor.copy_

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        stream = state.current[-1]
        step = Step(stream.before)
        stream.before.add(step)
        state.copies.append(step)
        return real(target, source)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "device", nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: state.compute)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(lane_module, "_PIECE", PIECE)
    return state


def memory(pieces: int, value: int = 0) -> torch.Tensor:
    return torch.full((pieces * PIECE,), value, dtype=torch.uint8)


def work(cuda: Any) -> Step:
    """A kernel on the compute stream."""
    step = Step(cuda.compute.before)
    cuda.compute.before.add(step)
    return step


def test_pieces_follow_each_other_and_the_last_use_of_the_slab(cuda: Any) -> None:
    lane, slab = lane_module.CudaLane(DEVICE), memory(4)
    used = work(cuda)
    lane.copy(slab, [(0, memory(3, 7)), (3 * PIECE, memory(1, 9))], lane.mark(), None, True)
    assert len(cuda.copies) == 4
    for earlier, later in zip([used, *cuda.copies], cuda.copies, strict=False):
        assert earlier in later.behind
    assert slab.tolist() == [7] * (3 * PIECE) + [9] * PIECE


def test_the_compute_goes_on_behind_the_copy(cuda: Any) -> None:
    lane = lane_module.CudaLane(DEVICE)
    copy = lane.copy(memory(3), [(0, memory(3))], lane.mark(), None, True)
    before = work(cuda)
    lane.wait(copy)
    after = work(cuda)
    assert not before.behind & set(cuda.copies)
    assert set(cuda.copies) <= after.behind
    assert lane.waited_ms() == 1.0


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False), (False, False), (True, True)])
def test_a_copy_into_a_slab_waits_for_the_one_before_it(cuda: Any, first: bool, second: bool) -> None:
    """Pinned and pageable memory go different ways, and nobody may have waited for the first copy."""
    lane, slab = lane_module.CudaLane(DEVICE), memory(2)
    free = lane.mark()
    one = lane.copy(slab, [(0, memory(2, 1))], free, None, first)
    one.event()
    early = list(cuda.copies)
    two = lane.copy(slab, [(0, memory(2, 2))], free, one, second)
    two.event()
    late = [step for step in cuda.copies if step not in early]
    assert len(early) == len(late) == 2
    assert all(step in later.behind for step in early for later in late)


def test_a_copy_that_failed_in_its_thread_is_told_to_who_waits_and_holds_nobody_up(cuda: Any) -> None:
    lane, slab = lane_module.CudaLane(DEVICE), memory(1)
    failing = lane.copy(slab, [(0, memory(3, 1))], lane.mark(), None, False)  # more than the slab holds
    with pytest.raises(RuntimeError):
        lane.wait(failing)
    again = lane.copy(slab, [(0, memory(1, 2))], lane.mark(), failing, True)
    lane.wait(again)
    assert slab.tolist() == [2] * PIECE


def test_draining_joins_the_thread(cuda: Any) -> None:
    lane, slab = lane_module.CudaLane(DEVICE), memory(1)
    lane.copy(slab, [(0, memory(1, 3))], lane.mark(), None, False)
    lane.drain()
    assert slab.tolist() == [3] * PIECE and lane._thread is None
    lane.wait(lane.copy(slab, [(0, memory(1, 4))], lane.mark(), None, False))
    assert slab.tolist() == [4] * PIECE
