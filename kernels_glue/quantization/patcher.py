"""Puts a rebuilt model into a patcher that keeps everything else of the source patcher."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import comfy.model_patcher
import torch
from comfy.patcher_extension import CallbacksMP

from ..errors import KitchenSolError
from .config import NODE
from .patterns import MODEL_PREFIX
from .pristine import PristineWeights, taken
from .rebuild import build_model

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher

KEY = "kitchen_int8"


def refuse_bound_patches(source: ModelPatcher) -> None:
    """Refuses a source with patches that hold its own layers.

    They would go on working on the unquantized layers, without a word, and keep them in memory.
    """
    bound = next(_bound_patches(source), None)
    if bound is not None:
        what, node = bound
        raise KitchenSolError(
            NODE,
            f"the input model carries {what}, bound to its unquantized layers.",
            f"Put this node before {node}.",
        )


def root_patcher(source: ModelPatcher, model: BaseModel) -> ModelPatcher:
    """Returns the patcher from which all patchers of a rebuilt model descend.

    It must live as long as the model is kept for reuse: core hands a loaded model to the parent of its
    patcher when the patcher goes, and cannot unload a model that is left without any.
    """
    return type(source)(model, source.load_device, source.offload_device)


def attach(source: ModelPatcher, root: ModelPatcher) -> ModelPatcher:
    """Returns a clone of `source` around the root's model that holds no reference to the source's."""
    patcher = source.clone(model_override=root.get_clone_model_override())
    patcher.parent = root
    patcher.size = 0
    patcher.model_size()
    patcher.clone_base_uuid = root.clone_base_uuid
    patcher.hook_backup = root.hook_backup
    patcher.cached_hook_patches = {}
    patcher.current_hooks = None
    # These are copies of the unquantized model on other devices.
    patcher.remove_additional_models("multigpu")
    # ModelComputeDtype before this node: the rebuilt model has that dtype by itself, and core does not
    # use quantized kernels while it is told to cast.
    patcher.object_patches.pop("manual_cast_dtype", None)
    patcher.force_cast_weights = False
    _make_copyable(patcher)
    return patcher


def _make_copyable(patcher: ModelPatcher) -> None:
    """Lets core make further copies of the model that a patcher, or a clone of it, holds."""
    patcher.remove_callbacks_with_key(CallbacksMP.ON_CLONE, KEY)
    patcher.add_callback_with_key(CallbacksMP.ON_CLONE, KEY, _register_rebuild)
    _register_rebuild(patcher, patcher)


def _register_rebuild(_: ModelPatcher, clone: ModelPatcher, *_args: Any) -> None:
    # What core calls to get another copy of the model (without dynamic VRAM for torch.compile, on
    # another device for multigpu). An inherited one would load the unquantized file again.
    clone.cached_patcher_init = (_Rebuild(clone), ())


class _Rebuild:
    """Builds a fresh patcher around the weights of the model that a patcher holds.

    Holds the model weakly: whoever calls this does it through a patcher that keeps it alive.
    """

    def __init__(self, patcher: ModelPatcher):
        weights = PristineWeights.of(patcher)
        self._model = weakref.ref(weights.model)
        self._backups = (weights.backup, weights.backup_buffers, weights.hook_backup)
        self._devices = (patcher.load_device, patcher.offload_device)

    def __call__(self, disable_dynamic: bool = False, **_: Any) -> ModelPatcher:
        model = self._model()
        if model is None:
            raise RuntimeError(f"{NODE}: the quantized model is gone; run the node again.")
        core = comfy.model_patcher
        patcher_class = core.ModelPatcher if disable_dynamic else core.CoreModelPatcher
        share = patcher_class is not core.ModelPatcher
        weights = PristineWeights(model, *self._backups)
        state_dict = {key: taken(tensor, share) for key, tensor in weights.items()}
        offload_device = self._devices[1]
        rebuilt = build_model(model, model.get_dtype_inference(), offload_device, state_dict, share)
        patcher = patcher_class(rebuilt, *self._devices)
        _make_copyable(patcher)
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
