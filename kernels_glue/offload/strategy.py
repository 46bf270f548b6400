"""Who moves the weights: the rule of `auto`, fixed from the table in docs/measured.md."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import size
from .config import OffloadConfig
from .plan import Sizes


@dataclass(frozen=True)
class Strategy:
    """A choice, and the reason."""

    name: str
    why: str


def choose(config: OffloadConfig, sizes: Sizes, dynamic: bool) -> Strategy:
    """The strategy for a model.

    Args:
        dynamic: ComfyUI loads the model with dynamic VRAM.
    """
    if config.strategy != "auto":
        return Strategy(config.strategy, "as set on the node")
    if dynamic and config.budget is not None and sizes.total <= config.budget and config.resident_blocks < 0:
        return Strategy("core", f"all {size(sizes.total)} fit the budget, so there is nothing to stream")
    if dynamic:
        return Strategy("stream", "as fast as ComfyUI's dynamic VRAM, and it keeps to the budget")
    return Strategy("stream", "faster than ComfyUI's partial loading, the choice without dynamic VRAM")
