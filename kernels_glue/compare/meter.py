"""Measures the time of the steps of one sampling, and the memory that it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import comfy.model_management as management
import psutil
import torch

from .results import Usage

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


@dataclass
class Meter:
    """One sampling of one model; make it before the model is loaded.

    The device is waited for once a step, never within one.

    Attributes:
        disturbed: steps at which something is looked at, so that their time is not the model's alone.
    """

    patcher: ModelPatcher
    disturbed: Collection[int] = ()
    _steps: list[float] = field(default_factory=list)
    _since: float = 0.0
    _outside: int = 0

    def __post_init__(self) -> None:
        self._host_before = self._host = psutil.Process().memory_info().rss

    def begin(self) -> None:
        """The model is loaded, and its first step begins."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.patcher.load_device)
        self._look()
        self.resume()

    def step(self) -> None:
        """A step is over; what follows until `resume` is not counted."""
        self._wait()
        self._steps.append(time.perf_counter() - self._since)
        self._look()

    def resume(self) -> None:
        """The next step begins."""
        self._wait()
        self._since = time.perf_counter()

    def usage(self) -> Usage:
        """What was measured; a sampler that tells of no step took one. Call it while the model is loaded."""
        if not self._steps:
            self.step()
        self._look()
        first, *others = self._steps
        alone = [seconds for step, seconds in enumerate(others, 1) if step not in self.disturbed]
        return Usage(
            statistics.median(alone or others or [first]),
            first,
            self._peak() if self._cuda else None,
            max(0, self._host - self._host_before),
            self.patcher.model_size(),
        )

    @property
    def _cuda(self) -> bool:
        return self.patcher.load_device.type == "cuda"

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.patcher.load_device)

    def _look(self) -> None:
        self._host = max(self._host, psutil.Process().memory_info().rss)
        if self._cuda:
            self._outside = max(self._outside, self._outside_of_torch())

    def _peak(self) -> int:
        """Largest use within and beside torch's allocator, less the weights of other loaded models."""
        device = self.patcher.load_device
        others = sum(
            other.model.model_loaded_weight_memory
            for other in (loaded.model for loaded in management.current_loaded_models)
            if other is not None and other.load_device == device and other.model is not self.patcher.model
        )
        return max(0, torch.cuda.max_memory_allocated(device) - others) + self._outside

    def _outside_of_torch(self) -> int:
        """Bytes of the weights that dynamic VRAM has on the device, and of its buffers for casting."""
        if not self.patcher.is_dynamic():
            return 0
        vbar = self.patcher._vbar_get()
        buffers = getattr(management, "STREAM_AIMDO_CAST_BUFFERS", {})
        return (0 if vbar is None else vbar.loaded_size()) + sum(b.size() for b in buffers.values())
