"""The device of a measurement: its clock, its memory, and the pinned copies' limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .plan import GIB


@dataclass(frozen=True)
class Memory:
    """Bytes. used: on the whole device, by anyone; reserved: by torch's allocator; allocated: by tensors."""

    used: int
    reserved: int
    allocated: int

    @property
    def outside(self) -> int:
        """What is in use outside of torch's allocator."""
        return self.used - self.reserved


class Cuda:
    """The current CUDA device."""

    name = "cuda"

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info()
        return Memory(total - free, torch.cuda.memory_reserved(), torch.cuda.memory_allocated())

    def total(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def mark(self) -> Any:
        """A point of time of the compute stream. It does not stop the host, nor copies on other streams."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: list[Any]) -> list[float]:
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]

    def pinned_limit(self) -> float:
        """Bytes a second of the best of a few runs of copying 1 GiB of pinned memory to the device."""
        source = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        repeats = 8

        def copy() -> None:
            for _ in range(repeats):
                target.copy_(source, non_blocking=True)

        copy()
        return repeats * GIB / min(self._timed(copy) for _ in range(4))

    def copies_alone(self, size: int, slab: int) -> float:
        """Seconds of copying `size` bytes in slabs of `slab` from pinned memory while nothing else runs."""
        sources = [torch.empty(slab, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        targets = [torch.empty(slab, dtype=torch.uint8, device="cuda") for _ in range(2)]
        whole, rest = divmod(size, slab)

        def copy() -> None:
            for i in range(whole):
                targets[i % 2].copy_(sources[i % 2], non_blocking=True)
            if rest:
                targets[0][:rest].copy_(sources[0][:rest], non_blocking=True)

        copy()
        return min(self._timed(copy) for _ in range(3))

    def _timed(self, function: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        return time.perf_counter() - start


class Cpu:
    """No device, for trying the benchmark out: it has a clock and nothing to measure memory by."""

    name = "cpu"

    def memory(self) -> Memory:
        return Memory(0, 0, 0)

    def total(self) -> int:
        return 0

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, marks: list[float]) -> list[float]:
        return [b - a for a, b in pairwise(marks)]

    def pinned_limit(self) -> float:
        return 10e9

    def copies_alone(self, size: int, slab: int) -> float:
        return size / self.pinned_limit()
