"""The callbacks of a node on a patcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from comfy.patcher_extension import CallbacksMP

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


def set_callbacks(patcher: ModelPatcher, key: str, callbacks: Mapping[str, Callable[..., Any]]) -> None:
    """Gives a patcher callbacks in place of all that an earlier application of the node gave it.

    Those of ON_CLONE stay: they belong to what the patcher is, not to how it is sampled.

    Args:
        key: the node's own.
        callbacks: one for each moment, a name of CallbacksMP.
    """
    for moment in (*callbacks, *patcher.callbacks):
        if moment != CallbacksMP.ON_CLONE:
            patcher.remove_callbacks_with_key(moment, key)
    for moment, callback in callbacks.items():
        patcher.add_callback_with_key(moment, key, callback)
