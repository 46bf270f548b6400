"""What this node needs of ComfyUI, looked for by name and never by version."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator

from ..requirements import missing_names, missing_parameters, refuse
from .config import NODE
from .plan import INT8_FORMAT

# Everything of ComfyUI that this package uses by name.
NAMES = (
    "comfy.float.stochastic_rounding",
    "comfy.lora.calculate_shape",
    "comfy.lora.calculate_weight",
    "comfy.model_base.BaseModel.get_dtype",
    "comfy.model_base.BaseModel.get_dtype_inference",
    "comfy.model_management.free_memory",
    "comfy.model_management.is_device_cpu",
    "comfy.model_management.module_size",
    "comfy.model_management.pin_memory",
    "comfy.model_management.throw_exception_if_processing_interrupted",
    "comfy.model_management.unpin_memory",
    "comfy.model_patcher.CoreModelPatcher",
    "comfy.model_patcher.LazyCastingParam",
    "comfy.model_patcher.LazyCastingParamPiece",
    "comfy.model_patcher.LazyCastingQuantizedParam",
    "comfy.model_patcher.ModelPatcher.add_callback_with_key",
    "comfy.model_patcher.ModelPatcher.clone",
    "comfy.model_patcher.ModelPatcher.get_clone_model_override",
    "comfy.model_patcher.ModelPatcher.get_model_object",
    "comfy.model_patcher.ModelPatcher.is_dynamic",
    "comfy.model_patcher.ModelPatcher.model_size",
    "comfy.model_patcher.ModelPatcher.model_state_dict_for_saving",
    "comfy.model_patcher.ModelPatcher.remove_additional_models",
    "comfy.model_patcher.ModelPatcher.remove_callbacks_with_key",
    "comfy.model_patcher.ModelPatcher.set_attachments",
    "comfy.ops.CastWeightBiasOp",
    "comfy.ops.mixed_precision_ops",
    "comfy.ops.pick_operations",
    "comfy.patcher_extension.CallbacksMP.ON_CLEANUP",
    "comfy.patcher_extension.CallbacksMP.ON_CLONE",
    "comfy.patcher_extension.CallbacksMP.ON_PRE_RUN",
    "comfy.patcher_extension.CallbacksMP.ON_REGISTER_ALL_HOOK_PATCHES",
    "comfy.quant_ops.QUANT_ALGOS",
    "comfy.quant_ops.QuantizedTensor",
    "comfy.supported_models_base.BASE.get_model",
    "comfy.supported_models_base.BASE.set_inference_dtype",
    "comfy.utils.ProgressBar",
    "comfy.utils.get_attr",
    "comfy.utils.string_to_seed",
)

# Functions that exist longer than the parameter that is needed.
PARAMETERS = (
    ("comfy.model_patcher.ModelPatcher.clone", "model_override"),
    ("comfy.ops.pick_operations", "model_config"),
)


def require_comfyui() -> None:
    """Refuses, in one sentence, a ComfyUI that lacks something that the node stands on."""
    # What is missing by name cannot be looked into.
    refuse(NODE, list(missing_names(NAMES)) or list(_missing_parts()))


def _missing_parts() -> Iterator[str]:
    yield from missing_parameters(PARAMETERS)
    if INT8_FORMAT not in pkgutil.resolve_name("comfy.quant_ops.QUANT_ALGOS"):
        yield f"the weight format {INT8_FORMAT} (comfy.quant_ops.QUANT_ALGOS)"
    linear = pkgutil.resolve_name("comfy.ops.mixed_precision_ops")().Linear
    for method in ("convert_weight", "set_weight"):
        if not hasattr(linear, method):
            yield f"comfy.ops.mixed_precision_ops().Linear.{method}"
