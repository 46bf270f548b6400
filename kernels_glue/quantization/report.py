"""What the node says: plain text, the most important line first. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from .patch_count import PatchCount
from .plan import Decision, Plan

_MIB = 2**20
_GIB = 2**30


def headline(plan: Plan) -> str:
    """`quantized N of M layers`, where M counts the model's linear layers."""
    done, total, already = len(plan.to_quantize), len(plan.decisions), len(plan.already_int8)
    if not done and already:
        return f"quantized 0 of {total} layers: {already} are already INT8, the model passes through"
    return f"quantized {done} of {total} layers" + (f" ({already} were already INT8)" if already else "")


def assemble(lines: Sequence[str], state: Iterable[str]) -> str:
    """Puts what may change from run to run (the LoRA) right under the headline: a node shows few lines."""
    headline, *details = lines
    return "\n".join((headline, *state, *details))


def weight_lines(
    plan: Plan, before: int, after: int, seconds: float, device: str, reused: bool = False
) -> Iterable[str]:
    """Sizes of the whole diffusion model in bytes, group sizes, and the time of the conversion."""
    yield f"weights {size(before)} -> {size(after)}"
    groups = Counter(plan.to_quantize.values())
    yield "ConvRot " + ", ".join(f"group {g}: {groups[g]} layers" for g in sorted(groups, reverse=True))
    yield f"quantized on {device} in {seconds:.1f} s" + (", reused now" if reused else "")


def kept_lines(kept: Sequence[Decision]) -> Iterable[str]:
    """Every layer that keeps its precision, under the reason why."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for decision in kept:
        by_reason[decision.reason].append(decision.layer.name)
    if by_reason:
        yield f"kept in their precision: {len(kept)}"
    for reason, names in by_reason.items():
        yield f"- {reason} ({len(names)}): {', '.join(compress(names))}"


def int8_line(plan: Plan) -> str:
    """The names of all INT8 layers, as `ignored_layers` takes them."""
    return f"INT8 layers: {', '.join(compress(plan.int8_layers))}"


def lora_lines(count: PatchCount, merged: int) -> Iterable[str]:
    """Which layers the weight patches reach, and a warning if they miss the quantized ones."""
    if merged:
        yield f"LoRA: merged into {merged} weights before quantizing"
    if not count.total:
        if not merged:
            yield "LoRA: none attached"
        return
    yield f"LoRA patches: {count.on_int8} on INT8 layers, {count.on_others} on other layers"
    if not count.on_int8 and not merged:
        yield "WARNING: a LoRA is attached, but none of its patches reaches an INT8 layer"


def remark_lines(remarks: Iterable[str]) -> Iterable[str]:
    return (f"note: {remark}" for remark in remarks)


def size(count: int) -> str:
    """Formats bytes in GiB or MiB."""
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"


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
