"""Remembers conversions, so that changing a LoRA does not quantize again."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .plan import Plan

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher


@dataclass(frozen=True)
class Conversion:
    """A finished conversion of one model.

    Attributes:
        root: holds the rebuilt model and what its patchers share.
        plan: what was decided.
        merged: keys of the weight patches that were merged (`lora: bake`).
        seconds: how long the conversion took.
        bytes_before, bytes_after: weights of the whole diffusion model.
        device: where the weights were quantized.
        remarks: what was noticed while converting.
    """

    root: ModelPatcher
    plan: Plan
    merged: frozenset[str]
    seconds: float
    bytes_before: int
    bytes_after: int
    device: str
    remarks: tuple[str, ...] = ()


# How many conversions of one model are kept, each a whole INT8 model in RAM. Two, because a graph may compare
# two settings; more are converted again when something before their node changes.
_KEPT = 2


class Conversions:
    """The latest conversion of a source model by each of the last few nodes.

    Lives as long as the source model does: a LoRA before the node makes core run the node again with
    another patcher of the same model, and the previous result may be gone from core's cache by then.
    """

    def __init__(self) -> None:
        self._by_source: weakref.WeakKeyDictionary[BaseModel, dict[Hashable, tuple[Hashable, Conversion]]]
        self._by_source = weakref.WeakKeyDictionary()

    def find(self, source: BaseModel, settings: Hashable) -> Conversion | None:
        """Returns a conversion of this model with the same settings, whichever node made it."""
        entries = self._by_source.get(source, {}).values()
        return next((conversion for made_with, conversion in entries if made_with == settings), None)

    def keep(self, source: BaseModel, node: Hashable, settings: Hashable, conversion: Conversion) -> None:
        """Remembers a conversion in place of the node's previous one, and forgets the oldest."""
        entries = self._by_source.setdefault(source, {})
        entries.pop(node, None)
        entries[node] = (settings, conversion)
        while len(entries) > _KEPT:
            del entries[next(iter(entries))]
