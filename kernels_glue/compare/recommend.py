"""Which settings to try and which to propose. Pure: no torch, no ComfyUI."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ..applied import Settings
from ..attention.config import NODE as SOL
from ..quantization.config import NODE as INT8
from ..quantization.patterns import first_match, parse_patterns
from .results import LayerError

# A layer stands out whose error is more than this many times the median of its kind.
STANDS_OUT = 3.0

# tau is tried at multiples of the step of its widget, within these values: at 0 about half of the blocks are
# exact, at 3 less than 2%.
TAU_STEP = 0.05
TAU_LOWEST, TAU_HIGHEST = 0.0, 3.0

MONOTONE = "the search relies on PSNR falling as tau rises; values between those tried were not sampled"
IDLE_TAU = "tau changed nothing: the result is the same at both ends of what was to be searched"
ONE_SEED = "measured with this seed, prompt and number of steps; others give other numbers"


@dataclass(frozen=True)
class Choice:
    """The settings that a recommendation is about, in the form of results.Trial.

    None belongs to a node that is not there.
    """

    tau: float | None
    ignored_layers: str | None
    dense_layers: str | None


NOTHING = Choice(None, None, None)


def choice_of(settings: Settings) -> Choice:
    """What a model's nodes have now."""
    return Choice(
        None if settings.sol is None else settings.sol.tau,
        None if settings.int8 is None else settings.int8.ignored_layers,
        None if settings.sol is None else settings.sol.dense_layers,
    )


def with_choice(settings: Settings, choice: Choice) -> Settings:
    """The settings of a model with a choice in place of what they say about it.

    Without the nodes that the choice has no values for.
    """
    if settings.int8 is None or choice.ignored_layers is None:
        settings = replace(settings, int8=None, int8_before=(), baked=())
    else:
        settings = replace(settings, int8=replace(settings.int8, ignored_layers=choice.ignored_layers))
    if settings.sol is None or choice.tau is None:
        return replace(settings, sol=None)
    sol = replace(settings.sol, tau=choice.tau, dense_layers=choice.dense_layers)
    return replace(settings, sol=sol)


def single_nodes(choice: Choice) -> dict[str, Choice]:
    """The choice of each node alone, by the node's name; nothing where there are not both."""
    if choice.ignored_layers is None or choice.tau is None:
        return {}
    return {
        INT8: replace(choice, tau=None, dense_layers=None),
        SOL: replace(choice, ignored_layers=None),
    }


# --- PSNR ---------------------------------------------------------------------------------------


def worth(psnr: float) -> float:
    """A PSNR to order by: a result without one is worse than any."""
    return -math.inf if math.isnan(psnr) else psnr


def equal(one: float, other: float) -> bool:
    """Whether two results are equally good, those without a PSNR among them."""
    return worth(one) == worth(other)


# --- layers -------------------------------------------------------------------------------------


def ranked(errors: Iterable[LayerError]) -> tuple[LayerError, ...]:
    """The layers in the order in which they stand out among their kind; without a finite error first."""
    errors = tuple(errors)
    medians = _medians(errors)
    return tuple(sorted(errors, key=lambda one: _ratio(one, medians), reverse=True))


def standing_out(errors: Iterable[LayerError]) -> tuple[LayerError, ...]:
    """The layers with an error of more than STANDS_OUT times the median of their kind, the worst first."""
    errors = tuple(errors)
    medians = _medians(errors)
    return tuple(one for one in ranked(errors) if _ratio(one, medians) > STANDS_OUT)


def leaving(choice: Choice, layers: Iterable[LayerError]) -> Choice:
    """A choice with these layers left alone, as far as one of its inputs can do it."""
    layers = tuple(layers)
    int8 = [layer.name for layer in layers if layer.kind == "int8"]
    sparse = [int(layer.name) for layer in layers if layer.kind == "attention"]
    if int8 and choice.ignored_layers is not None:
        choice = replace(choice, ignored_layers=ignored_text(choice.ignored_layers, int8))
    if sparse and choice.dense_layers is not None:
        choice = replace(choice, dense_layers=dense_text(choice.dense_layers, sparse))
    return choice


def ignored_text(current: str, names: Iterable[str]) -> str:
    """The text for `ignored_layers` that has these layers besides those of the current text."""
    patterns = parse_patterns(current)
    new = [_entry(name) for name in names if first_match(patterns, name) is None]
    return "\n".join([*filter(None, [current.rstrip()]), *new])


def dense_text(current: str, layers: Iterable[int]) -> str:
    """The text for `dense_layers` that has these layers besides those of the current text."""
    entries = [entry.strip() for entry in re.split(r"[,\n]", current) if entry.strip()]
    new = sorted({str(layer) for layer in layers} - set(entries), key=int)
    return ",".join([*entries, *new])


def _entry(name: str) -> str:
    """An entry that matches a layer of this name and no other."""
    names = [name, f"{name}x", f"{name}.x", f"x{name}"]
    (pattern, *others) = parse_patterns(name)
    # Characters of globs and comments in a name, which no model of ComfyUI has.
    if not others and [pattern.matches(one) for one in names] == [True, False, True, False]:
        return name
    return f"re:^{re.escape(name)}$"


def _medians(errors: Collection[LayerError]) -> dict[str, float]:
    kinds = {one.kind for one in errors}
    return {kind: statistics.median(_of(errors, kind) or [0.0]) for kind in kinds}


def _of(errors: Iterable[LayerError], kind: str) -> list[float]:
    return [one.error for one in errors if one.kind == kind and math.isfinite(one.error)]


def _ratio(one: LayerError, medians: dict[str, float]) -> float:
    if not math.isfinite(one.error):
        return math.inf
    return one.error / medians[one.kind] if medians[one.kind] else float(one.error > 0) * math.inf


# --- tau ----------------------------------------------------------------------------------------


def taus_to_try(current: float, kept: bool) -> tuple[float, ...]:
    """Values of tau on the way to the largest that keeps a limit, rising.

    Args:
        kept: whether the current value keeps it; then only larger ones are of interest, else smaller ones.
    """
    count = round((TAU_HIGHEST - TAU_LOWEST) / TAU_STEP)
    grid = (round(TAU_LOWEST + TAU_STEP * i, 2) for i in range(count + 1))
    return tuple(tau for tau in grid if (tau > current if kept else tau < current))


def first_tried(values: Sequence[float]) -> float:
    """The value that `largest_kept` asks about first."""
    return values[(len(values) - 1) // 2]


def largest_kept(values: Sequence[float], keeps: Callable[[float], bool]) -> float | None:
    """The largest of rising values that is kept, by bisection; None if none is.

    Args:
        keeps: measures one; where it is not monotone, the result is a value that was measured as kept.
    """
    kept, low, high = None, 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        if keeps(values[middle]):
            kept, low = values[middle], middle + 1
        else:
            high = middle - 1
    return kept
