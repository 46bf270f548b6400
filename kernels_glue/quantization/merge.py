"""Merges weight patches (LoRA and its kin) into weights before these are quantized."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import comfy.float
import comfy.lora
import comfy.utils
import torch
from comfy.quant_ops import QuantizedTensor

from ..names import MODEL_PREFIX
from ..pristine import PristineWeights


@dataclass(frozen=True)
class Merge:
    """The patches to merge: parameter name below the diffusion model -> its patches."""

    patches: Mapping[str, list]

    @classmethod
    def of(cls, patches: Mapping[str, list], weights: PristineWeights, to_quantize: Collection[str]) -> Merge:
        """Selects what can be merged exactly.

        A layer that stays quantized as it is would be rounded twice, and a patch that resizes its weight
        does not fit the module; both stay patches, which core applies when the model is loaded. Patches
        for what is no parameter (the scales that merging two INT8 models brings along) are left alone.

        Args:
            to_quantize: names of the layers that are about to be quantized, scaled fp8 ones included.
        """
        about_to_be = {f"{layer}.weight" for layer in to_quantize}
        mergeable = {}
        for name, _ in weights.model.diffusion_model.named_parameters():
            key = MODEL_PREFIX + name
            if key not in patches:
                continue
            weight = weights[name]
            fits = comfy.lora.calculate_shape(patches[key], weight, key) == weight.shape
            if fits and (name in about_to_be or not isinstance(weight, QuantizedTensor)):
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
