"""The picture of the demo: frames of the same sampling under several settings, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from comfyui import inprocess
from demo_table import decibels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FRAMES = 4  # of each video
_WIDTH_OF_A_VIDEO, _HEIGHT_OF_A_ROW = 480, 140
_GAP = 2  # pixels of a frame


@dataclass(frozen=True)
class Strip:
    """A row of the picture.

    Attributes:
        name: at its left.
        videos: [B, T, H, W, 3] in 0..1.
        psnr: dB, a value a video; None for what the others are compared with.
    """

    name: str
    videos: torch.Tensor
    psnr: Sequence[float] | None


def draw(strips: Sequence[Strip], captions: Sequence[str], path: Path) -> None:
    """Writes the picture as PNG.

    Args:
        captions: a title for each video of the strips.

    Raises:
        ImportError: matplotlib is not there.
        OSError: the file cannot be written.
    """
    count = len(strips[0].videos)
    size = (_WIDTH_OF_A_VIDEO * count, _HEIGHT_OF_A_ROW * len(strips))
    figure = inprocess.pack_module("kernels_glue.figures").new_figure(*size)
    grid = figure.subplots(len(strips), count, squeeze=False)
    for strip, row in zip(strips, grid, strict=True):
        for index, axes in enumerate(row):
            _show(axes, strip.videos[index])
            if strip.psnr is not None:
                axes.set_xlabel(decibels(strip.psnr[index]), fontsize=9)
        row[0].set_ylabel(_in_lines(strip.name), fontsize=9, rotation=0, ha="right", va="center")
    for axes, caption in zip(grid[0], captions, strict=False):
        axes.set_title(caption, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _show(axes: Axes, video: torch.Tensor) -> None:
    chosen = torch.linspace(0, len(video) - 1, _FRAMES).round().long()
    framed = torch.nn.functional.pad(video[chosen], (0, 0, 0, _GAP), value=1.0)
    axes.imshow(torch.cat(list(framed), dim=1)[:, :-_GAP].numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _in_lines(name: str) -> str:
    return name.replace(" + ", " +\n").replace(", ", ",\n")
