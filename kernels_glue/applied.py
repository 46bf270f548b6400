"""What the nodes of the pack did to a model: remembered on the patcher that they return, and on its clones.

Nothing here keeps a model alive: what stood before a node is known weakly, because Kitchen INT8 Quantize
Model lets the unquantized weights go where no branch of the graph needs them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .attention.config import SolConfig
from .offload.config import OffloadConfig
from .quantization.config import QuantizeConfig

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# The attachment of a patcher. Core hands it on to every clone, and looks only at the keys of attachments.
KEY = "kitchen_sol_applied"
COMPUTE_DTYPE = "manual_cast_dtype"  # the object patch of core's node ModelComputeDtype


@dataclass(frozen=True)
class Settings:
    """The settings of the nodes that a model went through; None where there was no such node.

    Attributes:
        int8: of the last Kitchen INT8 Quantize Model.
        sol, offload: of the last one, which takes the place of earlier ones.
        int8_before: of earlier ones, in order; what they quantized is quantized.
        baked: for each of these and the last one, how many patches of a key went into its weight
            (`lora: bake`); later ones did not. Empty: all did.
        lane_for: the way to the device that streaming takes, where it is not CUDA's.
    """

    int8: QuantizeConfig | None = None
    sol: SolConfig | None = None
    offload: OffloadConfig | None = None
    int8_before: tuple[QuantizeConfig, ...] = ()
    baked: tuple[Mapping[str, int], ...] = ()
    lane_for: Callable[..., Any] | None = None


@dataclass(frozen=True, eq=False)
class Quantized:
    """One application of Kitchen INT8 Quantize Model.

    Attributes:
        source: the patcher it was given, where it put another model in place of that one's.
        merged: key -> how many patches went into its weight (`lora: bake`).
        compute_dtype: of a ModelComputeDtype before it, which the quantized model has by itself, and core's
            flag that goes with it.
    """

    config: QuantizeConfig
    source: weakref.ref[ModelPatcher] | None = None
    merged: Mapping[str, int] = field(default_factory=dict)
    compute_dtype: tuple[Any, bool] | None = None


@dataclass(frozen=True, eq=False)
class Applied:
    """Everything that was done to a patcher.

    Attributes:
        origins: patchers around the model that stood before the first node which put another in its place
            (INT8; Layerwise Offload under dynamic VRAM), the one that the node was given first and then those
            that it is a clone of. Empty where it is still the same model.
    """

    int8: tuple[Quantized, ...] = ()
    sol: SolConfig | None = None
    offload: OffloadConfig | None = None
    lane_for: Callable[..., Any] | None = None
    origins: tuple[weakref.ref[ModelPatcher], ...] = ()


def applied_to(patcher: ModelPatcher) -> Applied:
    """What was done to a patcher, or to one that it is a clone of."""
    return patcher.attachments.get(KEY) or Applied()


def settings_of(patcher: ModelPatcher) -> Settings:
    """The settings with which the pack's nodes were applied to a patcher, or to one that it is a clone of."""
    done = applied_to(patcher)
    configs = tuple(one.config for one in done.int8)
    baked = tuple(one.merged for one in done.int8)
    last = configs[-1] if configs else None
    return Settings(last, done.sol, done.offload, configs[:-1], baked, done.lane_for)


def record_int8(
    patcher: ModelPatcher, source: ModelPatcher, config: QuantizeConfig, merged: Collection[str] = ()
) -> None:
    """Remembers that `patcher` is `source`, quantized.

    Args:
        merged: keys of the source's patches that went into the weights.
    """
    swapped = None if patcher.model is source.model else weakref.ref(source)
    compute_dtype = None
    if swapped and COMPUTE_DTYPE in source.object_patches:
        compute_dtype = source.object_patches[COMPUTE_DTYPE], source.force_cast_weights
    done = Quantized(config, swapped, {key: len(source.patches[key]) for key in merged}, compute_dtype)
    _record(patcher, source, int8=(*applied_to(source).int8, done))


def record_sol(patcher: ModelPatcher, source: ModelPatcher, config: SolConfig) -> None:
    """Remembers that `patcher` is `source` with Sol's attention."""
    _record(patcher, source, sol=config)


def record_offload(
    patcher: ModelPatcher,
    source: ModelPatcher,
    config: OffloadConfig,
    lane_for: Callable[..., Any] | None = None,
) -> None:
    """Remembers that `patcher` is `source`, streamed."""
    _record(patcher, source, offload=config, lane_for=lane_for)


def _record(patcher: ModelPatcher, source: ModelPatcher, **changes: Any) -> None:
    before = applied_to(source)
    origins = before.origins
    if not origins and patcher.model is not source.model:
        origins = tuple(map(weakref.ref, _line_of(source)))
    patcher.set_attachments(KEY, replace(before, origins=origins, **changes))


def _line_of(patcher: ModelPatcher) -> Iterator[ModelPatcher]:
    """A patcher and those that it is a clone of, around the same model."""
    model, one = patcher.model, patcher
    while one is not None and one.model is model:
        yield one
        one = one.parent
