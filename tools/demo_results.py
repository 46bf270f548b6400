"""What the demo measures of one model, how it is judged, and the table of all. No ComfyUI in here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from devkit.console import table

# Generous for INT8 in tiny random models; above it the result has nothing to do with the original's.
LARGEST_DIFFERENCE = 0.2

_HEADLINE = re.compile(r"quantized (\d+) of (\d+) layers")
_WEIGHTS = re.compile(r"^weights (\S+ \S+) -> (\S+ \S+)", re.MULTILINE)


class DemoError(Exception):
    """The node did not do what the demo expects of it."""


@dataclass(frozen=True)
class Report:
    """The part of the node's report that the demo shows."""

    quantized: int
    layers: int
    size_before: str
    size_after: str

    @classmethod
    def parse(cls, text: str) -> Report:
        """Read the report. Raises DemoError if its first line or the sizes of the weights are missing."""
        headline = _HEADLINE.match(text)
        weights = _WEIGHTS.search(text)
        if headline is None or weights is None:
            raise DemoError(f"the node's report is not as expected:\n{text}")
        return cls(int(headline[1]), int(headline[2]), weights[1], weights[2])


@dataclass(frozen=True)
class Result:
    """One model, sampled without the node and with it.

    difference: ||original - quantized|| / ||original|| of the two latents, same seed.
    seconds: a step without and with the node, from a run in which only the sampler had work.
    """

    family: str
    report: Report
    seconds: tuple[float, float]
    difference: float

    @property
    def problems(self) -> list[str]:
        found = []
        if self.report.quantized == 0:
            found.append("no layer was quantized")
        if not math.isfinite(self.difference):
            found.append("the results are not finite")
        elif self.difference == 0:
            found.append("the results are the same: the INT8 weights were not used")
        elif self.difference >= LARGEST_DIFFERENCE:
            found.append(f"the results differ by {self.difference:.3f}, allowed is {LARGEST_DIFFERENCE}")
        return found


def summary(results: Sequence[Result]) -> str:
    header = ("model", "layers", "weights", "with INT8", "s/step", "with INT8", "difference", "result")
    rows = [
        (
            result.family,
            f"{result.report.quantized} of {result.report.layers}",
            result.report.size_before,
            result.report.size_after,
            f"{result.seconds[0]:.4f}",
            f"{result.seconds[1]:.4f}",
            f"{result.difference:.4f}",
            "FAILED" if result.problems else "ok",
        )
        for result in results
    ]
    return table(header, rows)
