"""Counts which layers the weight patches (LoRA and its kin) of a patcher reach. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from dataclasses import dataclass

from .patterns import MODEL_PREFIX


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

    Args:
        patches: key of a parameter -> its patches.
        int8_layers: names of the INT8 layers below the diffusion model.
    """
    int8_keys = {f"{MODEL_PREFIX}{name}.{part}" for name in int8_layers for part in ("weight", "bias")}
    on_int8 = sum(len(entries) for key, entries in patches.items() if key in int8_keys)
    return PatchCount(on_int8, sum(map(len, patches.values())) - on_int8)
