"""The settings of the node, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import KitchenSolError

NODE = "Layerwise Offload"

GIB = 2**30

# The first option of each is the default; new ones go to the end.
PIN_OPTIONS = ("auto", "on", "off")
STRATEGY_OPTIONS = ("auto", "stream", "core")

# Lowest and highest value of each number.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "vram_budget_gb": (0.0, 1024.0),
    "resident_blocks": (-1, 4096),
    "prefetch_blocks": (0, 64),
    "max_pinned_gb": (0.0, 4096.0),
}
_WHOLE = ("resident_blocks", "prefetch_blocks")
_CHOICES = {"pin_memory": PIN_OPTIONS, "strategy": STRATEGY_OPTIONS}


@dataclass(frozen=True)
class OffloadConfig:
    """What the user asked for.

    Attributes:
        vram_budget_gb: GiB of device memory for weights, the slabs of streamed blocks included; 0 is what is
            free when sampling starts, less what the activations need.
        resident_blocks: blocks whose weights stay on the device; -1 is as many as the budget holds.
        prefetch_blocks: blocks that are copied ahead of the one that computes.
        pin_memory: whether host memory is page-locked. auto: within the limit, and as far as it can be had;
            on: all of what streams, or an error; off: none.
        max_pinned_gb: GiB of host memory that may be page-locked; 0 is half of what is free.
        strategy: who moves the weights. stream: this node; core: ComfyUI's dynamic VRAM, helped.

    Raises:
        KitchenSolError: a value is no option, no number or out of range.
    """

    vram_budget_gb: float = 0.0
    resident_blocks: int = -1
    prefetch_blocks: int = 1
    pin_memory: str = "auto"
    max_pinned_gb: float = 0.0
    strategy: str = "auto"

    def __post_init__(self):
        for name, options in _CHOICES.items():
            value = getattr(self, name)
            if value not in options:
                raise KitchenSolError(NODE, f"{name} is {value!r}.", f"Choose one of {', '.join(options)}.")
        for name in BOUNDS:
            _check_number(name, getattr(self, name))
        for name in _WHOLE:
            object.__setattr__(self, name, int(getattr(self, name)))

    @property
    def budget(self) -> int | None:
        """Bytes for weights on the device, or None where ComfyUI says how many there are."""
        return round(self.vram_budget_gb * GIB) or None

    @property
    def pinned_limit(self) -> int | None:
        """Bytes of host memory that may be page-locked, or None for the node's own choice."""
        return round(self.max_pinned_gb * GIB) or None


def _check_number(name: str, value: Any) -> None:
    low, high = BOUNDS[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and low <= value <= high and not (name in _WHOLE and value != int(value)):  # NaN is in no range
        return
    kind = "a whole number" if name in _WHOLE else "a number"
    raise KitchenSolError(NODE, f"{name} is {value!r}.", f"Give {kind} from {low:g} to {high:g}.")
