"""Which arguments a kernel's function takes: by its signature, whatever its version says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class Argument:
    """An argument for a kernel.

    Attributes:
        name: in the kernel's signature.
        value: what is wanted.
        neutral: what the kernel does if its signature lacks the argument.
        option: the same in the node's terms, for a message.
    """

    name: str
    value: Any
    neutral: Any = None
    option: str = ""


def accepted(function: Callable[..., Any], arguments: Iterable[Argument]) -> dict[str, Any]:
    """The keyword arguments to pass: those in the signature that are not at the signature's own default."""
    parameters = _parameters(function)
    return {
        a.name: a.value for a in arguments if a.name in parameters and parameters[a.name].default != a.value
    }


def refusal(function: Callable[..., Any], arguments: Iterable[Argument]) -> str:
    """Names what is wanted and is not in the signature, as in "has no token_aug (64 asked)"; or empty."""
    parameters = _parameters(function)
    lacking = [a for a in arguments if a.name not in parameters and a.value != a.neutral]
    return (
        f"has no {', '.join(f'{a.option or a.name} ({a.value} asked)' for a in lacking)}" if lacking else ""
    )


@lru_cache(maxsize=32)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
