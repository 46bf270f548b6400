"""Applies LoRA to blocks, with the bits that core gives a layer on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import KitchenSolError
from .config import NODE
from .leaves import leaves
from .slab import Block, Part

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


class Backup(NamedTuple):
    """What core keeps of a weight that it patched."""

    weight: torch.Tensor
    inplace_update: bool = False


def bake(
    patcher: ModelPatcher,
    blocks: Sequence[Block],
    keys: Collection[str],
    device: torch.device,
    between: Callable[[], None],
) -> None:
    """Gives blocks their patched weights; the original ones are in `patcher.backup`, as core has it.

    Core computes them on the device, with the key's own seed for the rounding, as when it loads the whole
    model: so the streamed model has the bits of the resident one.

    Args:
        keys: those that core patches (it leaves parameters of modules with submodules alone).
        between: called before each weight; may raise.

    Raises:
        KitchenSolError: a patch changes the shape of a weight.
    """
    for block in blocks:
        parts = [part for part in block.parts if part.key in keys and part.key in patcher.patches]
        if not parts or parts[0].key in patcher.backup:
            continue
        baked = {}
        for part in parts:
            between()
            baked[part.key] = _baked(patcher, part, device)
        originals = {part.key: Backup(part.tensor) for part in parts}  # before they are replaced
        block.patch(baked)
        patcher.backup.update(originals)


def restore(patcher: ModelPatcher, blocks: Sequence[Block]) -> None:
    """Gives blocks their original weights."""
    for block in blocks:
        for part in block.parts:
            patcher.backup.pop(part.key, None)
        block.unpatch()


def _baked(patcher: ModelPatcher, part: Part, device: torch.device) -> torch.Tensor:
    """The patched weight in host memory, where it waits for the others of its block."""
    baked = patcher.patch_weight_to_device(part.key, device_to=device, return_weight=True)
    found = [(leaf.dtype, tuple(leaf.shape)) for leaf in leaves(baked)]
    if found != [(leaf.dtype, leaf.size) for leaf in part.leaves]:
        raise KitchenSolError(
            NODE,
            f"a patch gives {part.key} another shape ({tuple(baked.shape)} instead of"
            f" {tuple(part.tensor.shape)}), and a weight in a slab cannot change its size.",
            "Remove that LoRA, or sample this model without the node.",
        )
    return baked
