"""What one application of the node keeps: its settings, and what it pins. Clones of the patcher share it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from comfy.patcher_extension import WrappersMP

from ..callbacks import set_callbacks
from ..errors import KitchenSolError
from ..report import Line
from ..units import size
from . import report
from .config import NODE, OffloadConfig
from .lane import CudaLane
from .lists import Found
from .pinning import Pins, can_pin
from .plan import Plan, Sizes, Wishes, make_plan, smallest_plan
from .streaming import Lane, Streaming

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher

# The attachment of a patcher, and the attribute of a model whose blocks are placed.
KEY = "kitchen_layerwise_offload"
NO_LIMIT = 1e32  # as core writes it


@dataclass
class Placed:
    """What stands on a model while its blocks are placed.

    Attributes:
        owner: the patcher that loaded it.
        outside: bytes of weights outside of its blocks.
        heir: the patcher of ours that core is about to load in the owner's place.
        remarks: what could not be as it was wanted.
    """

    streaming: Streaming
    owner: weakref.ref[ModelPatcher]
    outside: int
    remarks: tuple[Line, ...] = ()
    heir: weakref.ref[ModelPatcher] | None = None

    def take_heir(self) -> ModelPatcher | None:
        """The heir, once."""
        heir, self.heir = self.heir, None
        return None if heir is None else heir()

    def is_of(self, found: Found) -> bool:
        """Whether these are the blocks that are placed."""
        return [block.module for block in self.streaming.blocks] == [module for _, module in found.blocks]


@dataclass(eq=False)
class Offload:
    """Settings and pinned memory of one application of the node.

    Attributes:
        lane_for: makes the way to a device.
    """

    config: OffloadConfig
    lane_for: Callable[[torch.device], Lane] = CudaLane
    _pins: weakref.WeakKeyDictionary[Any, Pins] = field(default_factory=weakref.WeakKeyDictionary)

    @property
    def wishes(self) -> Wishes:
        """The settings that the plan needs."""
        return Wishes(self.config.resident_blocks, self.config.prefetch_blocks)

    def pins_of(self, model: BaseModel) -> Pins:
        """What is pinned of a model."""
        return self._pins.setdefault(model, Pins(self.config.pinned_limit))

    def plan(self, sizes: Sizes, allowed: float) -> tuple[Plan, tuple[Line, ...]]:
        """The plan for what ComfyUI allows, and remarks.

        Args:
            allowed: bytes that are free for weights; infinity where the whole model fits.

        Raises:
            KitchenSolError: the settings ask for more than there is.
        """
        budget = self.config.budget
        if budget is not None and budget <= allowed:
            return make_plan(sizes, budget, self.wishes), ()
        try:
            plan = make_plan(sizes, allowed, self.wishes)
        except KitchenSolError:
            if self.wishes.resident_blocks > 0:
                raise self._too_many(sizes, allowed) from None
            plan = smallest_plan(sizes, self.wishes)
            if budget is not None and plan.device_bytes > budget:
                raise
            return plan, (report.little_room_line(allowed),)
        if budget is None or plan.device_bytes == make_plan(sizes, budget, self.wishes).device_bytes:
            return plan, ()
        return plan, (report.less_room_line(budget, allowed),)

    def _too_many(self, sizes: Sizes, allowed: float) -> KitchenSolError:
        needed = smallest_plan(sizes, self.wishes).device_bytes
        return KitchenSolError(
            NODE,
            f"resident_blocks is {self.wishes.resident_blocks}, which needs {size(needed)} of device memory,"
            f" and only {size(allowed)} are free beside the activations.",
            "Lower resident_blocks, set it to -1, or free device memory.",
        )

    def plan_within(self, sizes: Sizes, allowed: float) -> Plan | None:
        """The plan when ComfyUI wants memory back, or None if the model cannot do with as little."""
        if self.wishes.resident_blocks >= 0:
            return None
        try:
            return make_plan(sizes, allowed, self.wishes)
        except KitchenSolError:
            return None

    def pins_wanted(self) -> bool:
        """Whether host memory is pinned at all."""
        return self.config.pin_memory != "off" and can_pin()

    def check_pinned(self, streaming: Streaming) -> tuple[Line, ...]:
        """Remarks about blocks that are not pinned.

        Raises:
            KitchenSolError: pinning was required.
        """
        left = len(streaming.unpinned)
        if not left or self.config.pin_memory == "off":
            return ()
        total = len(streaming.plan.streamed)
        if not can_pin():
            why = "ComfyUI does not pin memory here (--disable-pinned-memory?)"
        else:
            why = f"{size(streaming.pins.bytes)} are pinned, and the limit is {size(streaming.pins.limit())}"
        if self.config.pin_memory == "on":
            raise KitchenSolError(
                NODE,
                f"pin_memory is on, and {left} of {total} streamed blocks could not be pinned: {why}.",
                "Set pin_memory to auto, raise max_pinned_gb, or close what uses the memory.",
            )
        return (report.unpinned_line(left, total, why),)


def offload_of(patcher: ModelPatcher) -> Offload | None:
    """The node's application that a patcher carries."""
    return patcher.attachments.get(KEY)


def install(
    patcher: ModelPatcher,
    callbacks: Mapping[str, Callable[..., Any]],
    apply_model: Callable[..., Any] | None = None,
) -> None:
    """Gives a patcher callbacks and a wrapper of apply_model, in place of an earlier application's."""
    set_callbacks(patcher, KEY, callbacks)
    patcher.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    if apply_model is not None:
        patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, apply_model)


def placed_on(model: BaseModel) -> Placed | None:
    """What is placed of a model now."""
    return model.__dict__.get(KEY)


def allowed_bytes(lowvram_model_memory: float, full_load: bool) -> float:
    """What core's arguments of `load` say of the room for weights."""
    return math.inf if full_load or lowvram_model_memory >= NO_LIMIT else lowvram_model_memory
