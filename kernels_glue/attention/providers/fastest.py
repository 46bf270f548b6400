"""The fastest of several Sol kernels that all can run a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from ..measured import MeasuredChoice, timing_key
from ..sol import SolOptions, SolResult
from ..sol_triton import revision
from ..timings import TimingKey, first_sample
from .base import Provider
from .packages import version_of

Fit = tuple[Provider, SolOptions]


class FastestProvider:
    """Chooses by one timing per device, versions, dtype, head_dim and rounded length.

    It is taken with the options of the first such call. Query sinks are not in it where a kernel leaves them
    to its caller; they are few rows.
    """

    def __init__(self, choice: MeasuredChoice | None = None):
        self._choice = choice or MeasuredChoice("Sol", "sol_timings")
        self._texts: dict[tuple[Any, ...], str] = {}

    def choose(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fits: Sequence[Fit], here: Iterable[str]
    ) -> Fit:
        """The kernel to take and what to ask of it.

        Args:
            q, k, v: [B, T, H, D].
            fits: the kernels that take the call, with their options; where nothing can be timed the first.
            here: names of all kernels that can run on the device.

        Raises:
            NothingRuns: none of them runs.
        """
        if len(fits) == 1 or q.device.type == "cpu":
            return fits[0]
        by_name = {provider.name: (provider, options) for provider, options in fits}

        def run(name: str) -> SolResult:
            provider, options = by_name[name]
            return provider.run(*first_sample(q, k, v), options)

        return by_name[self._choice.choose(_key(q), tuple(by_name), run, q.device, here)]

    def text(self, q: torch.Tensor) -> str:
        """The timing that decides about calls like this one, to be shown; empty if there is none."""
        if q.device.type == "cpu":
            return ""
        kind = (q.device, q.dtype, q.shape[1], q.shape[3])
        if kind not in self._texts:
            self._texts[kind] = self._choice.text(_key(q))
        return self._texts[kind]


def _key(q: torch.Tensor) -> TimingKey:
    return timing_key(q, _versions(), q.shape[1], q.shape[1])


@cache
def _versions() -> str:
    """Of what the kernels come from. Looking it up reads files: too slow for every call."""
    packages = f"kitchen {version_of('comfy-kitchen')} triton {version_of('triton')}"
    return f"{torch.__version__} {packages} builtin {revision()}"
