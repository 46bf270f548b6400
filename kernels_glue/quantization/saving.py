"""Lets core save INT8 layers that are not resident.

Core wraps each weight that it still has to patch while a file is written in a Parameter that asks for
gradients, which torch refuses for integers. Under dynamic VRAM that is every layer, and under partial
loading each one that is not resident, so core's ModelSave fails on any INT8 model there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_patcher
import torch
from comfy.quant_ops import QuantizedTensor

from ..mixins import lay_over, take_off

_KEY = "kitchen_int8_saving"
_RESIDENT = "comfy_patched_weights"  # core's mark of a layer whose weights are patched and in place


def make_savable(patcher: comfy.model_patcher.ModelPatcher) -> None:
    """Gives a patcher, and every clone of it, the INT8 aware way of saving."""
    lay_over(patcher, _SavesInt8, _KEY)


def unmake_savable(patcher: comfy.model_patcher.ModelPatcher) -> None:
    """Undoes `make_savable` for a patcher around a model without INT8 layers."""
    take_off(patcher, _SavesInt8, _KEY)


class _SavesInt8:
    def model_state_dict_for_saving(
        self, model: torch.nn.Module | None = None, prefix: str = ""
    ) -> dict[str, Any]:
        module = self.model if model is None else model
        waiting = {name: layer for name, layer in module.named_modules() if _is_waiting(layer)}
        with _taken_for_resident(waiting.values()):
            state_dict = super().model_state_dict_for_saving(model, prefix)
        for name, layer in waiting.items():
            state_dict.update(_patched_entries(self, name, layer, prefix))
        return state_dict


def _is_waiting(layer: torch.nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    is_int8 = isinstance(weight, QuantizedTensor) and not weight._qdata.is_floating_point()
    return is_int8 and not getattr(layer, _RESIDENT, False)


@contextmanager
def _taken_for_resident(layers: Any) -> Iterator[None]:
    """Makes core save the entries of these layers as they are, which is right where nothing is patched."""
    layers = list(layers)
    before = [layer.__dict__.get(_RESIDENT) for layer in layers]
    for layer in layers:
        setattr(layer, _RESIDENT, True)
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            if value is None:
                delattr(layer, _RESIDENT)
            else:
                setattr(layer, _RESIDENT, value)


def _patched_entries(
    patcher: Any, name: str, layer: torch.nn.Module, prefix: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the entries of a layer that patches change, each computed when it is written, as in core."""
    core = comfy.model_patcher
    weight, bias = f"{name}.weight", f"{name}.bias"
    if prefix + weight in patcher.patches:
        caster = core.LazyCastingQuantizedParam(patcher, prefix + weight)
        for key, tensor in layer.weight.state_dict(weight).items():
            yield key, _LazyPiece(caster, prefix + key, tensor)
    if prefix + bias in patcher.patches:
        yield bias, core.LazyCastingParam(patcher, prefix + bias, layer.bias)


class _LazyPiece(comfy.model_patcher.LazyCastingParamPiece):
    """Core's lazily computed tensor, without the gradient."""

    def __new__(cls, caster: Any, state_dict_key: str, tensor: torch.Tensor) -> _LazyPiece:
        return torch.nn.Parameter.__new__(cls, tensor, False)
