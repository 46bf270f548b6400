"""The blocks of a DiT in the order in which they are expected to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..blocks import find_block_lists, main_lists, uncompiled
from ..errors import KitchenSolError
from .config import NODE


@dataclass(frozen=True)
class Found:
    """A model's repeated blocks.

    Attributes:
        lists: name and length of each block list.
        blocks: (name below the diffusion model, module), each module once.
        aside: indices of those that are not of the main lists.
    """

    lists: tuple[tuple[str, int], ...]
    blocks: tuple[tuple[str, torch.nn.Module], ...]
    aside: frozenset[int]


def find_blocks(diffusion_model: torch.nn.Module) -> Found:
    """Side lists first, then the main ones as they run; none for a model without such lists.

    Raises:
        KitchenSolError: two blocks share a part that has weights.
    """
    model = uncompiled(diffusion_model)
    main = [name for name, _ in main_lists(model)]
    lists = [name for name in find_block_lists(model) if name not in main] + main
    blocks: dict[torch.nn.Module, str] = {}
    aside = 0
    for name in lists:
        for child, module in model.get_submodule(name).named_children():
            blocks.setdefault(module, f"{name}.{child}")
        if name not in main:
            aside = len(blocks)
    _refuse_shared(blocks)
    counts = tuple((name, len(model.get_submodule(name))) for name in lists)
    return Found(counts, tuple((name, module) for module, name in blocks.items()), frozenset(range(aside)))


def _refuse_shared(blocks: Mapping[torch.nn.Module, str]) -> None:
    owners: dict[torch.nn.Module, str] = {}
    for block, name in blocks.items():
        for module in block.modules():
            other = owners.setdefault(module, name)
            own = (*module._parameters.values(), *module._buffers.values())
            if other != name and any(tensor is not None for tensor in own):
                raise KitchenSolError(
                    NODE,
                    f"the blocks {other} and {name} share a {type(module).__name__}, which cannot be in two"
                    " places.",
                    "Connect this model without the node.",
                )
