"""What this node needs of ComfyUI, looked for by name and never by version."""

from __future__ import annotations

from ..requirements import missing_names, refuse
from .config import NODE

# Everything of ComfyUI that this package cannot do without.
NAMES = (
    "comfy.model_patcher.ModelPatcher.add_callback_with_key",
    "comfy.model_patcher.ModelPatcher.add_wrapper_with_key",
    "comfy.model_patcher.ModelPatcher.clone",
    "comfy.model_patcher.ModelPatcher.get_model_object",
    "comfy.model_patcher.ModelPatcher.remove_callbacks_with_key",
    "comfy.model_patcher.ModelPatcher.remove_wrappers_with_key",
    "comfy.model_patcher.ModelPatcher.set_attachments",
    "comfy.ops.scaled_dot_product_attention",
    "comfy.patcher_extension.CallbacksMP.ON_CLEANUP",
    "comfy.patcher_extension.CallbacksMP.ON_PREPARE_STATE",
    "comfy.patcher_extension.CallbacksMP.ON_PRE_RUN",
    "comfy.patcher_extension.WrappersMP.APPLY_MODEL",
    "comfy.samplers.calculate_sigmas",
)


def require_comfyui() -> None:
    """Refuses, in one sentence, a ComfyUI that lacks something that the node stands on."""
    refuse(NODE, list(missing_names(NAMES)))
