"""Counts which layers the weight patches (LoRA and its kin) of a patcher reach. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from dataclasses import dataclass

from ..names import MODEL_PREFIX

_DERIVED_PARTS = ("weight_scale", "comfy_quant")


@dataclass(frozen=True)
class PatchCount:
    """How many weight patches a patcher holds, by the kind of layer that they reach."""

    on_int8: int
    on_others: int

    @property
    def total(self) -> int:
        return self.on_int8 + self.on_others


def count_patches(patches: Mapping[str, Sized], int8_layers: Collection[str]) -> PatchCount:
    """Counts the entries of `ModelPatcher.patches`; several LoRA on one layer count each.

    Merging two INT8 models makes core add patches for their scales too, which it never applies: a layer
    is requantized from its merged weight. They do not count.

    Args:
        patches: key of a parameter -> its patches.
        int8_layers: names of the INT8 layers below the diffusion model.
    """
    int8_keys = {f"{MODEL_PREFIX}{name}.{part}" for name in int8_layers for part in ("weight", "bias")}
    never_applied = {f"{MODEL_PREFIX}{name}.{part}" for name in int8_layers for part in _DERIVED_PARTS}
    on_int8 = sum(len(entries) for key, entries in patches.items() if key in int8_keys)
    total = sum(len(entries) for key, entries in patches.items() if key not in never_applied)
    return PatchCount(on_int8, total - on_int8)
