"""Lists the linear layers of a loaded diffusion model for the plan."""

from __future__ import annotations

import torch
from comfy.quant_ops import QuantizedTensor

from ..blocks import find_block_lists
from ..core_models import linear_modules, recorded_dtype
from ..errors import KitchenSolError
from .config import NODE
from .plan import LayerInfo


def survey(diffusion_model: torch.nn.Module) -> tuple[LayerInfo, ...]:
    """Describes every linear layer.

    Raises:
        KitchenSolError: the model has no repeated block lists, or its weights are stored in a form
            that only their own loader understands (GGUF, nunchaku).
    """
    block_lists = find_block_lists(diffusion_model)
    if not block_lists:
        raise KitchenSolError(
            NODE,
            f"{type(diffusion_model).__name__} has no repeated transformer block list; this node quantizes"
            " diffusion transformers (MiniMax-H3, Wan, Flux, Qwen-Image, ...), not UNets such as SDXL.",
            "Connect the model without this node.",
        )
    prefixes = tuple(f"{name}." for name in block_lists)
    dtype = getattr(diffusion_model, "dtype", None)
    return tuple(
        _describe(name, module, name.startswith(prefixes), dtype)
        for name, module in linear_modules(diffusion_model)
    )


def _describe(name: str, module: torch.nn.Module, in_block: bool, dtype: torch.dtype | None) -> LayerInfo:
    weight = getattr(module, "weight", None)
    if weight is None:
        return LayerInfo(name, module.in_features, module.out_features, in_block, has_weight=False)
    if isinstance(weight, QuantizedTensor):
        params = weight._params
        group = params.convrot_groupsize if getattr(params, "convrot", False) else None
        return LayerInfo(
            name,
            module.in_features,
            module.out_features,
            in_block,
            quant_format=module.quant_format,
            group_size=group,
            is_fp8=module.quant_format.startswith("float8"),
        )
    _refuse_foreign_weight(name, weight)
    island = recorded_dtype(module) is torch.float32 and dtype not in (None, torch.float32)
    return LayerInfo(
        name,
        module.in_features,
        module.out_features,
        in_block,
        is_fp8=weight.element_size() == 1,
        is_fp32_island=island,
    )


def _refuse_foreign_weight(name: str, weight: torch.Tensor) -> None:
    # A GGUF loader's tensors report the shape of the weight but hold packed bytes of their own layout.
    if type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.dtype.is_floating_point:
        return
    raise KitchenSolError(
        NODE,
        f"the weight of {name} is a {type(weight).__name__} of {weight.dtype}; the model was loaded by a"
        " loader with a weight format of its own (GGUF, nunchaku, bitsandbytes).",
        "Load a bf16, fp16 or fp8 safetensors file with Load Diffusion Model instead.",
    )
