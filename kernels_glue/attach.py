"""Puts another model into a clone of a patcher that keeps everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from .errors import KitchenSolError
from .names import MODEL_PREFIX

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher


def refuse_bound_patches(source: ModelPatcher, node: str, layers: str, remedy: str = "") -> None:
    """Refuses a source with patches that hold its own layers.

    They would go on working on the layers of the old model, without a word, and keep them in memory.

    Args:
        node: display name of the node that refuses.
        layers: what the layers of the old model are, such as "unquantized layers".
        remedy: what to do about it; by default to put the node before the one that set the patch.
    """
    bound = next(_bound_patches(source), None)
    if bound is not None:
        what, other = bound
        raise KitchenSolError(
            node,
            f"the input model carries {what}, bound to its {layers}.",
            remedy or f"Put this node before {other}.",
        )


def root_patcher(source: ModelPatcher, model: BaseModel) -> ModelPatcher:
    """Returns the patcher from which all patchers of a rebuilt model descend.

    It must live as long as the model is kept for reuse: core hands a loaded model to the parent of its
    patcher when the patcher goes, and cannot unload a model that is left without any.
    """
    return type(source)(model, source.load_device, source.offload_device)


def attach(source: ModelPatcher, root: ModelPatcher) -> ModelPatcher:
    """Returns a clone of `source` around the root's model that holds no reference to the source's.

    It has no dynamic VRAM if the root has none.
    """
    patcher = source.clone(
        disable_dynamic=not root.is_dynamic(), model_override=root.get_clone_model_override()
    )
    patcher.parent = root
    patcher.size = 0
    patcher.model_size()
    patcher.clone_base_uuid = root.clone_base_uuid
    patcher.hook_backup = root.hook_backup
    patcher.cached_hook_patches = {}
    patcher.current_hooks = None
    # These are copies of the old model on other devices.
    patcher.remove_additional_models("multigpu")
    return patcher


def _bound_patches(source: ModelPatcher) -> Iterator[tuple[str, str]]:
    for name, value in source.object_patches.items():
        if name.startswith(MODEL_PREFIX.rstrip(".")) and _holds_module(value):
            yield f"a replaced part ({name})", "the node that replaces it"
    for wrappers in source.wrappers.values():
        if "torch.compile" in wrappers:
            yield "a compiled model", "TorchCompileModel"
    for name in source.injections:
        yield f"an injection ({name})", "the node that injects it, such as a LoRA loader in bypass mode"


def _holds_module(value: object) -> bool:
    owner: Callable | object = getattr(value, "__self__", value)
    return isinstance(owner, torch.nn.Module)
