"""What the fidelity part of the demo measures, how it is judged, and the table of it. No ComfyUI in here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from devkit.console import table

GROUP_SIZES = ("256", "64", "16")
TAUS = (0.5, 1.0, 1.5, 2.0)
DENSE_PERCENTS = (0.0, 0.2)

# PSNR in dB. INT8 must stay above the first on every seed; INT8 and Sol together may be this much below Sol
# alone on the mean of the seeds.
LEAST_INT8 = 30.0
MOST_LOST_BY_BOTH = 3.0
# Another kernel for the same attention, which is no setting at all, gives 120 dB.
MOST_WHERE_IT_IS_USED = 90.0


@dataclass(frozen=True)
class Setting:
    """What is between the model and its sampler.

    Attributes:
        group_size: of Kitchen INT8 Quantize Model; None: not there.
        tau, dense_percent: of Sol Attention Patch; None: no call is sparse.
        dense_backend: of a Sol Attention Patch that makes every call dense.
    """

    group_size: str | None = None
    tau: float | None = None
    dense_percent: float | None = None
    dense_backend: str | None = None

    @property
    def name(self) -> str:
        parts = [f"INT8 group {self.group_size}"] if self.group_size else []
        if self.tau is not None:
            parts.append(f"Sol tau {self.tau:g}, dense_percent {self.dense_percent:g}")
        if self.dense_backend:
            parts.append(f"dense_backend {self.dense_backend}")
        return " + ".join(parts) or "the model"

    def sol_inputs(self, provider: str) -> Mapping[str, Any] | None:
        """Inputs of Sol Attention Patch, or None where it is not there."""
        if self.dense_backend:
            return {"provider": provider, "dense_backend": self.dense_backend, "dense_percent": 1.0}
        if self.tau is None:
            return None
        # Short sequences would be dense, and a kernel that does not take a call would be no error.
        always = {"min_tokens": 1, "strict": True}
        return {"provider": provider, "tau": self.tau, "dense_percent": self.dense_percent, **always}


MODEL = Setting()
INT8 = Setting(group_size="256")
# The paper's recipe: the first 20% of the schedule dense, and layer 0, which is the node's default.
SOL = Setting(tau=1.0, dense_percent=0.2)
BOTH = Setting(group_size="256", tau=1.0, dense_percent=0.2)


def settings(dense_backends: Sequence[str]) -> tuple[Setting, ...]:
    """The rows of the table, in its order."""
    sparse = [(tau, percent) for percent in DENSE_PERCENTS for tau in TAUS]
    return (
        *(Setting(group_size=size) for size in GROUP_SIZES),
        *(Setting(tau=tau, dense_percent=percent) for tau, percent in sparse),
        *(Setting(INT8.group_size, tau, percent) for tau, percent in sparse),
        *(Setting(dense_backend=name) for name in dense_backends),
    )


@dataclass(frozen=True)
class Row:
    """What a setting costs: the frames of each seed against those of the model alone.

    Attributes:
        psnr: dB, a value a seed; infinite for the same frames, NaN if a frame is not finite.
        ssim: structural similarity, a value a seed.
    """

    setting: Setting
    psnr: tuple[float, ...]
    ssim: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.psnr)

    @property
    def worst(self) -> float:
        return math.nan if any(map(math.isnan, self.psnr)) else min(self.psnr)


def decibels(value: float) -> str:
    return "same frames" if value == math.inf else f"{value:.2f} dB"


def text(rows: Sequence[Row]) -> str:
    """The table."""
    header = ("setting", "PSNR, mean", "worst", "SSIM, mean")
    cells = [
        (row.setting.name, decibels(row.mean), decibels(row.worst), f"{fmean(row.ssim):.4f}") for row in rows
    ]
    return table(header, cells)


def problems(rows: Sequence[Row]) -> list[str]:
    """What is not as it should be, a sentence each."""
    found = []
    for row in rows:
        if any(map(math.isnan, row.psnr)):
            found.append(f"{row.setting.name}: the frames are not finite")
        elif max(row.psnr) > MOST_WHERE_IT_IS_USED and not row.setting.dense_backend:
            found.append(f"{row.setting.name}: the frames are nearly the same, so it was not used")
    by_setting = {row.setting: row for row in rows}
    int8, sol, both = (by_setting[setting] for setting in (INT8, SOL, BOTH))
    if int8.worst < LEAST_INT8:
        found.append(
            f"{INT8.name}: {decibels(int8.worst)} on the worst seed, at least {LEAST_INT8:g} dB are wanted"
        )
    if both.mean < sol.mean - MOST_LOST_BY_BOTH:
        found.append(
            f"{BOTH.name}: {both.mean:.2f} dB, more than {MOST_LOST_BY_BOTH:g} dB below Sol alone,"
            f" which has {sol.mean:.2f} dB"
        )
    return found
