"""Takes the pack's nodes off a model, and puts them on again with other settings."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING

from ..applied import COMPUTE_DTYPE, Applied, Settings, applied_to
from ..applied import KEY as APPLIED
from ..attach import refuse_bound_patches
from ..attention.apply import patch_attention, remove_attention
from ..errors import KitchenSolError
from ..offload.apply import offload_model, remove_offload
from ..quantization.apply import quantize_model, remove_int8
from ..quantization.config import QuantizeConfig
from ..report import Show
from .config import NODE

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# What ModelPatcher.clone sets from the model that it clones; everything else is what nodes did to it.
_OF_THE_MODEL = frozenset(
    {
        "model",
        "size",
        "parent",
        "backup",
        "backup_buffers",
        "object_patches_backup",
        "pinned",
        "hook_backup",
        "cached_hook_patches",
        "current_hooks",
        "cached_patcher_init",
        "clone_base_uuid",
        "is_multigpu_base_clone",
        "weight_inplace_update",
        "non_dynamic_delegate_model",
    }
)


def without_our_patches(patcher: ModelPatcher) -> ModelPatcher:
    """A clone of a patcher with everything that other nodes did to it, and nothing of the pack's nodes.

    Where one of them had put another model in its place, the clone is around the model that stood before,
    with the same LoRA, before and after that node.

    Raises:
        KitchenSolError: the model before is gone, or a later patch holds layers of the one in its place.
    """
    done = applied_to(patcher)
    plain = _around_origin(patcher, done) if done.origins else patcher.clone()
    for remove in (remove_attention, remove_offload, remove_int8):
        remove(plain)
    plain.remove_attachments(APPLIED)
    return plain


def apply_settings(
    reference: ModelPatcher, settings: Settings, show: Show = lambda report: None
) -> ModelPatcher:
    """Applies the pack's nodes to a patcher: INT8, Sol, Offload, whichever the settings have.

    A conversion that has to be made for it is kept only as long as the result.

    Args:
        show: gets what the nodes would show.

    Raises:
        KitchenSolError: a node refuses the model or a setting.
    """
    patcher = reference
    configs = (*settings.int8_before, *([settings.int8] if settings.int8 else []))
    for config, baked in zip_longest(configs, settings.baked[: len(configs)], fillvalue=None):
        patcher = _quantized(patcher, config, baked, show)
    if settings.sol is not None:
        patcher, *_ = patch_attention(patcher, settings.sol, show)
    if settings.offload is not None:
        patcher, _ = offload_model(patcher, settings.offload, show, settings.lane_for)
    return patcher


def _quantized(
    patcher: ModelPatcher, config: QuantizeConfig, baked: Mapping[str, int] | None, show: Show
) -> ModelPatcher:
    """Kitchen INT8 Quantize Model, which bakes the patches that it had baked, and leaves later ones alone.

    Args:
        baked: see Settings; None bakes all.
    """
    baked = {key: len(entries) for key, entries in patcher.patches.items()} if baked is None else baked
    later = {key: entries[baked.get(key, 0) :] for key, entries in patcher.patches.items()}
    if config.lora != "bake" or not any(later.values()):
        return quantize_model(patcher, config, show, keep=False)[0]
    earlier = patcher.clone()
    earlier.patches = {key: entries[: baked.get(key, 0)] for key, entries in patcher.patches.items()}
    earlier.patches = {key: entries for key, entries in earlier.patches.items() if entries}
    earlier.patches_uuid = uuid.uuid4()
    quantized, _ = quantize_model(earlier, config, show, keep=False)
    for key, entries in later.items():
        if entries:
            quantized.patches[key] = quantized.patches.get(key, []) + entries
    quantized.patches_uuid = uuid.uuid4()
    return quantized


def _around_origin(patcher: ModelPatcher, done: Applied) -> ModelPatcher:
    refuse_bound_patches(
        patcher,
        NODE,
        "quantized or streamed layers",
        "Connect the unquantized model, with the same patch, to the input 'reference'; for a recommendation"
        " leave the patch out.",
    )
    plain, changes = _alive(*done.origins).clone(), patcher.clone()
    for name, value in vars(changes).items():
        if name not in _OF_THE_MODEL:
            setattr(plain, name, value)
    if hasattr(plain, "register_load_device"):  # dynamic VRAM: another node may have chosen the device
        plain.register_load_device(plain.load_device)
    merged: dict[str, list] = {}
    for quantized in done.int8:
        for key in quantized.merged:
            merged.setdefault(key, []).extend(_alive(quantized.source).patches[key])
        if quantized.compute_dtype is not None and COMPUTE_DTYPE not in changes.object_patches:
            plain.object_patches[COMPUTE_DTYPE], plain.force_cast_weights = quantized.compute_dtype
    for key, entries in merged.items():
        plain.patches[key] = entries + plain.patches.get(key, [])
    return plain


def _alive(*patchers: weakref.ref[ModelPatcher]) -> ModelPatcher:
    """The first one that is still there."""
    found = next((patcher for one in patchers if (patcher := one()) is not None), None)
    if found is None:
        raise KitchenSolError(
            NODE,
            "the model before it was quantized or streamed is no longer in memory, so there is nothing to"
            " compare with and to try other settings on.",
            "Connect the very output that goes into Kitchen INT8 Quantize Model (without one, into Layerwise"
            " Offload), its LoRA included, to the input 'reference'.",
        )
    return found
