"""Gives a patcher, and every clone of it, methods of the pack over those of core, and takes them back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from comfy.patcher_extension import CallbacksMP

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


_MADE = "kitchen_sol_laid_over"  # mark of the classes that are made here


def lay_over(patcher: ModelPatcher, mixin: type, key: str) -> None:
    """The patcher's class becomes one with the mixin's methods, and so do the classes of its clones.

    Args:
        key: under which this is remembered, so that it happens once.
    """
    become: Callable[..., None] = partial(_become, mixin)
    become(None, patcher)
    patcher.remove_callbacks_with_key(CallbacksMP.ON_CLONE, key)
    patcher.add_callback_with_key(CallbacksMP.ON_CLONE, key, become)


def take_off(patcher: ModelPatcher, mixin: type, key: str) -> None:
    """The patcher, and what is cloned from it, has the class that it would have without `lay_over`."""
    patcher.remove_callbacks_with_key(CallbacksMP.ON_CLONE, key)
    patcher.__class__ = _bared(type(patcher), mixin)


def _become(mixin: type, _: Any, patcher: ModelPatcher, *_args: Any) -> None:
    # Core clones into the class of the original, or into a plain ModelPatcher without dynamic VRAM.
    patcher.__class__ = _laid_over(type(patcher), mixin)


@cache
def _laid_over(base: type, mixin: type) -> type:
    return base if issubclass(base, mixin) else type(base.__name__, (mixin, base), {_MADE: True})


def _bared(laid: type, mixin: type) -> type:
    if not vars(laid).get(_MADE):
        return laid
    upper, base = laid.__bases__
    return base if upper is mixin else _laid_over(_bared(base, mixin), upper)
