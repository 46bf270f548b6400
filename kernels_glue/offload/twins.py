"""A model without dynamic VRAM around the weights of one that has it, without reading a file again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import comfy.model_patcher
import comfy.utils
import torch
from comfy.quant_ops import QuantizedTensor

from ..attach import attach, refuse_bound_patches
from ..core_models import assemble, copy_config, recorded_dtype
from ..names import MODEL_PREFIX
from ..pristine import PristineWeights, taken
from .config import NODE

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher

_TWIN = "kitchen_sol_twin"

# One for each model for as long as that lives: all branches of a graph share it, and a node that runs again
# with other settings does not move the weights again.
_roots: weakref.WeakKeyDictionary[BaseModel, ModelPatcher] = weakref.WeakKeyDictionary()


def without_dynamic_vram(source: ModelPatcher) -> ModelPatcher:
    """A clone of a patcher whose model holds the same tensors, and which core loads without dynamic VRAM.

    Raises:
        KitchenSolError: the source carries patches that hold its own layers.
    """
    if not source.is_dynamic():
        return source.clone()
    refuse_bound_patches(source, NODE, "layers, of which this node makes a copy without dynamic VRAM")
    root = _roots.get(source.model)
    if root is None:
        root = _roots[source.model] = _root(source)
    return attach(source, root)


def twin_of(model: BaseModel) -> BaseModel | None:
    """The model whose tensors a model was built around, if it is still there."""
    reference = model.__dict__.get(_TWIN)
    return reference() if reference is not None else None


def _root(source: ModelPatcher) -> ModelPatcher:
    original = source.model
    state_dict = dict(_state_dict(source))
    model = assemble(
        copy_config(original.model_config), original, state_dict, source.offload_device, share=True
    )
    model.__dict__[_TWIN] = weakref.ref(original)
    return comfy.model_patcher.ModelPatcher(model, source.load_device, source.offload_device)


def _state_dict(source: ModelPatcher) -> Iterator[tuple[str, torch.Tensor]]:
    """The source's tensors in the dtypes that dynamic VRAM casts them to when it loads them."""
    for key, tensor in PristineWeights.of(source).items():
        owner, _, name = (MODEL_PREFIX + key).rpartition(".")
        module = comfy.utils.get_attr(source.model, owner)
        dtype = recorded_dtype(module, name)
        quantized = isinstance(getattr(module, "weight", None), QuantizedTensor)
        if dtype is not None and not quantized and tensor.dtype != dtype:
            tensor = tensor.to(dtype)
        yield key, taken(tensor, share=True)
