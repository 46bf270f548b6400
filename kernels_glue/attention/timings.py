"""Timings of kernels: how they are taken, and a JSON file that says which kernel is used for what."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TIMED_RUNS = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TimingKey:
    """What one timing holds for. Lengths are rounded up to a power of two.

    Attributes:
        device: name and SM of the device.
        torch: version of torch, and of what else decides.
        dtype: of q, without `torch.`.
    """

    device: str
    torch: str
    dtype: str
    head_dim: int
    queries: int
    keys: int

    @classmethod
    def of(cls, device: str, torch: str, dtype: str, head_dim: int, queries: int, keys: int) -> TimingKey:
        return cls(device, torch, dtype, head_dim, _power_of_two(queries), _power_of_two(keys))

    def __str__(self) -> str:
        return (
            f"{self.device} | torch {self.torch} | {self.dtype} | head_dim {self.head_dim}"
            f" | {self.queries} queries | {self.keys} keys"
        )


def _power_of_two(length: int) -> int:
    return 1 << max(length - 1, 0).bit_length()


@dataclass(frozen=True)
class Timing:
    """What was measured for one key.

    Attributes:
        chosen: name of the kernel to use.
        candidates: the kernels that existed, sorted; with others the timing does not hold.
        ms: milliseconds of each kernel that ran.
        errors: what each kernel that failed said.
    """

    chosen: str
    candidates: tuple[str, ...]
    ms: Mapping[str, float]
    errors: Mapping[str, str] = field(default_factory=dict)

    def measured(self, name: str) -> bool:
        return name in self.ms or name in self.errors

    def text(self, what: str, key: TimingKey) -> str:
        """For example `fa at 32768 tokens: cuDNN SDPA 52.6 ms, flash SDPA 84.1 ms`, the fastest first."""
        at = f"{key.queries}" if key.queries == key.keys else f"{key.queries} x {key.keys}"
        parts = [f"{name} {ms:.3g} ms" for name, ms in sorted(self.ms.items(), key=lambda item: item[1])]
        parts += [f"{name} failed ({said})" for name, said in self.errors.items()]
        return f"{what} at {at} tokens: {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        found = {"chosen": self.chosen, "candidates": list(self.candidates), "ms": dict(self.ms)}
        return found | {"errors": dict(self.errors)} if self.errors else found

    @classmethod
    def from_json(cls, value: Any) -> Timing | None:
        """None if it is not an entry that this class wrote."""
        try:
            ms = {str(name): float(time) for name, time in value["ms"].items()}
            errors = {str(name): str(said) for name, said in value.get("errors", {}).items()}
            timing = cls(str(value["chosen"]), tuple(map(str, value["candidates"])), ms, errors)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            return None
        return timing if timing.chosen in ms and all(math.isfinite(time) for time in ms.values()) else None


class TimingStore:
    """Timings in a file that several processes may write.

    Reading and writing never raise: a broken or unwritable file costs a timing a process and one line of log.

    Args:
        path: of the JSON file; its folder is made when the first timing is written.
    """

    def __init__(self, path: Path):
        self.path = path
        self._timings: dict[str, Timing] | None = None
        self._complained = False

    def get(self, key: TimingKey) -> Timing | None:
        if self._timings is None:
            self._timings = self._read()
        return self._timings.get(str(key))

    def put(self, key: TimingKey, timing: Timing) -> None:
        """Keeps a timing and writes it, beside what other processes have written meanwhile."""
        if self._timings is None:
            self._timings = self._read()
        self._timings[str(key)] = timing
        self._write(self._read() | {str(key): timing})

    def _read(self) -> dict[str, Timing]:
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))["timings"].items()
        except FileNotFoundError:
            return {}
        # Nested too deep is the RecursionError.
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._complain("read", error)
            return {}
        timings = {name: Timing.from_json(value) for name, value in entries}
        return {name: timing for name, timing in timings.items() if timing is not None}

    def _write(self, timings: Mapping[str, Timing]) -> None:
        content = {"timings": {name: timing.to_json() for name, timing in sorted(timings.items())}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(
                prefix=f"{self.path.stem}-", suffix=".tmp", dir=self.path.parent
            )
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    json.dump(content, file, indent=2)
                os.replace(temporary, self.path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            self._complain("write", error)

    def _complain(self, what: str, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            _log.warning(
                "cannot %s the attention timings in %s, going on without: %s", what, self.path, error
            )


def default_path(name: str) -> Path:
    """`kitchen_sol/<name>.json` in ComfyUI's user folder."""
    import folder_paths

    return Path(folder_paths.get_user_directory()) / "kitchen_sol" / f"{name}.json"


def first_sample(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views [1, T, H, D] of [B, T, H, D] tensors, for a timing.

    A sparse call is over soon, and with few heads there is less of it than a GPU does at a time.
    """
    return tuple(tensor[:1] for tensor in tensors)


def cuda_milliseconds(
    function: Callable[[], Any], device: torch.device, repeats: int = TIMED_RUNS, alone: bool = False
) -> float:
    """Median milliseconds of a function that was run before.

    Args:
        alone: from the call on the host to the end on the device. Otherwise each timed call follows another,
            so that the host is ahead as it is within a model, and what it needs to launch does not count.
    """
    times = []
    with torch.cuda.device(device):
        for _ in range(repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if not alone:
                function()
            start.record()
            function()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
    return statistics.median(times)
