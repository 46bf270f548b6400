"""Which layers a comparison names. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from .results import LayerError

NAMED = 10

# What each kind of LayerError is called, in the order in which they are shown.
_TITLES = {
    "int8": "INT8 layers",
    "attention": "sparse attention",
    "dense attention": "dense attention",
}


@dataclass(frozen=True)
class Worst:
    """The worst layers of one kind. Errors of different kinds are on different scales.

    Attributes:
        title: what the kind is called.
        layers: at most NAMED, the largest error first; one that is not a number is larger than any.
        count: of all layers of the kind.
        median: of their errors, NaN if none is a number.
    """

    title: str
    layers: tuple[LayerError, ...]
    count: int
    median: float


def worst_of(errors: Iterable[LayerError]) -> tuple[Worst, ...]:
    """The worst layers, kind by kind."""
    errors = tuple(errors)
    found = []
    for kind in dict.fromkeys((*_TITLES, *(one.kind for one in errors))):
        some = [one for one in errors if one.kind == kind]
        if some:
            largest = sorted(
                some, key=lambda one: math.inf if math.isnan(one.error) else one.error, reverse=True
            )
            finite = [one.error for one in some if math.isfinite(one.error)]
            median = statistics.median(finite) if finite else math.nan
            found.append(Worst(_TITLES.get(kind, kind), tuple(largest[:NAMED]), len(some), median))
    return tuple(found)


def name_of(layer: LayerError) -> str:
    """A layer as it is listed: its name, `layer 3` for attention."""
    return layer.name if layer.kind == "int8" else f"layer {layer.name}"
