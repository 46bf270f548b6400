"""A CPU in the place of a CUDA device: the way to it has no streams, and copies come when a test says.

Copies to a real device run beside the compute, as early as their events allow or as late. Here `eager` ones
are made the moment they are started, which is as early as can be, and `late` ones when somebody waits for
them. A weight that is overwritten while a block still uses it goes wrong with the first, one that is used
before it was waited for with the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

# (offset in the target, uint8 tensor): the pieces of a copy.
Sources = Sequence[tuple[int, torch.Tensor]]


@dataclass
class HostCopy:
    """A copy that was started; `run` makes it."""

    run: Callable[[], object] | None


@dataclass
class HostLane:
    """See streaming.Lane. Memory is filled with 0xFF when it is allocated: NaN in every float type."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    late: bool = False
    started: int = 0
    allocated: list[int] = field(default_factory=list)
    pending: list[HostCopy] = field(default_factory=list)

    def allocate(self, size: int) -> torch.Tensor:
        self.allocated.append(size)
        with torch.inference_mode():
            return torch.full((size,), 255, dtype=torch.uint8, device=self.device)

    def mark(self) -> object:
        return object()

    def copy(
        self, target: torch.Tensor, sources: Sources, after: object, previous: object, pinned: bool
    ) -> HostCopy:
        self.started += 1

        def run() -> None:
            for offset, source in sources:
                target[offset : offset + source.nbytes].copy_(source)

        copy = HostCopy(run)
        self.pending.append(copy)
        if not self.late:
            self._run(copy)
        return copy

    def wait(self, copy: HostCopy) -> None:
        # Copies of one stream are made in order.
        while copy.run is not None:
            self._run(self.pending[0])

    def waited_ms(self) -> float:
        return 0.0

    def drain(self) -> None:
        while self.pending:
            self._run(self.pending[0])

    def _run(self, copy: HostCopy) -> None:
        with torch.inference_mode():
            copy.run()
        copy.run = None
        self.pending.remove(copy)
