"""INT8 on a CPU in a bearable time, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Sums of products of int8 values are integers up to this size, and fp32 holds each of them exactly.
_EXACT = 2**24
_LARGEST_PRODUCT = 128 * 128


@contextmanager
def quick_int8() -> Iterator[None]:
    """While it lasts, torch's INT8 matrix product on a CPU runs in fp32.

    PyTorch's own is 5 to 20 times slower there than fp32, and is what comfy_kitchen's reference kernel spends
    its time on. The result is the same to the bit for up to 1024 inputs, because every partial sum is an
    integer that fp32 holds exactly; longer ones and other devices keep PyTorch's own.
    """
    import torch

    real = torch._int_mm

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.is_cuda or a.shape[1] * _LARGEST_PRODUCT > _EXACT:
            return real(a, b)
        return (a.float() @ b.float()).to(torch.int32)

    torch._int_mm = product
    try:
        yield
    finally:
        torch._int_mm = real
