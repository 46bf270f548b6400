"""Draws what a comparison found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..figures import as_image, new_figure
from .results import Comparison, LayerError, Recommendation, StepScore
from .wording import relative, scores
from .worst import NAMED, Worst, name_of, worst_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 1024
_TITLE, _ROW, _LAYERS_ROW = 90, 380, 400  # pixels
_BLUE, _ORANGE, _GREEN, _GREY = "#2f6fde", "#d9722b", "#2c9f5b", "#7a818c"
_PAD = 0.1  # inches, of 100 pixels
# Beyond this many steps the dots of a line run into each other.
_DOTS = 50
# More numbers of steps than this along an axis run into each other.
_TICKS = 6
_LABELS = {"fontsize": 14}
_TRIANGLE = {"marker": "^", "linestyle": "", "markersize": 9}
_NAME = 34

NOTHING = "no finite value"

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
    lines = {
        "prediction": (_BLUE, [step.denoised.psnr for step in steps]),
        "latent": (_ORANGE, [step.latent.psnr for step in steps]),
    }
    _lines(axes, lines)
    for color, values in lines.values():
        equal = [number for number, value in enumerate(values, 1) if value == math.inf]
        # There is no height for infinity: on the upper edge.
        axes.plot(
            equal,
            [1.0] * len(equal),
            color=color,
            clip_on=False,
            transform=axes.get_xaxis_transform(),
            **_TRIANGLE,
        )
    if any(math.inf in values for _, values in lines.values()):
        axes.plot([], [], color=_GREY, label="equal", **_TRIANGLE)
    _by_step(axes, len(steps), "PSNR, dB")


def _errors(axes: Axes, steps: Sequence[StepScore]) -> None:
    lines = {
        "prediction": (_BLUE, [step.denoised.relative_l2 for step in steps]),
        "latent": (_ORANGE, [step.latent.relative_l2 for step in steps]),
    }
    _lines(axes, lines)
    _by_step(axes, len(steps), "relative L2 error")
    axes.set_ylim(bottom=0)


def _lines(axes: Axes, lines: Mapping[str, tuple[str, Sequence[float]]]) -> None:
    for label, (color, values) in lines.items():
        # matplotlib leaves out what is not finite.
        marker = "o" if len(values) <= _DOTS else ""
        axes.plot(range(1, len(values) + 1), values, color=color, marker=marker, label=label)
    if not any(math.isfinite(value) for _, values in lines.values() for value in values):
        axes.set_yticks([])
        axes.text(0.5, 0.5, NOTHING, ha="center", va="center", transform=axes.transAxes, **_LABELS)


def _by_step(axes: Axes, count: int, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0.5, max(count, 1) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(_TICKS, integer=True, min_n_ticks=1))
    axes.set_xlabel("step", **_LABELS)
    axes.set_ylabel(label, **_LABELS)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Above the panel, where it hides nothing."""
    count = len(axes.get_legend_handles_labels()[1])
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=count,
        fontsize=12,
        frameon=False,
        borderaxespad=0.1,
        columnspacing=1.2,
        handlelength=1.4,
    )


def _layers(axes: Axes, worst: Worst) -> None:
    shown = worst.layers[::-1]  # bars are drawn from below
    finite = [layer.error for layer in shown if math.isfinite(layer.error)]
    longest = max(finite, default=0.0) or 1.0
    for height, layer in enumerate(shown):
        known = math.isfinite(layer.error)
        # What is not a number is worse than any that is.
        axes.barh(height, layer.error if known else longest, color=_BLUE if known else _ORANGE)
    axes.set_yticks(range(len(shown)), [_short(layer) for layer in shown])
    axes.set_xticks([])
    axes.set_xlim(0, longest * 1.05)
    axes.set_ylim(len(shown) - NAMED - 0.5, len(shown) - 0.5)
    axes.set_title(f"relative error,\n{worst.title}", **_LABELS)
    # The numbers stand beside the frame: a bar may leave no room within it.
    numbers = axes.secondary_yaxis("right")
    numbers.set_yticks(range(len(shown)), [relative(layer.error) for layer in shown])
    numbers.tick_params(labelsize=11, length=0)


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
    _legend(axes)
