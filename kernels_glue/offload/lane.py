"""The way to the device: copies on a stream beside the compute, ordered by events and never by the host."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


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
        self._stream = torch.cuda.Stream(device)
        self._thread: ThreadPoolExecutor | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waited = 0.0

    def allocate(self, size: int) -> torch.Tensor:
        """Device memory as uint8 [size], which copies may fill from now on."""
        with torch.inference_mode():
            slab = torch.empty(size, dtype=torch.uint8, device=self.device)
        # The memory may have been somebody else's, whose kernels still run.
        self._stream.wait_stream(self._compute())
        return slab

    def mark(self) -> torch.cuda.Event:
        """An event behind everything that the compute stream was given up to now."""
        event = torch.cuda.Event()
        event.record(self._compute())
        return event

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None, pinned: bool
    ) -> Copy:
        """Starts `target.copy_(source)` on the copy stream.

        Args:
            target, source: uint8 of one size, on the device and on the host.
            after: what has to be over before the target may be overwritten.
            pinned: whether the source is page-locked.
        """
        if pinned:
            return Copy(self._copy(target, source, after))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kitchen-sol-copies")
        return Copy(self._thread.submit(self._copy, target, source, after))

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
        self._stream.synchronize()
        # Freed memory goes to the compute stream, behind what the copies wrote into it.
        self._compute().wait_stream(self._stream)

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        done = torch.cuda.Event()
        with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        return done

    def _compute(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def _read_waits(self) -> None:
        """Adds up the waits that are over, without waiting for the others."""
        over = [pair for pair in self._waits if pair[1].query()]
        self._waited += sum(start.elapsed_time(end) for start, end in over)
        self._waits = self._waits[len(over) :]
