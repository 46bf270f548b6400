"""Names that core gives to things, and lists of them for a reader."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Before the key of every parameter of a diffusion model, in patches and in the state dict of the whole.
MODEL_PREFIX = "diffusion_model."


def compress(names: Iterable[str]) -> list[str]:
    """Joins names that differ in the number of their block: `blocks.[0-49].mlp.fc1`."""
    order: dict[tuple[str, str], list[int]] = {}
    result: list[str | tuple[str, str]] = []
    for name in names:
        match = re.match(r"(.*?\.)(\d+)(\..*)$", name)
        if match is None:
            result.append(name)
            continue
        key = (match[1], match[3])
        if key not in order:
            order[key] = []
            result.append(key)
        order[key].append(int(match[2]))
    return [x if isinstance(x, str) else f"{x[0]}{_ranges(order[x])}{x[1]}" for x in result]


def _ranges(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return text if len(spans) == 1 and spans[0][0] == spans[0][1] else f"[{text}]"
