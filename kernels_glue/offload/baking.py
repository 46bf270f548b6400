"""Applies LoRA to blocks in host memory, with the bits that core gives a layer on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import KitchenSolError
from .config import NODE
from .leaves import leaves
from .slab import Block, Part

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


class Backup:
    """What core keeps of a weight that it patched (a named tuple there)."""

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.inplace_update = False


def bake(
    patcher: ModelPatcher,
    blocks: Sequence[Block],
    keys: Collection[str],
    device: torch.device,
    between: Callable[[], None],
) -> None:
    """Writes the patched weights of blocks into their slabs; the original ones go to `patcher.backup`.

    Core computes them on the device, with the key's own seed for the rounding, as when it loads the whole
    model: so the streamed model has the bits of the resident one.

    Args:
        keys: those that core patches (it leaves parameters of modules with submodules alone).
        between: called before each weight; may raise.

    Raises:
        KitchenSolError: a patch changes the shape of a weight.
    """
    for block in blocks:
        for part in block.parts:
            if part.key in keys and part.key in patcher.patches and part.key not in patcher.backup:
                between()
                _bake(patcher, part, block.host, device)


def restore(patcher: ModelPatcher, blocks: Sequence[Block]) -> bool:
    """Puts the original weights back into the slabs; whether there were any."""
    restored = False
    for block in blocks:
        for part in block.parts:
            if (backup := patcher.backup.pop(part.key, None)) is not None:
                _write(part, block.host, backup.weight)
                restored = True
    return restored


def _bake(patcher: ModelPatcher, part: Part, slab: torch.Tensor, device: torch.device) -> None:
    baked = patcher.patch_weight_to_device(part.key, device_to=device, return_weight=True)
    found = [(leaf.dtype, tuple(leaf.shape)) for leaf in leaves(baked)]
    if found != [(leaf.dtype, leaf.size) for leaf in part.leaves]:
        raise KitchenSolError(
            NODE,
            f"a patch gives {part.key} another shape ({tuple(baked.shape)} instead of"
            f" {tuple(part.tensor.shape)}), and a streamed weight cannot change its size.",
            "Remove that LoRA, or raise vram_budget_gb or resident_blocks so that all blocks are resident.",
        )
    original = part.tensor.detach().clone()
    _write(part, slab, baked)
    patcher.backup[part.key] = Backup(original)


def _write(part: Part, slab: torch.Tensor, tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        for leaf, value in zip(part.leaves, leaves(tensor), strict=True):
            leaf.view(slab).copy_(value)
