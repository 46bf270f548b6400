"""What this node needs of ComfyUI, looked for by name and never by version."""

from __future__ import annotations

from ..attention.requirements import NAMES as ATTENTION_NAMES
from ..offload.requirements import NAMES as OFFLOAD_NAMES
from ..offload.requirements import PARAMETERS
from ..quantization.requirements import NAMES as QUANTIZATION_NAMES
from ..requirements import missing_names, missing_parameters, refuse
from .config import NODE

# What this package uses by name, and what the other nodes stand on: a comparison applies them anew.
_OWN = (
    "comfy.model_management.current_loaded_models",
    "comfy.nested_tensor.NestedTensor",
    "comfy.patcher_extension.WrappersMP.APPLY_MODEL",
    "comfy.patcher_extension.add_wrapper",
    "comfy.sample.fix_empty_latent_channels",
    "comfy.sample.prepare_noise",
    "comfy.sample.sample_custom",
    "comfy.utils.PROGRESS_BAR_ENABLED",
    "latent_preview.prepare_callback",
)
NAMES = tuple(sorted({*_OWN, *ATTENTION_NAMES, *OFFLOAD_NAMES, *QUANTIZATION_NAMES}))


def require_comfyui() -> None:
    """Refuses, in one sentence, a ComfyUI that lacks something that the node stands on."""
    # What is missing by name cannot be looked into.
    refuse(NODE, list(missing_names(NAMES)) or list(missing_parameters(PARAMETERS)))
