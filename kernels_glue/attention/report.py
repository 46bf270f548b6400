"""What the node says: as text, from values that others found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .routing import CROSS, DENSE_LAYER, FIRST_STEPS
from .schedule import Schedule
from .sinks import Sinks
from .tally import Tally


@dataclass(frozen=True)
class ModelFacts:
    """What the report says about a model.

    Attributes:
        lists: its main block lists in execution order, with their lengths.
        family: name of its layout of text rows, or empty if the table has none.
    """

    lists: tuple[tuple[str, int], ...]
    family: str

    def text(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.lists)


def schedule_line(schedule: Schedule) -> str:
    """The dense and sparse steps of a sampler's schedule."""
    total, sparse = len(schedule.steps), schedule.sparse_steps
    taus = [step.tau for step in schedule.steps if not step.dense]
    if not sparse:
        setting = "dense_steps" if schedule.dense_above is None else "dense_percent"
        return f"WARNING: all {total} steps are dense; lower {setting}"
    span = f"tau {taus[0]:g}" if taus[0] == taus[-1] else f"tau {taus[0]:g} to {taus[-1]:g}"
    return f"{sparse} of {total} steps sparse, {span}"


def counts_lines(tally: Tally) -> Iterator[str]:
    """Calls by path, and why the dense ones are dense."""
    yield f"sparse {_total(tally.sparse)}"
    yield f"dense {_total(tally.dense)}"
    if tally.reasons:
        yield f"dense because of: {_listed(tally.reasons)}"
    if tally.refused:
        yield f"given to fa instead: {_listed(tally.refused)}"


def detail_lines(tally: Tally, source: str) -> Iterator[str]:
    """What the sparse calls were like; waits for the GPU once."""
    if tally.tokens:
        yield f"tokens: {', '.join(str(tokens) for tokens in sorted(tally.tokens))}"
    for sinks in tally.sinks:
        yield sinks_line(sinks, source)
    density = tally.density()
    if density is not None:
        yield f"exact blocks: {density:.1%}"
    times = tally.times()
    if times:
        yield "mean time a call: " + ", ".join(f"{path} {ms:.2f} ms" for path, ms in sorted(times.items()))


def sinks_line(sinks: Sinks, source: str) -> str:
    keys = sinks.keys
    if keys[0] == keys[1]:
        return "sinks: none"
    kind = "keys and queries" if sinks.queries[0] != sinks.queries[1] else "keys"
    return f"sinks: rows {keys[0]}-{keys[1] - 1} exact as {kind}" + (f" ({source})" if source else "")


def warning_line(tally: Tally) -> str:
    """Why nothing was sparse, or who else has a hand in the attention; empty if there is nothing to say."""
    if tally.replaced_by:
        return _replaced_line(tally)
    if tally.announced and not tally.begun:
        return (
            "WARNING: this model was sampled without this node; a guider for two models lets the attention"
            " of its first model compute both. Put this node before its first model"
        )
    if tally.done and not tally.calls:
        return "WARNING: the model made no attention call that reaches this node; nothing was sparse"
    if why := _why_nothing_was_sparse(tally):
        return f"WARNING: nothing was sparse, because of: {why}"
    return ""


def _replaced_line(tally: Tally) -> str:
    """Another pack's override in the place of ours."""
    if tally.calls:
        return f"note: {tally.replaced_by} was set after this node and passes calls on to it"
    return (
        f"WARNING: {tally.replaced_by} was set after this node and takes all attention calls; nothing was"
        " sparse. Put this node behind the one that sets it"
    )


def _why_nothing_was_sparse(tally: Tally) -> str:
    """What kept the calls dense that steps, layers and kind would have let go sparse, most frequent first."""
    if tally.sparse:
        return ""
    planned = {FIRST_STEPS.text, DENSE_LAYER.text, CROSS.text}
    others = {text: count for text, count in tally.reasons.items() if text not in planned}
    if not others and FIRST_STEPS.text in tally.reasons and DENSE_LAYER.text not in tally.reasons:
        return ""  # all steps are dense, which has a line of its own
    return _listed(others or {text: n for text, n in tally.reasons.items() if text != CROSS.text})


def log_line(lines: Iterable[str]) -> str:
    return "; ".join(lines)


def missing_lines(missing: Mapping[str, str]) -> Iterator[str]:
    for name, why in missing.items():
        yield f"- not here: {name} ({why})"


def assemble(*parts: Sequence[str]) -> str:
    """One text; warnings first, because a node shows only its first lines."""
    lines = [line for part in parts for line in part]
    return "\n".join(sorted(lines, key=lambda line: not line.startswith("WARNING")))


def _total(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return f"{total} calls" + (f": {_listed(counts)}" if counts else "")


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} {n}" for name, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )
