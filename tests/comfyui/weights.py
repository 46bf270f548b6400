"""Random weights for tiny models: one rule that keeps any transformer's activations finite."""

from __future__ import annotations

import math
import zlib

import torch


def _generator(name: str, seed: int) -> torch.Generator:
    # Seeded per name, so that a test that adds a block leaves every other weight as it was.
    return torch.Generator().manual_seed((zlib.crc32(name.encode()) + 0x9E3779B1 * seed) % 2**63)


def random_tensor(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """A random fp32 weight of `shape` for the parameter `name`, deterministic for (name, seed).

    Norm weights are 1 +- 5%, biases +- 2%, everything else has a standard deviation of
    1/sqrt(fan_in): each layer keeps the variance of its input, so outputs stay of order 1.
    """
    values = torch.randn(shape, generator=_generator(name, seed))
    leaf = name.rsplit(".", 1)[-1]
    if len(shape) == 1 and leaf in ("weight", "scale"):
        return 1.0 + 0.05 * values
    if len(shape) <= 1:
        return 0.02 * values
    fan_in = shape[-1] if leaf != "weight" else math.prod(shape[1:])
    return values / math.sqrt(fan_in)


def fill(
    template: dict[str, torch.Tensor], seed: int, matrix_dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Random CPU tensors with the names, shapes and dtypes of `template` (a state dict, meta is fine).

    matrix_dtype: if given, weights with two or more axes that `template` does not hold in fp32
    get this dtype instead, the way fp8 checkpoints are made.
    """
    filled = {}
    for name, tensor in template.items():
        dtype = tensor.dtype
        if matrix_dtype is not None and tensor.ndim >= 2 and dtype != torch.float32:
            dtype = matrix_dtype
        filled[name] = random_tensor(name, tensor.shape, seed).to(dtype)
    return filled
