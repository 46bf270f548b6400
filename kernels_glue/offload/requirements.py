"""What this node needs of ComfyUI, looked for by name and never by version."""

from __future__ import annotations

from ..requirements import missing_names, missing_parameters, refuse
from .config import NODE

# Everything of ComfyUI that this package uses by name.
NAMES = (
    "comfy.memory_management.vram_aligned_size",
    "comfy.model_management.MAX_PINNED_MEMORY",
    "comfy.model_management.NUM_STREAMS",
    "comfy.model_management.STREAM_AIMDO_CAST_BUFFERS",
    "comfy.model_management.TOTAL_PINNED_MEMORY",
    "comfy.model_management.discard_cuda_async_error",
    "comfy.model_management.ensure_pin_registerable",
    "comfy.model_management.is_device_cpu",
    "comfy.model_management.throw_exception_if_processing_interrupted",
    "comfy.model_patcher.ModelPatcher._load_list",
    "comfy.model_patcher.ModelPatcher.add_callback_with_key",
    "comfy.model_patcher.ModelPatcher.add_wrapper_with_key",
    "comfy.model_patcher.ModelPatcher.clone",
    "comfy.model_patcher.ModelPatcher.clone_has_same_weights",
    "comfy.model_patcher.ModelPatcher.detach",
    "comfy.model_patcher.ModelPatcher.get_clone_model_override",
    "comfy.model_patcher.ModelPatcher.is_clone",
    "comfy.model_patcher.ModelPatcher.is_dynamic",
    "comfy.model_patcher.ModelPatcher.load",
    "comfy.model_patcher.ModelPatcher.loaded_size",
    "comfy.model_patcher.ModelPatcher.model_size",
    "comfy.model_patcher.ModelPatcher.partially_load",
    "comfy.model_patcher.ModelPatcher.partially_unload",
    "comfy.model_patcher.ModelPatcher.patch_hooks",
    "comfy.model_patcher.ModelPatcher.patch_weight_to_device",
    "comfy.model_patcher.ModelPatcher.pinned_memory_size",
    "comfy.model_patcher.ModelPatcher.remove_additional_models",
    "comfy.model_patcher.ModelPatcher.remove_attachments",
    "comfy.model_patcher.ModelPatcher.remove_callbacks_with_key",
    "comfy.model_patcher.ModelPatcher.remove_wrappers_with_key",
    "comfy.model_patcher.ModelPatcher.set_attachments",
    "comfy.model_patcher.ModelPatcher.unpatch_hooks",
    "comfy.model_patcher.ModelPatcher.unpatch_model",
    "comfy.model_patcher.ModelPatcher.use_ejected",
    "comfy.model_patcher.ModelPatcherDynamic._vbar_get",
    "comfy.model_patcher.move_weight_functions",
    "comfy.model_patcher.wipe_lowvram_weight",
    "comfy.model_prefetch.make_prefetch_queue",
    "comfy.model_prefetch.prefetch_queue_pop",
    "comfy.ops.CastWeightBiasOp",
    "comfy.patcher_extension.CallbacksMP.ON_CLEANUP",
    "comfy.patcher_extension.CallbacksMP.ON_CLONE",
    "comfy.patcher_extension.CallbacksMP.ON_LOAD",
    "comfy.patcher_extension.CallbacksMP.ON_PREPARE_STATE",
    "comfy.patcher_extension.CallbacksMP.ON_PRE_RUN",
    "comfy.patcher_extension.WrappersMP.APPLY_MODEL",
    "comfy.quant_ops.QuantizedTensor",
    "comfy.utils.get_attr",
)

# Functions that exist longer than the parameter that is needed.
PARAMETERS = (
    ("comfy.model_patcher.ModelPatcher.clone", "disable_dynamic"),
    ("comfy.model_patcher.ModelPatcher.clone", "model_override"),
    ("comfy.model_patcher.ModelPatcher.patch_weight_to_device", "return_weight"),
)


def require_comfyui() -> None:
    """Refuses, in one sentence, a ComfyUI that lacks something that the node stands on."""
    # What is missing by name cannot be looked into.
    refuse(NODE, list(missing_names(NAMES)) or list(missing_parameters(PARAMETERS)))
