"""What this node needs of ComfyUI, looked for by name and never by version."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from ..errors import KitchenSolError
from .config import NODE
from .plan import INT8_FORMAT


def require_comfyui() -> None:
    """Refuses, in one sentence, a ComfyUI that lacks something that the node stands on."""
    missing = [name for name, present in _requirements() if not _holds(present)]
    if missing:
        raise KitchenSolError(
            NODE, f"this ComfyUI lacks {', '.join(missing)}.", "Update ComfyUI to 0.27 or newer."
        )


def _holds(present: Callable[[], bool]) -> bool:
    try:
        return present()
    except (ImportError, AttributeError, KeyError):
        return False


def _requirements() -> Iterable[tuple[str, Callable[[], bool]]]:
    def parameter(function: Callable, name: str) -> bool:
        return name in inspect.signature(function).parameters

    def int8_format() -> bool:
        from comfy.quant_ops import QUANT_ALGOS

        return INT8_FORMAT in QUANT_ALGOS

    def mixed_operations() -> bool:
        import comfy.ops

        return parameter(comfy.ops.pick_operations, "model_config") and hasattr(
            comfy.ops.mixed_precision_ops().Linear, "set_weight"
        )

    def model_override() -> bool:
        from comfy.model_patcher import ModelPatcher

        return parameter(ModelPatcher.clone, "model_override")

    def callbacks() -> bool:
        from comfy.patcher_extension import CallbacksMP, WrappersMP

        return all((CallbacksMP.ON_CLONE, CallbacksMP.ON_REGISTER_ALL_HOOK_PATCHES, WrappersMP.OUTER_SAMPLE))

    yield f"the weight format {INT8_FORMAT} (comfy.quant_ops.QUANT_ALGOS)", int8_format
    yield "mixed precision layers (comfy.ops.mixed_precision_ops)", mixed_operations
    yield "ModelPatcher.clone(model_override=...)", model_override
    yield "the callbacks and wrappers of comfy.patcher_extension", callbacks
