"""Triton's interpreter, as tests of kernels use it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def compute_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the interpreter the bf16 of a GPU.

    It keeps bf16 as bit patterns, which its tl.dot multiplies as integers, and rounds to bf16 by cutting off.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return plain_dot(self, widened(a), widened(b), *others)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return plain_cast(self, source, to)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        bits = rounded.view(torch.int16).numpy().view(np.uint16).reshape(source.data.shape)
        return TensorHandle(bits, tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
