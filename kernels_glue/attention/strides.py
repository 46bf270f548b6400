"""How far apart the elements of a tensor lie, and where its rows begin, for kernels that ask for it."""

from __future__ import annotations

import torch

# Kernels that count elements in 32 bits wrap around from here on.
INT32_REACH = 2**31


def extent(tensor: torch.Tensor) -> int:
    """Number of elements from the first to the last of a view, the gaps between them included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def within_int32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied without gaps if offsets into it do not fit 32 bits.

    A row of H3's fused qkv has 21504 elements, so a view of its v is out of reach after 99,865 rows.
    """
    return tensor if extent(tensor) < INT32_REACH else tensor.contiguous()


def on_16_bytes(tensor: torch.Tensor) -> bool:
    """Whether every row of the last dimension begins on 16 bytes, which is what kernels load at once."""
    step = 16 // tensor.element_size()
    rows_fit = all(
        size == 1 or stride % step == 0
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )
    return rows_fit and tensor.data_ptr() % 16 == 0
