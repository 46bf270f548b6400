"""Builds the model that core would have built from a file with the same INT8 layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import comfy.ops
import torch

from ..core_models import assemble, copy_config
from .convert import Int8Weight
from .plan import INT8_FORMAT

if TYPE_CHECKING:
    from comfy.model_base import BaseModel


# Every key that core's file format knows for one quantized layer, the bias excepted.
QUANTIZED_PARTS = ("weight", "weight_scale", "input_scale", "comfy_quant")


def int8_entries(name: str, weight: Int8Weight) -> dict[str, torch.Tensor]:
    """Returns the state dict entries of one INT8 layer in core's file format (comfy/ops.py)."""
    conf = {"format": INT8_FORMAT, "convrot": True, "convrot_groupsize": weight.group_size}
    return {
        f"{name}.weight": weight.data,
        f"{name}.weight_scale": weight.scale,
        f"{name}.comfy_quant": torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8),
    }


def build_model(
    original: BaseModel,
    compute_dtype: torch.dtype,
    offload_device: torch.device,
    state_dict: Mapping[str, torch.Tensor],
    share: bool,
) -> BaseModel:
    """Builds a new BaseModel with the original's configuration and weight dtype around a state dict.

    Args:
        compute_dtype: what the model computes in; core's own choice may differ from the original's (a
            bf16 Wan becomes fp16).
        offload_device: where the model is put.
        state_dict: keys below the diffusion model; INT8 layers in core's file format.
        share: take the tensors as they are, as core does with memory-mapped files, instead of copying.

    Raises:
        RuntimeError: the new model lacks or does not know some of the keys.
    """
    config = copy_config(original.model_config)
    dtype = original.get_dtype()
    config.quant_config = {"mixed_ops": True}
    config.set_inference_dtype(dtype, compute_dtype)
    config.custom_operations = _operations(
        comfy.ops.pick_operations(dtype, compute_dtype, model_config=config)
    )
    return assemble(config, original, state_dict, offload_device, share)


def _operations(core_operations: type) -> type:
    """Core's operations, with a Linear whose state dict keys can all be read as attributes.

    Core resolves the keys of a state dict by getattr in `get_key_patches`, which model merging and
    hooks call, and fails on quantized layers: `'Linear' object has no attribute 'weight_scale'`.
    """

    class Linear(core_operations.Linear):
        @property
        def weight_scale(self) -> torch.Tensor:
            return self._state_entry("weight_scale")

        @property
        def comfy_quant(self) -> torch.Tensor:
            return self._state_entry("comfy_quant")

        def _state_entry(self, name: str) -> torch.Tensor:
            entries: dict[str, Any] = self.state_dict()
            if name not in entries:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return entries[name]

    return type("KitchenOperations", (core_operations,), {"Linear": Linear})
