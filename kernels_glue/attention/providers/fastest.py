"""The fastest of several Sol kernels that all can run a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch

from ..devices import described
from ..measured import MeasuredChoice
from ..sol import SolOptions
from ..timings import TimingKey, few_heads
from .base import Provider
from .packages import version_of

Fit = tuple[Provider, SolOptions]


class FastestProvider:
    """Chooses by one timing per device, versions, dtype, head_dim and rounded length, on a few heads.

    The timing is taken with the options of the first such call: how sparse a call is changes all kernels
    alike.
    """

    def __init__(self, choice: MeasuredChoice | None = None):
        self._choice = choice or MeasuredChoice("Sol", "sol_timings")

    def choose(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fits: Sequence[Fit]) -> Fit:
        """The kernel to take and what to ask of it.

        Args:
            q, k, v: [B, T, H, D].
            fits: the kernels that take the call, with their options; where nothing can be timed the first.

        Raises:
            NothingRuns: none of them runs.
        """
        if len(fits) == 1 or q.device.type == "cpu":
            return fits[0]
        few = few_heads(q, k, v)
        ways = {provider.name: partial(provider.run, *few, options) for provider, options in fits}
        chosen = self._choice.choose(_key(q), ways, q.device)
        return next(fit for fit in fits if fit[0].name == chosen)

    def text(self, q: torch.Tensor) -> str:
        """The timing that decides about calls like this one, to be shown; empty if there is none."""
        return "" if q.device.type == "cpu" else self._choice.text(_key(q))


def _key(q: torch.Tensor) -> TimingKey:
    dtype = str(q.dtype).removeprefix("torch.")
    return TimingKey.of(described(q.device), _versions(), dtype, q.shape[3], q.shape[1], q.shape[1])


@cache
def _versions() -> str:
    """Of what the kernels come from. Looking it up reads files: too slow for every call."""
    return f"{torch.__version__} kitchen {version_of('comfy-kitchen')} triton {version_of('triton')}"
