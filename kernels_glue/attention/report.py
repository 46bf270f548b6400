"""What the node says, from values that others found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..report import Line, detail, headline, item, note, warning
from .config import SolConfig
from .layers import LayerSet
from .routing import CROSS, DENSE_LAYER, FIRST_STEPS, OUTSIDE
from .schedule import Schedule
from .sinks import SinkRule, Sinks
from .tally import Tally


def passed_line() -> Line:
    """The model has nothing for Sol."""
    return headline(
        "passed through unchanged: this model has no transformer blocks that Sol knows (a UNet?)",
        passed_through=True,
    )


def settings_lines(
    config: SolConfig,
    kernels: Sequence[str],
    earlier: str,
    lists: Sequence[tuple[str, int]],
    dense_layers: LayerSet,
    rule: SinkRule,
    family: str,
) -> Iterator[Line]:
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
    yield detail(
        f"sparse: {tried}; dense: {dense}",
        kernels=kernels,
        dense_backend=config.dense_backend,
        earlier_override=earlier,
    )
    counts = ", ".join(f"{name} {count}" for name, count in lists)
    total, chosen = sum(count for _, count in lists), sorted(dense_layers.layers)
    yield detail(
        f"layers: {total} ({counts}); always dense: {', '.join(map(str, chosen)) or 'none'}",
        layers=total,
        block_lists=dict(lists),
        dense_layers=chosen,
    )
    yield _rule_line(rule, family)


def _rule_line(rule: SinkRule, family: str) -> Line:
    facts = {"keys": rule.keys, "queries": rule.queries, "by_hand": rule.by_hand, "family": family}
    return detail(f"sinks: {_rule(rule, family)}", sink_rule=facts)


def _rule(rule: SinkRule, family: str) -> str:
    if not rule.keys:
        return "off"
    kind = "keys and queries" if rule.queries else "keys"
    if rule.by_hand is not None:
        start, stop = rule.by_hand
        return f"rows {start}-{stop - 1} by hand, exact as {kind}"
    if not family:
        return "none, this model has no text rows that the pack knows"
    return f"the text rows of {family}, exact as {kind}"


def remark_lines(config: SolConfig, dense_layers: LayerSet, earlier: str) -> Iterator[Line]:
    """Each setting that has no effect, and why."""
    if dense_layers.remark:
        yield note(dense_layers.remark, remarks=[dense_layers.remark])
    if earlier and config.dense_backend != "current":
        yield note(
            f"the model carries the attention override {earlier} from before this node; it is not used,"
            f" because dense_backend is {config.dense_backend} (current would use it)",
            unused_override=earlier,
        )
    if config.sink_start and not config.sink_tokens:
        yield _idle_line("sink_tokens is 0", "sink_start")
    if config.sinks == "off" and config.sink_tokens:
        yield _idle_line("sinks is off", "sink_start", "sink_tokens")
    if config.curve == "constant" and config.tau_end != SolConfig.tau_end:
        yield _idle_line("curve is constant", "tau_end")
    if config.dense_steps >= 0 and config.dense_percent != SolConfig.dense_percent:
        yield _idle_line("dense_steps is set", "dense_percent")


def _idle_line(why: str, *settings: str) -> Line:
    have = "has" if len(settings) == 1 else "have"
    return note(f"{why}, so {' and '.join(settings)} {have} no effect", without_effect=settings)


def drawn_line(schedule: Schedule, scheduler: str) -> Line:
    """The schedule that the picture shows."""
    line = schedule_line(schedule)
    text = f"with {len(schedule.steps)} steps ({scheduler}): {line.text}"
    return Line.of(line.kind, text, {**line.facts, "scheduler": scheduler})


def not_drawn_line(why: str) -> Line:
    """The picture is decoration; the node works without it."""
    return note(f"the schedule was not drawn, matplotlib does not work here ({why})", not_drawn=why)


def schedule_line(schedule: Schedule) -> Line:
    """The dense and sparse steps of a sampler's schedule."""
    total, sparse = len(schedule.steps), schedule.sparse_steps
    taus = [step.tau for step in schedule.steps if not step.dense]
    facts = {"steps": total, "sparse_steps": sparse, "taus": taus}
    if not sparse:
        setting = "dense_steps" if schedule.dense_above is None else "dense_percent"
        return warning(f"all {total} steps are dense; lower {setting}", **facts)
    span = f"tau {taus[0]:g}" if taus[0] == taus[-1] else f"tau {taus[0]:g} to {taus[-1]:g}"
    return detail(f"{sparse} of {total} steps sparse, {span}", **facts)


