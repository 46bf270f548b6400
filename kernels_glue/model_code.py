"""What the code of a model's class says, so that a model that learns something is noticed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType

import torch

from .blocks import uncompiled


def codes_of(diffusion_model: torch.nn.Module) -> Iterator[CodeType]:
    """The code of every function of a model's class and of its bases below torch.nn.Module."""
    for base in type(uncompiled(diffusion_model)).__mro__:
        if base is torch.nn.Module:
            return
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else member
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                yield code
