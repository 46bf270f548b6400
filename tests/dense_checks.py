"""What the tests of the dense attention backends share: calls, and the exact attention in fp64."""

from __future__ import annotations

from typing import Any

import torch
from comfyui import inprocess

read_call = inprocess.pack_module("kernels_glue.attention.call").read_call


def qkv(
    batch: int,
    heads: int,
    rows: int,
    head_dim: int,
    *,
    keys: int | None = None,
    key_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as [B, H, T, D], with means that differ between heads."""
    generator = torch.Generator().manual_seed(seed)

    def make(heads: int, rows: int) -> torch.Tensor:
        noise = torch.randn((batch, heads, rows, head_dim), generator=generator)
        return (noise + torch.randn((1, heads, 1, head_dim), generator=generator)).to(device, dtype)

    keys, key_heads = keys or rows, key_heads or heads
    return make(heads, rows), make(key_heads, keys), make(key_heads, keys)


def call_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, **options: Any) -> Any:
    """The AttentionCall of tensors [B, H, T, D]."""
    return read_call(q, k, v, q.shape[1], mask, skip_reshape=True, skip_output_reshape=True, **options)


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Softmax attention [B, H, T, D] in fp64, from its definition.

    Args:
        mask: broadcasts to [B, H, Tq, Tk]; bool (True counts) or added to the scores.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = q.double() @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if causal:
        later = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None]
        scores = scores.masked_fill(later.to(q.device), float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error; not a number if the result is none."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())
