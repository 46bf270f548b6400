"""What the attention calls of one sampling were: counts, and on request times."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .sinks import Sinks


@dataclass
class Tally:
    """Counts of one sampling. Plain integers: nothing here waits for a GPU before `times` and `density`.

    Attributes:
        sparse, dense: calls by kernel. The exact rows that a sparse call leaves to the dense backend are part
            of that call.
        reasons: dense calls by reason.
        refused: calls that the chosen dense backend could not take, rows of sparse calls included, by reason.
        tokens: sequence lengths of the sparse calls.
        sinks: exact rows of the sparse calls.
        announced, begun, done: evaluations of a model that the sampler prepared, that came to this patch,
            and that came to their end.
        replaced_by: override of another pack that stands in the place of ours, if one was seen.
        remarks: what else there is to say, in order, each once.
    """

    sparse: Counter[str] = field(default_factory=Counter)
    dense: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    sinks: Counter[Sinks] = field(default_factory=Counter)
    announced: int = 0
    begun: int = 0
    done: int = 0
    replaced_by: str = ""
    remarks: dict[str, None] = field(default_factory=dict)
    _densities: list[torch.Tensor] = field(default_factory=list)
    _clocks: defaultdict[str, list[Callable[[], float]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def calls(self) -> int:
        return self.sparse.total() + self.dense.total()

    def saw_sparse(self, kernel: str, tokens: int, sinks: Sinks) -> None:
        self.sparse[kernel] += 1
        self.tokens[tokens] += 1
        self.sinks[sinks] += 1

    def saw_density(self, density: torch.Tensor | None) -> None:
        if density is not None:
            self._densities.append(density)

    def density(self) -> float | None:
        """Mean share of exact block pairs of the sparse calls; waits for the GPU."""
        if not self._densities:
            return None
        return float(torch.stack([d.float() for d in self._densities]).mean())

    def times(self) -> dict[str, float]:
        """Mean milliseconds of a call by path, of the calls that were measured; waits for the GPU."""
        return {path: sum(clock() for clock in clocks) / len(clocks) for path, clocks in self._clocks.items()}

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[dict[str, str]]:
        """Measures what runs inside, under the name that it leaves in `["path"]`."""
        named: dict[str, str] = {}
        stop = _start_clock(device)
        yield named
        if "path" in named:
            self._clocks[named["path"]].append(stop())


def _start_clock(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts a clock; the result stops it and gives a function that reads it, in milliseconds."""
    if device.type != "cuda":
        begun = time.perf_counter()

        def stop_cpu() -> Callable[[], float]:
            took = (time.perf_counter() - begun) * 1e3
            return lambda: took

        return stop_cpu
    first: Any = torch.cuda.Event(enable_timing=True)
    last: Any = torch.cuda.Event(enable_timing=True)
    first.record()

    def stop() -> Callable[[], float]:
        last.record()

        def read() -> float:
            last.synchronize()
            return first.elapsed_time(last)

        return read

    return stop
