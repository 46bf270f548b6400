"""Merges weight patches (LoRA and its kin) into weights before these are quantized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import comfy.float
import comfy.lora
import comfy.utils
import torch
from comfy.quant_ops import QuantizedTensor

from .patterns import MODEL_PREFIX
from .pristine import PristineWeights


@dataclass(frozen=True)
class Merge:
    """The patches to merge: parameter name below the diffusion model -> its patches."""

    patches: Mapping[str, list]

    @classmethod
    def of(cls, patches: Mapping[str, list], weights: PristineWeights) -> Merge:
        """Selects what can be merged exactly.

        A layer that is INT8 already would be rounded twice, and a patch that resizes its weight does
        not fit the module; both stay patches, which core applies when the model is loaded.
        """
        names = (key.removeprefix(MODEL_PREFIX) for key in patches if key.startswith(MODEL_PREFIX))
        mergeable = {}
        for name in names:
            key = MODEL_PREFIX + name
            weight = weights[name]
            fits = comfy.lora.calculate_shape(patches[key], weight, key) == weight.shape
            if fits and not isinstance(weight, QuantizedTensor):
                mergeable[name] = patches[key]
        return cls(mergeable)

    @property
    def keys(self) -> frozenset[str]:
        """The merged keys of `ModelPatcher.patches`."""
        return frozenset(MODEL_PREFIX + name for name in self.patches)

    def exact(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Returns a weight with its patches added, in fp32; unpatched weights come back as they are."""
        if name not in self.patches:
            return weight
        return comfy.lora.calculate_weight(
            self.patches[name], weight.to(torch.float32, copy=True), MODEL_PREFIX + name
        )

    def rounded(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Returns a weight with its patches added, in its own dtype, with the bits that core gives it."""
        if name not in self.patches:
            return weight
        seed = comfy.utils.string_to_seed(MODEL_PREFIX + name)
        return comfy.float.stochastic_rounding(self.exact(name, weight), weight.dtype, seed=seed)


NOTHING = Merge({})


def without(patches: Mapping[str, list], keys: Iterable[str]) -> dict[str, list]:
    """Returns the patches that are left once those of `keys` are merged."""
    gone = frozenset(keys)
    return {key: entries for key, entries in patches.items() if key not in gone}
