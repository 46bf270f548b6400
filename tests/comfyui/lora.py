"""Writes LoRA files for tiny models, and hands back the factors for a reference computation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .weights import random_tensor

if TYPE_CHECKING:
    from .builders import TinyModel

LoraFactors = dict[str, tuple[torch.Tensor, torch.Tensor, float]]


def layer_shapes(model_file: Path) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of each matrix in a safetensors file, by module name."""
    from safetensors import safe_open

    shapes = {}
    with safe_open(str(model_file), framework="pt") as tensors:
        names = tensors.keys()  # a handle, not a mapping: it does not iterate by itself
        for key in names:
            shape = tensors.get_slice(key).get_shape()
            if key.endswith(".weight") and len(shape) == 2:
                shapes[key.removesuffix(".weight")] = (shape[0], shape[1])
    return shapes


def write_lora(
    path: Path,
    model: TinyModel | Mapping[str, torch.Tensor],
    layers: Iterable[str],
    *,
    rank: int = 4,
    alpha: float | None = None,
    size: float = 1.0,
    seed: int = 11,
    prefix: str = "diffusion_model.",
) -> LoraFactors:
    """Write a LoRA for `layers` of `model` to `path`, in fp32.

    model: a TinyModel, whose file is read, or a state dict.
    layers: module names without prefix, such as "blocks.0.self_attn.q".
    alpha: the file's alpha, by default the rank, so that alpha / rank is 1.
    size: Frobenius norm of the change at strength 1, as a fraction of that of a weight whose
        entries have a standard deviation of 1/sqrt(in_features), like those of weights.py.

    Returns {layer: (up [N, rank], down [rank, K], alpha)}; the patched weight is
    W + strength * alpha / rank * up @ down. Raises KeyError for a layer the model does not have.
    """
    from safetensors.torch import save_file

    if isinstance(model, Mapping):
        shapes = {
            k.removesuffix(".weight"): tuple(v.shape) for k, v in model.items() if k.endswith(".weight")
        }
    else:
        shapes = layer_shapes(model.path)
    alpha = float(rank if alpha is None else alpha)

    factors: LoraFactors = {}
    tensors = {}
    for layer in layers:
        if layer not in shapes:
            raise KeyError(f"the model has no matrix {layer!r}")
        out_features, in_features = shapes[layer]
        # random_tensor gives up@down a norm of sqrt(N); the reference weight has the same.
        up = random_tensor(f"{layer}.up.weight", torch.Size((out_features, rank)), seed) * size
        down = random_tensor(f"{layer}.down.weight", torch.Size((rank, in_features)), seed)
        up = up * (rank / alpha)
        tensors[f"{prefix}{layer}.lora_up.weight"] = up.contiguous()
        tensors[f"{prefix}{layer}.lora_down.weight"] = down.contiguous()
        tensors[f"{prefix}{layer}.alpha"] = torch.tensor(alpha)
        factors[layer] = (up, down, alpha)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path))
    return factors
