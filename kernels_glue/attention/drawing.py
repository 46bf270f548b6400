"""Draws the schedule of tau and of the dense steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..figures import as_image, new_figure
from .schedule import Step

_SIZE = (1024, 420)
_DENSE, _SPARSE = "#c9ced6", "#2f6fde"


def draw_schedule(steps: Sequence[Step], title: str) -> torch.Tensor:
    """Draws tau over the steps, with the dense steps as grey bars.

    Returns:
        IMAGE [1, 420, 1024, 3], fp32 in 0..1.

    Raises:
        ImportError: matplotlib is not installed, or broken.
    """
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(*_SIZE)
    axes = figure.add_subplot()
    sparse = [(step.index + 1, step.tau) for step in steps if not step.dense]
    for step in steps:
        if step.dense:
            axes.axvspan(step.index + 0.5, step.index + 1.5, color=_DENSE, linewidth=0)
    if sparse:
        numbers, taus = zip(*sparse, strict=True)
        axes.plot(numbers, taus, color=_SPARSE, marker="o", drawstyle="steps-mid")
        margin = 0.1 * (max(taus) - min(taus)) or 0.25
        axes.set_ylim(min(taus) - margin, max(taus) + margin)
    else:
        axes.set_yticks([])
    axes.set_xlim(0.5, len(steps) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step (grey: dense)", fontsize=14)
    axes.set_ylabel("tau", fontsize=14)
    axes.tick_params(labelsize=12)
    axes.set_title(title, fontsize=14)
    return as_image(figure)
