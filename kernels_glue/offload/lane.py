"""The way to the device: copies on a stream beside the compute, ordered by events and never by the host."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile

import torch

from .streaming import Sources

# Bytes of a copy that are on their way at a time: some 1.2 ms of a PCIe 5.0 slot.
_PIECE = 64 * 2**20


class Copy:
    """A copy that was started. `done` is an event of the copy stream, or what will be one."""

    def __init__(self, done: torch.cuda.Event | Future[torch.cuda.Event]):
        self._done = done

    def event(self) -> torch.cuda.Event:
        """The event behind the copy; waits for the thread that starts it, where there is one."""
        return self._done.result() if isinstance(self._done, Future) else self._done


class CudaLane:
    """Memory, copies and waiting on one CUDA device.

    A copy from pageable memory keeps the host busy until it is done, so these are started by a thread of
    their own, and the host waits for that thread only where the compute is ahead of the copies.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._pinned = _Track(device)
        self._pageable: _Track | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waited = 0.0

    def allocate(self, size: int) -> torch.Tensor:
        """Device memory as uint8 [size], which copies may fill once `mark` says so."""
        with torch.inference_mode():
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def mark(self) -> torch.cuda.Event:
        """An event behind everything that the compute stream was given up to now."""
        event = torch.cuda.Event()
        event.record(self._compute())
        return event

    def copy(
        self,
        target: torch.Tensor,
        sources: Sources,
        after: torch.cuda.Event,
        previous: Copy | None,
        pinned: bool,
    ) -> Copy:
        """Starts a copy beside the compute.

        Args:
            target: uint8, on the device.
            sources: (offset in the target, uint8 tensor on the host).
            after: what has to be over before the target may be overwritten.
            previous: the last copy into it, which nobody may have waited for.
            pinned: whether the sources are page-locked.
        """
        events = (after,) if previous is None else (after, self._end_of(previous))
        if pinned:
            return Copy(self._pinned.copy(target, sources, events))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kitchen-sol-copies")
            self._pageable = _Track(self.device)
        return Copy(self._thread.submit(self._pageable.copy, target, sources, events))

    def wait(self, copy: Copy) -> None:
        """The compute stream goes on when a copy is done; the time that this takes is measured."""
        done = copy.event()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        compute = self._compute()
        start.record(compute)
        compute.wait_event(done)
        end.record(compute)
        self._waits.append((start, end))
        if len(self._waits) > 512:
            self._read_waits()

    def waited_ms(self) -> float:
        """Milliseconds that the compute stream stood still for copies; waits for the device."""
        if self._waits:
            self._waits[-1][1].synchronize()
            self._read_waits()
        return self._waited

    def drain(self) -> None:
        """Waits until no copy is under way, in a thread or on the device."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
            self._pageable.drain(self._compute())
        self._pinned.drain(self._compute())

    def _end_of(self, copy: Copy) -> torch.cuda.Event:
        try:
            return copy.event()
        except Exception:  # it failed on its way, and was reported to who waited for it
            self.drain()
            return self.mark()

    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def _read_waits(self) -> None:
        """Adds up the waits that are over, without waiting for the others."""
        over = list(takewhile(lambda pair: pair[1].query(), self._waits))
        self._waited += sum(start.elapsed_time(end) for start, end in over)
        self._waits = self._waits[len(over) :]


class _Track:
    """Copies one after the other, in pieces that two streams take in turn.

    While one stream has a long row of copies to do, what others do between evaluations has to wait for all of
    it: on an H200 that cost the time of one block's copy an evaluation. Of pieces that wait for each other
    across two streams only one is ready at a time, and others come in between. For one thread.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._turn = 0
        self._last: torch.cuda.Event | None = None

    def copy(
        self, target: torch.Tensor, sources: Sources, after: Sequence[torch.cuda.Event]
    ) -> torch.cuda.Event:
        """Starts a copy, and returns the event behind it."""
        with torch.inference_mode(), torch.cuda.device(self._device):
            for offset, source in sources:
                for start in range(0, source.numel(), _PIECE):
                    piece = source[start : start + _PIECE]
                    self._piece(target[offset + start :][: piece.numel()], piece, after)
        return self._last or after[-1]

    def _piece(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[torch.cuda.Event]) -> None:
        stream = self._streams[self._turn]
        for event in after if self._last is None else (*after, self._last):
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        self._turn = 1 - self._turn
        self._last = torch.cuda.Event()
        self._last.record(stream)

    def drain(self, compute: torch.cuda.Stream) -> None:
        for stream in self._streams:
            stream.synchronize()
            # Memory that is freed now goes to this stream.
            compute.wait_stream(stream)
