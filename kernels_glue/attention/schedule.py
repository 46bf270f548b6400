"""Which steps of a sampler are dense, and tau at the others: plain numbers, no tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .config import SolConfig

# A float32 sigma that stands for the same point of the schedule as a float64 one.
_SAME = 1e-6


@dataclass(frozen=True)
class Step:
    """Where an evaluation of the model stands in its sampling.

    Attributes:
        index: step of the sampler's schedule, from 0.
        dense: everything is dense here.
        tau: threshold, where it is not.
    """

    index: int
    dense: bool
    tau: float


@dataclass(frozen=True)
class Schedule:
    """The dense and sparse steps of one sampler run.

    Attributes:
        sigmas: the sampler's schedule, one more than it has steps; empty if nobody told it.
        dense_above: sigmas above this one are dense (goes by percent), or None.
        dense_steps: the first steps that are dense (goes by steps), if dense_above is None.
        curve, tau, tau_end: see SolConfig.
    """

    sigmas: tuple[float, ...]
    dense_above: float | None
    dense_steps: int
    curve: str
    tau: float
    tau_end: float

    def step(self, sigma: float) -> Step:
        """The step of an evaluation at `sigma`, which may lie between two entries of the schedule."""
        index = self._index(sigma)
        return Step(index, self._dense(index, sigma), self._tau(index))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All steps, as their first evaluation sees them."""
        return tuple(self.step(sigma) for sigma in self.sigmas[:-1])

    @property
    def sparse_steps(self) -> int:
        return len(self._sparse)

    @cached_property
    def _sparse(self) -> tuple[int, ...]:
        return tuple(index for index, sigma in enumerate(self.sigmas[:-1]) if not self._dense(index, sigma))

    def _index(self, sigma: float) -> int:
        """The last step that begins at or before `sigma` on the way of the schedule."""
        rising = len(self.sigmas) > 1 and self.sigmas[0] < self.sigmas[-1]
        slack = _SAME * abs(sigma)
        begun = sum(s <= sigma + slack if rising else s >= sigma - slack for s in self.sigmas[:-1])
        return max(begun - 1, 0)

    def _dense(self, index: int, sigma: float) -> bool:
        if self.dense_above is None:
            # Without a schedule nobody knows which step this is.
            return index < self.dense_steps or (not self.sigmas and self.dense_steps > 0)
        return sigma > self.dense_above + _SAME * abs(self.dense_above)

    def _tau(self, index: int) -> float:
        if self.curve == "constant" or not self.sigmas:
            return self.tau
        sparse = self._sparse
        rank = max(sum(step <= index for step in sparse) - 1, 0)
        progress = rank / (len(sparse) - 1) if len(sparse) > 1 else 0.0
        return self.tau + (self.tau_end - self.tau) * _CURVES[self.curve](progress)


# From the first sparse step (0) to the last one (1); `step` changes in the middle.
_CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
    "step": lambda progress: float(progress >= 0.5),
}


def make_schedule(
    config: SolConfig, sigmas: Sequence[float], percent_to_sigma: Callable[[float], float]
) -> Schedule:
    """Lays the settings over a sampler's schedule.

    Args:
        sigmas: as the sampler got them (core's `sample_sigmas`).
        percent_to_sigma: core's function of the model's sampling, which makes a percent mean the same for
            every scheduler, number of steps and denoise.
    """
    by_steps = config.dense_steps >= 0
    return Schedule(
        tuple(float(sigma) for sigma in sigmas),
        None if by_steps else float(percent_to_sigma(config.dense_percent)),
        max(config.dense_steps, 0),
        config.curve,
        config.tau,
        config.tau_end,
    )
