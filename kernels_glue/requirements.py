"""Looks for what a node needs of ComfyUI, by name and never by version."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Iterator

from .errors import KitchenSolError


def missing_names(names: Iterable[str]) -> Iterator[str]:
    """Those of the dotted names that are not there."""
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            yield name


def missing_parameters(parameters: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Those of the (function, parameter) pairs whose function exists longer than the parameter."""
    for name, parameter in parameters:
        if parameter not in inspect.signature(pkgutil.resolve_name(name)).parameters:
            yield f"{name}({parameter}=...)"


def refuse(node: str, missing: Iterable[str]) -> None:
    """Raises a KitchenSolError that names what is missing, if anything is."""
    if lacking := ", ".join(missing):
        raise KitchenSolError(node, f"this ComfyUI lacks {lacking}.", "Update ComfyUI to 0.27 or newer.")
