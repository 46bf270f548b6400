"""What the node says, the most important line first. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..names import compress
from ..report import Line, Report, detail, headline, item, note, warning
from ..units import size
from .config import NODE
from .patch_count import PatchCount
from .plan import Decision, Plan

if TYPE_CHECKING:
    from ..probe import Int8Backend


def result_line(plan: Plan) -> Line:
    """`quantized N of M layers`, where M counts the model's linear layers."""
    done, total, already = len(plan.to_quantize), len(plan.decisions), len(plan.already_int8)
    text = f"quantized {done} of {total} layers"
    if not done and already:
        text += f": {already} are already INT8, the model passes through"
    elif already:
        text += f" ({already} were already INT8)"
    return headline(text, quantized=done, layers=total, already_int8=already)


def assemble(lines: Sequence[Line], state: Iterable[Line]) -> Report:
    """Puts what may change from run to run (the LoRA) right under the first line: a node shows few lines."""
    result, *details = lines
    return Report.of(NODE, [result], state, details)


def weight_lines(
    plan: Plan, before: int, after: int, seconds: float, device: str, reused: bool = False
) -> Iterator[Line]:
    """Sizes of the whole diffusion model in bytes, group sizes, and the time of the conversion."""
    yield detail(f"weights {size(before)} -> {size(after)}", bytes_before=before, bytes_after=after)
    groups = Counter(plan.to_quantize.values())
    counts = ", ".join(f"group {g}: {groups[g]} layers" for g in sorted(groups, reverse=True))
    yield detail(f"ConvRot {counts}", group_sizes=groups)
    text = f"quantized on {device} in {seconds:.1f} s" + (", reused now" if reused else "")
    yield detail(text, device=device, seconds=seconds, reused=reused)


def kernels_line(backend: Int8Backend) -> Line:
    """Which kernels compute the INT8 layers."""
    return detail(f"INT8 kernels: {backend}", int8_kernels=backend.name, int8_kernels_remark=backend.remark)


def kept_lines(kept: Sequence[Decision]) -> Iterator[Line]:
    """Every layer that keeps its precision, under the reason why."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for decision in kept:
        by_reason[decision.reason].append(decision.layer.name)
    if by_reason:
        yield detail(f"kept in their precision: {len(kept)}", kept_layers=len(kept))
    for reason, names in by_reason.items():
        yield item(f"{reason} ({len(names)}): {', '.join(compress(names))}", kept={reason: names})


def int8_line(plan: Plan) -> Line:
    """The names of all INT8 layers, as `ignored_layers` takes them."""
    names = plan.int8_layers
    return detail(f"INT8 layers: {', '.join(compress(names))}", int8_layers=names)


def lora_lines(count: PatchCount, merged: int) -> Iterator[Line]:
    """Which layers the weight patches reach, and a warning if they miss the quantized ones."""
    if merged:
        yield headline(f"LoRA: merged into {merged} weights before quantizing", lora_merged=merged)
    facts = {"lora_on_int8": count.on_int8, "lora_on_others": count.on_others}
    if not count.total:
        if not merged:
            yield headline("LoRA: none attached", **facts)
        return
    yield headline(
        f"LoRA patches: {count.on_int8} on INT8 layers, {count.on_others} on other layers", **facts
    )
    if not count.on_int8 and not merged:
        yield warning("a LoRA is attached, but none of its patches reaches an INT8 layer", lora_missed=True)


def recast_line() -> Line:
    """Core was told after the node to cast the weights."""
    return warning(
        f"ModelComputeDtype after this node makes ComfyUI dequantize every INT8 layer; put it before {NODE}",
        recast=True,
    )


def dequantized_line(layers: int) -> Line:
    """INT8 layers that core did not run as such."""
    return note(
        f"{layers} INT8 layers with a LoRA did not fit into VRAM; ComfyUI dequantizes these at every call",
        dequantized=layers,
    )


def remark_lines(remarks: Iterable[str]) -> Iterator[Line]:
    """What was noticed about the settings and the weights."""
    return (note(remark, remarks=[remark]) for remark in remarks)
