"""Gives a patcher, and every clone of it, methods of the pack over those of core."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from comfy.patcher_extension import CallbacksMP

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


def lay_over(patcher: ModelPatcher, mixin: type, key: str) -> None:
    """The patcher's class becomes one with the mixin's methods, and so do the classes of its clones.

    Args:
        key: under which this is remembered, so that it happens once.
    """
    become: Callable[..., None] = partial(_become, mixin)
    become(None, patcher)
    patcher.remove_callbacks_with_key(CallbacksMP.ON_CLONE, key)
    patcher.add_callback_with_key(CallbacksMP.ON_CLONE, key, become)


def _become(mixin: type, _: Any, patcher: ModelPatcher, *_args: Any) -> None:
    # Core clones into the class of the original, or into a plain ModelPatcher without dynamic VRAM.
    patcher.__class__ = _laid_over(type(patcher), mixin)


@cache
def _laid_over(base: type, mixin: type) -> type:
    return base if issubclass(base, mixin) else type(base.__name__, (mixin, base), {})
