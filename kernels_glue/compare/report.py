"""What the node says: the scores first, then what they cost and what to change. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..attention.config import NODE as SOL
from ..quantization.config import NODE as INT8
from ..report import Line, Report, detail, headline, item, note, warning
from ..units import size
from . import wording
from .config import NODE
from .results import Comparison, LayerError, Recommendation, StepScore, Trial, Usage
from .worst import name_of, worst_of

# The inputs that a trial has values for, and the nodes that have them.
_INPUTS = ((INT8, ("ignored_layers",)), (SOL, ("tau", "dense_layers")))


def report_of(comparison: Comparison, *more: Line) -> Report:
    """All of a comparison, in lines to read and in facts.

    The facts have the attributes of `Comparison` and of what it holds by name. Only steps count from 1.

    Args:
        more: lines that come last.
    """
    remarks = [*comparison.final.remarks, *comparison.remarks]
    return Report.of(
        NODE,
        [headline(wording.scores(comparison.final), final=asdict(comparison.final))],
        [warning(text, warnings=[text]) for text in comparison.warnings],
        _usage_lines(comparison.model, comparison.reference),
        _step_lines(comparison.steps),
        _layer_lines(comparison.layers),
        _recommendation_lines(comparison.recommendation),
        [note(remark, remarks=[remark]) for remark in remarks],
        more,
    )


def _usage_lines(model: Usage, reference: Usage) -> Iterator[Line]:
    def facts(*names: str) -> dict[str, Any]:
        sides = {"model": model, "reference": reference}
        return {side: {name: getattr(usage, name) for name in names} for side, usage in sides.items()}

    speed = wording.speed(model.seconds_per_step, reference.seconds_per_step)
    yield detail(
        "; ".join(filter(None, [f"a step: {_times(model)}, reference {_times(reference)}", speed])),
        **facts("seconds_per_step", "first_step_seconds"),
    )
    if model.peak_device_bytes is not None and reference.peak_device_bytes is not None:
        yield detail(
            f"device memory: {size(model.peak_device_bytes)}, reference {size(reference.peak_device_bytes)}",
            **facts("peak_device_bytes"),
        )
    yield detail(
        f"host memory: grew by {size(model.host_bytes)}, reference {size(reference.host_bytes)}",
        **facts("host_bytes"),
    )
    yield detail(
        f"weights: {size(model.weight_bytes)}, reference {size(reference.weight_bytes)}",
        **facts("weight_bytes"),
    )


def _times(usage: Usage) -> str:
    return f"{usage.seconds_per_step:.3g} s (the first {usage.first_step_seconds:.3g} s)"


def _step_lines(steps: Sequence[StepScore]) -> Iterator[Line]:
    if not steps:
        return
    facts = {"steps": [_step_facts(step) for step in steps]}
    if all(step.denoised.psnr == math.inf for step in steps):
        equal = "the only prediction is" if len(steps) == 1 else f"all {len(steps)} predictions are"
        yield detail(f"{equal} equal", **facts)
        return
    # What is not a number is worse than any.
    worst = min(steps, key=lambda step: -math.inf if math.isnan(step.denoised.psnr) else step.denoised.psnr)
    scored = worst.denoised
    yield detail(
        f"worst prediction: step {worst.step + 1} of {len(steps)}, PSNR {wording.decibels(scored.psnr)},"
        f" cosine {wording.ratio(scored.cosine)}, relative error {wording.relative(scored.relative_l2)}",
        **facts,
    )


def _step_facts(step: StepScore) -> dict[str, Any]:
    """A step by name, numbered from 1 as it is shown."""
    return {**asdict(step), "step": step.step + 1}


def _layer_lines(layers: Sequence[LayerError]) -> Iterator[Line]:
    facts = {"layers": [asdict(layer) for layer in layers]}
    for worst in worst_of(layers):
        yield detail(
            f"{worst.title}, {worst.count} looked at: relative error on the same inputs"
            f" {wording.relative(worst.median)} (median); the worst:",
            **facts,
        )
        facts = {}  # those of all kinds, once
        for layer in worst.layers:
            yield item(f"{name_of(layer)}: {wording.relative(layer.error)}")


def _recommendation_lines(found: Recommendation | None) -> Iterator[Line]:
    if found is None:
        return
    facts = {"recommendation": asdict(found)}
    kept = f"to keep {found.limit:g} dB"
    if found.chosen is not None:
        yield detail(f"recommended {kept}, measured {wording.decibels(found.chosen.psnr)}:", **facts)
        yield from map(detail, _settings(found.chosen))
    elif found.trials:
        # How close the best one came is among the remarks.
        tried = len(found.trials)
        none = (
            "the only setting that was tried is not"
            if tried == 1
            else f"none of {tried} settings that were tried is"
        )
        yield warning(f"{none} enough {kept}", **facts)
    else:
        yield note(": ".join([f"nothing to recommend {kept}", *found.remarks]), **facts)
        return
    for remark in found.remarks:
        yield note(remark)


def _settings(trial: Trial) -> Iterator[str]:
    """The inputs of each node as they are pasted: behind the name, or below it if they are several lines."""
    for node, names in _INPUTS:
        values = {name: value for name in names if (value := getattr(trial, name)) is not None}
        if values:
            yield f"{node}:"
        for name, value in values.items():
            entries = (f"{value:g}" if isinstance(value, float) else str(value)).splitlines()
            if len(entries) > 1:
                yield f"{name}:"
                yield from entries
            else:
                yield f"{name}: {entries[0] if entries else '(empty)'}"
