"""Decides layer by layer what is quantized, with which group size, and why the rest is not.

Pure: no torch, no ComfyUI.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .config import AUTO, QuantizeConfig
from .patterns import first_match
from .roles import Role, role_of

INT8_FORMAT = "int8_tensorwise"

# A pasted list for another model should not fill the report.
_MOST_UNMATCHED = 10


@dataclass(frozen=True)
class LayerInfo:
    """One linear layer as found in the model.

    Attributes:
        name: dotted name below the diffusion model.
        in_features: K of the weight [N, K].
        out_features: N of the weight [N, K].
        in_block: whether the layer lies inside a repeated block list.
        quant_format: the format of an already quantized layer (core's name for it), else None.
        group_size: its ConvRot group size, if it is INT8 with ConvRot.
        is_fp8: the weight is fp8, raw or scaled.
        is_fp32_island: the model asks for fp32 here although it is not fp32 itself.
        has_weight: False where the module holds no weight.
    """

    name: str
    in_features: int
    out_features: int
    in_block: bool
    quant_format: str | None = None
    group_size: int | None = None
    is_fp8: bool = False
    is_fp32_island: bool = False
    has_weight: bool = True

    @property
    def is_int8(self) -> bool:
        return self.quant_format == INT8_FORMAT


@dataclass(frozen=True)
class Decision:
    """What happens to one layer: a group size to quantize it with, or the reason it is kept."""

    layer: LayerInfo
    group_size: int | None = None
    reason: str = ""

    @property
    def quantize(self) -> bool:
        return self.group_size is not None


@dataclass(frozen=True)
class Plan:
    """The decisions for all linear layers of a model, in module order, and remarks on the settings."""

    decisions: tuple[Decision, ...]
    remarks: tuple[str, ...] = ()

    @property
    def to_quantize(self) -> dict[str, int]:
        """Layer name -> ConvRot group size."""
        return {d.layer.name: d.group_size for d in self.decisions if d.group_size is not None}

    @property
    def already_int8(self) -> tuple[str, ...]:
        return tuple(d.layer.name for d in self.decisions if d.layer.is_int8)

    @property
    def kept(self) -> tuple[Decision, ...]:
        """Layers that stay as they are and are not INT8."""
        return tuple(d for d in self.decisions if not d.quantize and not d.layer.is_int8)

    @property
    def int8_layers(self) -> tuple[str, ...]:
        """Every layer that is INT8 once the plan is carried out."""
        return tuple(d.layer.name for d in self.decisions if d.quantize or d.layer.is_int8)


def make_plan(layers: Iterable[LayerInfo], config: QuantizeConfig) -> Plan:
    """Applies the settings to the layers of a model.

    A layer that is INT8 already stays as it is, and the group sizes found on such layers hold for the
    others too: a model has one layout, whoever began it.
    """
    layers = tuple(layers)
    found = _found_group_sizes(layers)
    sizes = found or config.group_sizes
    decisions = tuple(_decide(layer, config, sizes) for layer in layers)
    return Plan(decisions, tuple(_remarks(decisions, config, found)))


def _decide(layer: LayerInfo, config: QuantizeConfig, sizes: Sequence[int]) -> Decision:
    if layer.is_int8:
        group = f", ConvRot group {layer.group_size}" if layer.group_size else ", without ConvRot"
        return Decision(layer, reason=f"already INT8{group}")
    if not layer.has_weight:
        return Decision(layer, reason="holds no weight")
    if layer.quant_format is not None and not layer.is_fp8:
        return Decision(layer, reason=f"already quantized ({layer.quant_format})")
    role = role_of(layer.name, layer.in_block)
    if not _in_scope(role, layer, config.layers):
        return Decision(layer, reason=role.value)
    if layer.is_fp32_island:
        return Decision(layer, reason="the model keeps it in fp32")
    if (pattern := first_match(config.ignored, layer.name)) is not None:
        return Decision(layer, reason=f"in ignored_layers ({pattern.text})")
    group_size = next((s for s in sizes if layer.in_features % s == 0), None)
    if group_size is None:
        tried = ", ".join(map(str, sizes))
        return Decision(layer, reason=f"in_features {layer.in_features} divides by no group size ({tried})")
    return Decision(layer, group_size)


def _in_scope(role: Role, layer: LayerInfo, scope: str) -> bool:
    if role is Role.MODULATION:
        return scope == "blocks+modulation"
    if role in (Role.NORM, Role.EMBEDDER):
        return False
    return layer.in_block or scope == "all"


def _found_group_sizes(layers: Iterable[LayerInfo]) -> tuple[int, ...]:
    return tuple(sorted({x.group_size for x in layers if x.is_int8 and x.group_size}, reverse=True))


def _remarks(decisions: Sequence[Decision], config: QuantizeConfig, found: Sequence[int]) -> Iterable[str]:
    names = [d.layer.name for d in decisions]
    already = [d.layer.name for d in decisions if d.layer.is_int8]
    unmatched = []
    for pattern in config.ignored:
        matched = [name for name in names if pattern.matches(name)]
        if not matched:
            unmatched.append(pattern.text)
        elif set(matched) <= set(already):
            yield f"ignored_layers: {pattern.text!r} had no effect, its layers are already INT8."
    yield from (f"ignored_layers: {text!r} matches no linear layer." for text in unmatched[:_MOST_UNMATCHED])
    if len(unmatched) > _MOST_UNMATCHED:
        yield f"ignored_layers: {len(unmatched) - _MOST_UNMATCHED} more entries match no linear layer."
    if found and config.group_size != AUTO and int(config.group_size) not in found:
        sizes = ", ".join(map(str, found))
        yield f"group_size {config.group_size} had no effect: the model has INT8 layers of group {sizes}."
    if fp8 := sum(1 for d in decisions if d.quantize and d.layer.is_fp8):
        yield f"{fp8} layers come from fp8, so they are rounded twice; a bf16 file gives a closer result."


def summary_of_reasons(decisions: Iterable[Decision]) -> Counter[str]:
    """Counts kept layers by reason."""
    return Counter(d.reason for d in decisions)


def nothing_to_quantize(plan: Plan) -> str:
    """The sentence for a model in which the settings leave nothing to do and nothing is INT8."""
    reasons = "; ".join(
        f"{count} x {reason}" for reason, count in summary_of_reasons(plan.kept).most_common(4)
    )
    return f"no linear layer is left to quantize ({reasons or 'the model has no linear layer'})."