def counts_lines(tally: Tally) -> Iterator[Line]:
    """Calls by path, and why the dense ones are dense."""
    yield detail(f"sparse {_total(tally.sparse)}", sparse_calls=tally.sparse)
    yield detail(f"dense {_total(tally.dense)}", dense_calls=tally.dense)
    if tally.reasons:
        yield detail(f"dense because of: {_listed(tally.reasons)}", dense_because=tally.reasons)
    if tally.refused:
        yield detail(f"given to fa instead: {_listed(tally.refused)}", given_to_fa=tally.refused)


def tally_lines(tally: Tally) -> Iterator[Line]:
    """What else was noticed of the calls."""
    return (detail(remark, remarks=[remark]) for remark in tally.remarks)


def detail_lines(tally: Tally, source: str) -> Iterator[Line]:
    """What the sparse calls were like; waits for the GPU once."""
    if tally.tokens:
        tokens = sorted(tally.tokens)
        yield detail(f"tokens: {', '.join(map(str, tokens))}", tokens=tokens)
    for sinks in tally.sinks:
        yield sinks_line(sinks, source)
    density = tally.density()
    if density is not None:
        yield detail(f"exact blocks: {density:.1%}", density=density)
    times = tally.times()
    if times:
        listed = ", ".join(f"{path} {ms:.2f} ms" for path, ms in sorted(times.items()))
        seconds = {path: ms / 1e3 for path, ms in times.items()}
        yield detail(f"mean time a call: {listed}", seconds_a_call=seconds)


def sinks_line(sinks: Sinks, source: str) -> Line:
    """The rows that were exact in a sequence."""
    keys, as_queries = sinks.keys, sinks.queries[0] != sinks.queries[1]
    if keys[0] == keys[1]:
        return detail("sinks: none", sinks=[])
    kind = "keys and queries" if as_queries else "keys"
    return detail(
        f"sinks: rows {keys[0]}-{keys[1] - 1} exact as {kind}" + (f" ({source})" if source else ""),
        sinks=[{"rows": keys, "queries": as_queries, "source": source}],
    )


def trouble_lines(tally: Tally) -> Iterator[Line]:
    """Why nothing was sparse, or who else has a hand in the attention."""
    if tally.replaced_by:
        yield _replaced_line(tally)
    elif tally.announced and not tally.begun:
        yield warning(
            "this model was sampled without this node; a guider for two models lets the attention"
            " of its first model compute both. Put this node before its first model",
            bypassed=True,
        )
    elif tally.done and not tally.calls:
        yield warning(
            "the model made no attention call that reaches this node; nothing was sparse", bypassed=True
        )
    elif why := _why_nothing_was_sparse(tally):
        yield warning(f"nothing was sparse, because of: {_listed(why)}", nothing_sparse_because=why)


def _replaced_line(tally: Tally) -> Line:
    """Another pack's override in the place of ours."""
    other = tally.replaced_by
    if tally.calls:
        return note(f"{other} was set after this node and passes calls on to it", later_override=other)
    return warning(
        f"{other} was set after this node and takes all attention calls; nothing was"
        " sparse. Put this node behind the one that sets it",
        later_override=other,
        bypassed=True,
    )


def _why_nothing_was_sparse(tally: Tally) -> dict[str, int]:
    """What kept the calls dense that their kind would have let go sparse."""
    if tally.sparse:
        return {}
    kinds = {CROSS.text, OUTSIDE.text}
    reasons = {text: count for text, count in tally.reasons.items() if text not in kinds}
    if set(reasons) == {FIRST_STEPS.text}:
        return {}  # all steps are dense, which has a line of its own
    planned = {FIRST_STEPS.text, DENSE_LAYER.text}
    return {text: n for text, n in reasons.items() if text not in planned} or reasons


def missing_lines(missing: Mapping[str, str]) -> Iterator[Line]:
    """The kernels that will not be tried, and why."""
    return (item(f"not used: {name} ({why})", not_used={name: why}) for name, why in missing.items())


def _total(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return f"{total} calls" + (f": {_listed(counts)}" if counts else "")


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} {n}" for name, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )
