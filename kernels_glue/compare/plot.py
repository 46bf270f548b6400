"""Draws what a comparison found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..figures import as_image, new_figure
from .results import Comparison, LayerError, Recommendation, StepScore
from .wording import scores
from .worst import NAMED, Worst, name_of, worst_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 1024
_TITLE, _ROW, _LAYERS_ROW = 90, 380, 400  # pixels
_BLUE, _ORANGE, _GREEN, _GREY = "#2f6fde", "#d9722b", "#2c9f5b", "#7a818c"
_PAD = 0.1  # inches, of 100 pixels
# Beyond this many steps the dots of a line run into each other.
_DOTS = 50
_LABELS = {"fontsize": 14}
_NAME = 34

Panel = Callable[["Axes"], None]


def draw(comparison: Comparison) -> torch.Tensor:
    """Draws the scores a step, and below them the worst layers and the trials where there are any.

    Returns:
        IMAGE [1, H, 1024, 3], fp32 in 0..1; H grows with what there is to show.

    Raises:
        ImportError: matplotlib is not installed, or broken.
    """
    steps, found = comparison.steps, comparison.recommendation
    first = [partial(_psnr, steps=steps), partial(_errors, steps=steps)]
    rows = [_row(_TITLE + _ROW, first, _title(comparison))]
    if kinds := worst_of(comparison.layers):
        panels = [partial(_layers, worst=worst) for worst in kinds]
        # Names of layers are longer than numbers.
        widths = [3 if worst.layers[0].kind == "int8" else 2 for worst in kinds]
        rows.append(_row(_LAYERS_ROW, panels, widths=widths))
    if found is not None and _with_tau(found):
        rows.append(_row(_ROW, [partial(_trials, found=found)]))
    return torch.cat(rows, dim=1)


def _row(height: int, panels: Sequence[Panel], title: str = "", widths: Sequence[float] = ()) -> torch.Tensor:
    """One row of the picture. A figure of its own: the long names of layers take no room from other rows."""
    figure = new_figure(_WIDTH, height)
    figure.get_layout_engine().set(w_pad=_PAD, h_pad=_PAD)
    if title:
        figure.suptitle(title, fontsize=16)
    cells = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths or [1] * len(panels))[0]
    for axes, panel in zip(cells, panels, strict=True):
        panel(axes)
        axes.grid(color="#e3e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=12)
    return as_image(figure)


def _title(comparison: Comparison) -> str:
    model, reference = comparison.model, comparison.reference
    return (
        f"{scores(comparison.final)}\n"
        f"a step {model.seconds_per_step:.3g} s, reference {reference.seconds_per_step:.3g} s"
    )


def _psnr(axes: Axes, steps: Sequence[StepScore]) -> None:
    for label, color, values in (
        ("prediction", _BLUE, [step.denoised.psnr for step in steps]),
        ("latent", _ORANGE, [step.latent.psnr for step in steps]),
    ):
        _line(axes, label, color, values)
        equal = [number for number, value in enumerate(values, 1) if value == math.inf]
        # There is no height for infinity: on the upper edge.
        axes.plot(
            equal,
            [1.0] * len(equal),
            color=color,
            marker="^",
            linestyle="",
            markersize=9,
            clip_on=False,
            transform=axes.get_xaxis_transform(),
            label=f"{label}, equal" if equal else None,
        )
    _by_step(axes, len(steps), "PSNR, dB")


def _errors(axes: Axes, steps: Sequence[StepScore]) -> None:
    _line(axes, "prediction", _BLUE, [step.denoised.relative_l2 for step in steps])
    _line(axes, "latent", _ORANGE, [step.latent.relative_l2 for step in steps])
    _by_step(axes, len(steps), "relative L2 error")
    axes.set_ylim(bottom=0)


def _line(axes: Axes, label: str, color: str, values: Sequence[float]) -> None:
    # matplotlib leaves out what is not finite.
    marker = "o" if len(values) <= _DOTS else ""
    axes.plot(range(1, len(values) + 1), values, color=color, marker=marker, label=label)


def _by_step(axes: Axes, count: int, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0.5, max(count, 1) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("step", **_LABELS)
    axes.set_ylabel(label, **_LABELS)
    axes.legend(fontsize=12)


def _layers(axes: Axes, worst: Worst) -> None:
    shown = worst.layers[::-1]  # bars are drawn from below
    # What is not a number has no length.
    errors = [layer.error if math.isfinite(layer.error) else 0.0 for layer in shown]
    bars = axes.barh([_short(layer) for layer in shown], errors, color=_BLUE)
    axes.set_ylim(len(shown) - NAMED - 0.5, len(shown) - 0.5)
    axes.bar_label(bars, fmt="%.2g", padding=4, fontsize=11)
    axes.margins(x=0.15)
    axes.set_xlabel(f"relative error, {worst.title}", **_LABELS)


def _short(layer: LayerError) -> str:
    """The end of a name tells layers apart; half of the row is for the bars."""
    name = name_of(layer)
    return name if len(name) <= _NAME else "…" + name[1 - _NAME :]


def _with_tau(found: Recommendation) -> list[tuple[float, float, bool]]:
    """(tau, PSNR, whether it is the chosen trial) of every trial that has both."""
    return [
        (trial.tau, trial.psnr, trial == found.chosen)
        for trial in found.trials
        if trial.tau is not None and math.isfinite(trial.psnr)
    ]


def _trials(axes: Axes, found: Recommendation) -> None:
    points = sorted(_with_tau(found))
    for label, color, size, chosen in (("tried", _BLUE, 60, False), ("recommended", _GREEN, 140, True)):
        some = [(tau, psnr) for tau, psnr, is_chosen in points if is_chosen is chosen]
        if some:
            axes.scatter(*zip(*some, strict=True), s=size, color=color, label=label, zorder=3)
    axes.axhline(found.limit, color=_GREY, linestyle="--", label=f"limit {found.limit:g} dB")
    axes.margins(0.08)
    axes.set_xlabel("tau", **_LABELS)
    axes.set_ylabel("PSNR of the result, dB", **_LABELS)
    axes.legend(fontsize=12)
