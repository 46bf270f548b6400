"""What the node says: as text, from values that others found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from .config import SolConfig
from .layers import LayerSet
from .routing import CROSS, DENSE_LAYER, FIRST_STEPS, OUTSIDE
from .schedule import Schedule
from .sinks import SinkRule, Sinks
from .tally import Tally


def settings_lines(
    config: SolConfig,
    kernels: Sequence[str],
    earlier: str,
    lists: Sequence[tuple[str, int]],
    dense_layers: LayerSet,
    rule: SinkRule,
    family: str,
) -> Iterator[str]:
    """What will run where, before anything has.

    Args:
        kernels: names of the Sol kernels that will be tried, in order.
        earlier: name of the override that the model came with, or empty.
        lists: the main block lists and their lengths.
        family: name of the model's layout of text rows, or empty if the table has none.
    """
    tried = ", else ".join(kernels) or "nothing, no Sol kernel can run here"
    dense = config.dense_backend
    if dense == "current":
        dense = f"current ({earlier})" if earlier else "current (the model's own)"
    yield f"sparse: {tried}; dense: {dense}"
    counts = ", ".join(f"{name} {count}" for name, count in lists)
    layers = ", ".join(map(str, sorted(dense_layers.layers))) or "none"
    yield f"layers: {sum(count for _, count in lists)} ({counts}); always dense: {layers}"
    yield _rule_line(rule, family)


def _rule_line(rule: SinkRule, family: str) -> str:
    if not rule.keys:
        return "sinks: off"
    kind = "keys and queries" if rule.queries else "keys"
    if rule.by_hand is not None:
        start, stop = rule.by_hand
        return f"sinks: rows {start}-{stop - 1} by hand, exact as {kind}"
    if not family:
        return "sinks: none, this model has no text rows that the pack knows"
    return f"sinks: the text rows of {family}, exact as {kind}"


def remark_lines(config: SolConfig, dense_layers: LayerSet, earlier: str) -> Iterator[str]:
    """Each setting that has no effect, and why."""
    if dense_layers.remark:
        yield f"note: {dense_layers.remark}"
    if earlier and config.dense_backend != "current":
        yield (
            f"note: the model carries the attention override {earlier} from before this node; it is not used,"
            f" because dense_backend is {config.dense_backend} (current would use it)"
        )
    if config.sink_start and not config.sink_tokens:
        yield "note: sink_tokens is 0, so sink_start has no effect"
    if config.sinks == "off" and config.sink_tokens:
        yield "note: sinks is off, so sink_start and sink_tokens have no effect"
    if config.curve == "constant" and config.tau_end != SolConfig.tau_end:
        yield "note: curve is constant, so tau_end has no effect"
    if config.dense_steps >= 0 and config.dense_percent != SolConfig.dense_percent:
        yield "note: dense_steps is set, so dense_percent has no effect"


def drawn_line(schedule: Schedule, scheduler: str) -> str:
    """The schedule that the picture shows."""
    line = schedule_line(schedule)
    warning = "WARNING: " if line.startswith("WARNING: ") else ""
    steps = len(schedule.steps)
    return f"{warning}with {steps} steps ({scheduler}): {line.removeprefix(warning)}"


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
    """What kept the calls dense that their kind would have let go sparse, most frequent first."""
    if tally.sparse:
        return ""
    kinds = {CROSS.text, OUTSIDE.text}
    reasons = {text: count for text, count in tally.reasons.items() if text not in kinds}
    if set(reasons) == {FIRST_STEPS.text}:
        return ""  # all steps are dense, which has a line of its own
    planned = {FIRST_STEPS.text, DENSE_LAYER.text}
    return _listed({text: n for text, n in reasons.items() if text not in planned} or reasons)


def log_line(lines: Iterable[str]) -> str:
    return "; ".join(lines)


def missing_lines(missing: Mapping[str, str]) -> Iterator[str]:
    for name, why in missing.items():
        yield f"- not used: {name} ({why})"


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
