"""The settings of one comparison, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import KitchenSolError

NODE = "Kitchen Compare Models"

# The first option is the default; new ones go to the end.
LPIPS_OPTIONS = ("auto", "off")

# Lowest and highest value of each number. dB beyond what two computations of the same model differ by
# promise nothing.
BOUNDS: Mapping[str, tuple[float, float]] = {"keep_psnr": (0.0, 100.0)}


@dataclass(frozen=True)
class CompareConfig:
    """What the user asked for.

    Attributes:
        layers: whether the error of every INT8 layer and of attention is measured.
        keep_psnr: dB that the recommended settings have to keep; 0 is no recommendation.
        lpips: auto: computed where its package is installed and images are compared; off: never.

    Raises:
        KitchenSolError: a value is no option, no number or out of range.
    """

    layers: bool = False
    keep_psnr: float = 0.0
    lpips: str = LPIPS_OPTIONS[0]

    def __post_init__(self) -> None:
        if self.lpips not in LPIPS_OPTIONS:
            raise KitchenSolError(
                NODE, f"lpips is {self.lpips!r}.", f"Choose one of {', '.join(LPIPS_OPTIONS)}."
            )
        for name in BOUNDS:
            _check_number(name, getattr(self, name))

    @property
    def recommends(self) -> bool:
        """Whether settings are to be proposed."""
        return self.keep_psnr > 0


def _check_number(name: str, value: Any) -> None:
    low, high = BOUNDS[name]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
        return  # NaN is in no range
    raise KitchenSolError(NODE, f"{name} is {value!r}.", f"Give a number from {low:g} to {high:g}.")
