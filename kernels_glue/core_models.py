"""Builds core's models around given tensors, without a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.supported_models_base import BASE


def linear_modules(diffusion_model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields (dotted name, module) of every linear layer, core's quantized ones included."""
    for name, module in diffusion_model.named_modules():
        if _is_linear(module):
            yield name, module


def recorded_dtype(module: torch.nn.Module, parameter: str = "weight") -> torch.dtype | None:
    """The dtype that the model's code asked for, where core recorded it; the parameter may have another.

    Core's mixed precision Linear has no record for its weight: unquantized, it holds it in the compute dtype.
    """
    return getattr(module, f"{parameter}_comfy_model_dtype", None)


def copy_config(config: BASE) -> BASE:
    """A copy of a model's configuration, to be changed."""
    # copy.copy asks the instance for __reduce_ex__ and friends, which core's __getattr__ answers with None.
    copy = type(config).__new__(type(config))
    copy.__dict__.update(config.__dict__)
    copy.unet_config = dict(config.unet_config)
    return copy


def assemble(
    config: BASE,
    original: BaseModel,
    state_dict: Mapping[str, torch.Tensor],
    offload_device: torch.device,
    share: bool,
) -> BaseModel:
    """Builds the BaseModel of a configuration, with weights in the dtypes in which they are given.

    Args:
        original: a model with the same layers.
        state_dict: keys below the diffusion model; quantized layers in core's file format.
        offload_device: where the model is put.
        share: take the tensors as they are, as core does with memory-mapped files, instead of copying.

    Raises:
        RuntimeError: the new model lacks or does not know some of the keys.
    """
    model = config.get_model(state_dict, "")
    missing, unexpected = model.diffusion_model.load_state_dict(dict(state_dict), strict=False, assign=share)
    if missing or unexpected:
        raise RuntimeError(
            "the rebuilt model does not match the original: "
            f"missing {sorted(missing)[:5]}, unexpected {sorted(unexpected)[:5]}"
        )
    _restore_dtypes(original.diffusion_model, model.diffusion_model, state_dict)
    if not comfy.model_management.is_device_cpu(offload_device):
        model.to(offload_device)
    return model


def _restore_dtypes(
    original: torch.nn.Module, rebuilt: torch.nn.Module, state_dict: Mapping[str, torch.Tensor]
) -> None:
    """Puts unquantized linear layers back to the dtype that the original keeps them in.

    Core's mixed precision Linear casts every unquantized weight to the compute dtype: that would
    round the layers which a model wants in fp32 (MiniMax-H3's patch projections), and double raw fp8.
    """
    originals = dict(linear_modules(original))
    for name, module in linear_modules(rebuilt):
        if isinstance(module.weight, QuantizedTensor) or isinstance(originals[name].weight, QuantizedTensor):
            continue
        for part in ("weight", "bias"):
            tensor = state_dict.get(f"{name}.{part}")
            if tensor is None or getattr(module, part).dtype == tensor.dtype:
                continue
            setattr(module, part, torch.nn.Parameter(tensor, requires_grad=False))
        for part in ("weight", "bias"):
            if (dtype := recorded_dtype(originals[name], part)) is not None:
                # What core's dynamic loading casts a parameter to when it faults it in.
                setattr(module, f"{part}_comfy_model_dtype", dtype)


def _is_linear(module: torch.nn.Module) -> bool:
    # Core's mixed precision Linear is not a torch.nn.Linear, but names its sizes alike.
    if isinstance(module, torch.nn.Linear):
        return True
    return isinstance(module, comfy.ops.CastWeightBiasOp) and hasattr(module, "in_features")
