"""What several test files need to compare tiny models."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from comfyui import inprocess
from comfyui.builders import TinyModel

STEPS = 3


def inputs(
    comfy: ModuleType, model: TinyModel, *, steps: int = STEPS, sampler: Any = "euler", **overrides: Any
) -> Any:
    """The inputs of a comparison of a tiny model; overrides are fields of Inputs, or of its empty latent."""
    import comfy.samplers as samplers

    apply = inprocess.pack_module("kernels_glue.compare.apply")
    size = {name: overrides.pop(name) for name in ("width", "height", "length") if name in overrides}
    values = {
        "noise_seed": 5,
        "cfg": 1.0,
        "positive": comfy.conditioning(model),
        "negative": comfy.conditioning(model, seed=4),
        "sampler": samplers.sampler_object(sampler) if isinstance(sampler, str) else sampler,
        "sigmas": torch.linspace(1.0, 0.0, steps + 1),
        "latent_image": comfy.empty_latent(model, **size),
    }
    return apply.Inputs(**{**values, **overrides})


def compare(
    model: Any, reference: Any, given: Any, *, progress: Any = None, vae: Any = None, **settings: Any
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(latent of the model, latent of the reference, Comparison)."""
    apply = inprocess.pack_module("kernels_glue.compare.apply")
    config = inprocess.pack_module("kernels_glue.compare.config").CompareConfig(
        **{"lpips": "off", **settings}
    )
    told = progress if progress is not None else lambda text: None
    return apply.compare(model, reference, given, config, told, vae)


def by_hand(patcher: Any, given: Mapping[str, Any]) -> torch.Tensor:
    """The result of core's node SamplerCustom with these inputs, as a flat or plain tensor on the CPU."""
    from comfy_extras.nodes_custom_sampler import SamplerCustom

    result = inprocess.run_node(SamplerCustom, model=patcher, **{"add_noise": True, **given})
    return inprocess.flatten_latent(result[0]["samples"])


def psnr(model: torch.Tensor, reference: torch.Tensor) -> float:
    """By numpy: the peak is the range of the reference."""
    import numpy

    one, other = (tensor.double().numpy() for tensor in (model, reference))
    error = numpy.mean((one - other) ** 2)
    return float(20 * numpy.log10(other.max() - other.min()) - 10 * numpy.log10(error))


def hook_count(patcher: Any) -> int:
    """Forward hooks on the modules of a model."""
    modules = patcher.model.diffusion_model.modules()
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)
