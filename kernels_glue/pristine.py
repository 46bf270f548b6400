"""Reads a model's weights as they were loaded, whatever is patched into them at the moment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import comfy.utils
import torch
from comfy.quant_ops import QuantizedTensor

from .names import MODEL_PREFIX

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher


@dataclass(frozen=True)
class PristineWeights:
    """The weights of `model.diffusion_model` without LoRA, hooks or device casts.

    Core's `get_key_patches` gives the same for plain models, but looks for `weight_scale` as an
    attribute on quantized layers and fails there, so the backups are consulted here. They are shared
    by all patchers of one model.
    """

    model: BaseModel
    backup: Mapping
    backup_buffers: Mapping
    hook_backup: Mapping

    @classmethod
    def of(cls, patcher: ModelPatcher) -> PristineWeights:
        return cls(patcher.model, patcher.backup, getattr(patcher, "backup_buffers", {}), patcher.hook_backup)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns a parameter or buffer by its name below the diffusion model, on whatever device."""
        key = MODEL_PREFIX + name
        if key in self.backup:
            return self.backup[key].weight
        if key in self.hook_backup:
            return self.hook_backup[key][0]
        if key in self.backup_buffers:
            return self.backup_buffers[key]
        return comfy.utils.get_attr(self.model, key)

    def items(self, skip: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the state dict in core's file format, in which a quantized weight has several keys.

        Args:
            skip: keys to leave out.
        """
        seen = set(skip)
        for key, value in self.model.diffusion_model.state_dict().items():
            if key in seen:
                continue
            # `comfy_quant` is text that exists only here, not in a tensor of the model.
            entries = {key: value} if key.endswith(".comfy_quant") else self._entries(key)
            seen.update(entries)
            yield from entries.items()

    def _entries(self, name: str) -> dict[str, torch.Tensor]:
        # A quantized weight brings its scales along.
        tensor = self[name]
        return tensor.state_dict(name) if isinstance(tensor, QuantizedTensor) else {name: tensor}


def taken(tensor: torch.Tensor, share: bool) -> torch.Tensor:
    """Returns a tensor for another model to own.

    Args:
        share: the same storage (but not the same Parameter, which would move with its model), as core
            does with memory-mapped files; otherwise a copy on the CPU.
    """
    return tensor.detach() if share else tensor.detach().to("cpu", copy=True)
