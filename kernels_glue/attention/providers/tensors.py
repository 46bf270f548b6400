"""What the kernels ask of q, k and v: shape, dtype, strides. Copies only what breaks a rule."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..sol import BLOCK, SolOptions
from ..strides import INT32_REACH, on_16_bytes

_PACKAGES_HEAD_DIMS = (128,)


def misfit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtypes: Collection[torch.dtype],
    head_dims: Collection[int] = _PACKAGES_HEAD_DIMS,
) -> str:
    """What a Sol kernel cannot take about [B, T, H, D] tensors, as in "head_dim 64, not 128"; or empty.

    Args:
        dtypes, head_dims: what it takes; head_dims by default what the kernels of other packages take.
    """
    if not q.shape == k.shape == v.shape:
        return "q, k and v of different shapes"
    if q.shape[-1] not in head_dims:
        return f"head_dim {q.shape[-1]}, not {' or '.join(map(str, head_dims))}"
    if not q.dtype == k.dtype == v.dtype:
        return "q, k and v of different dtypes"
    if q.dtype not in dtypes:
        return f"{_name(q.dtype)}, not {' or '.join(_name(d) for d in dtypes)}"
    return ""


def past_32_bits(q: torch.Tensor, batch: int = 1) -> str:
    """Why offsets into [batch, T, H, D] elements, T in whole blocks, do not fit 32 bits; or empty."""
    _, tokens, heads, head_dim = q.shape
    padded = -(-tokens // BLOCK) * BLOCK
    if batch * padded * heads * head_dim < INT32_REACH:
        return ""
    return f"{tokens} tokens of {heads} x {head_dim}, past its 32-bit offsets"


def dense_last_dim(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its last dimension is contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if every row starts on 16 bytes and is contiguous, else a contiguous copy."""
    if tensor.stride(-1) == 1 and on_16_bytes(tensor):
        return tensor
    # Not .contiguous(): a contiguous tensor with a crooked storage offset would come back as it is.
    return tensor.clone(memory_format=torch.contiguous_format)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous and starts on 16 bytes, else a contiguous copy."""
    return aligned(tensor.contiguous())


def sink_tokens(options: SolOptions) -> tuple[int, int | None]:
    """(sink_tokens, sink_start) as the paper's kernels take them; a start of None would mean the end."""
    start, stop = options.sink_keys
    return (stop - start, start) if stop > start else (0, None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
