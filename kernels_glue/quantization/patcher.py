"""Puts a quantized model into a patcher that keeps everything else of the source patcher."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import comfy.model_patcher
from comfy.patcher_extension import CallbacksMP

from .. import attach as patchers
from ..pristine import PristineWeights, taken
from .config import NODE
from .rebuild import build_model

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

KEY = "kitchen_int8"


def attach(source: ModelPatcher, root: ModelPatcher) -> ModelPatcher:
    """Returns a clone of `source` around the root's quantized model, of which core can make copies."""
    patcher = patchers.attach(source, root)
    # ModelComputeDtype before this node: the rebuilt model has that dtype by itself, and core does not
    # use quantized kernels while it is told to cast.
    patcher.object_patches.pop("manual_cast_dtype", None)
    patcher.force_cast_weights = False
    _make_copyable(patcher)
    return patcher


def detach(patcher: ModelPatcher) -> None:
    """Clones of a patcher are no longer taken for ones around a quantized model."""
    patcher.remove_callbacks_with_key(CallbacksMP.ON_CLONE, KEY)


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
