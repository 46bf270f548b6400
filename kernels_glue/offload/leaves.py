"""Takes tensors apart into the plain tensors that hold their bytes, and puts them together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of a tensor: itself, or the data and scales of a quantized one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.detach()]
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name).detach() for name in names]


def rebuilt(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor like the given one around other leaves, of the same shapes and dtypes, on any device."""
    if not is_traceable_wrapper_subclass(tensor):
        return parts[0]
    names, context = tensor.__tensor_flatten__()
    inner = dict(zip(names, parts, strict=True))
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
