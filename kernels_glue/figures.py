"""Pictures drawn with matplotlib, as IMAGE. It is loaded with the first of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 100


def new_figure(width: int, height: int) -> Figure:
    """An empty figure of a size in pixels.

    Raises:
        ImportError: matplotlib is not installed, or broken.
    """
    # Without pyplot: it keeps figures and a window system for the whole process.
    from matplotlib.figure import Figure

    return Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, layout="constrained")


def as_image(figure: Figure) -> torch.Tensor:
    """Draws a figure: IMAGE [1, height, width, 3], fp32 in 0..1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8)
    width, height = canvas.get_width_height()
    return pixels.reshape(1, height, width, 4)[..., :3].float() / 255


def no_drawing() -> torch.Tensor:
    """A black IMAGE [1, 64, 64, 3] where nothing can be drawn."""
    return torch.zeros(1, 64, 64, 3)
