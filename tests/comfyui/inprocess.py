"""Runs ComfyUI's own loaders, samplers and nodes inside the test process.

Call start() first; every other function needs ComfyUI imported. Nothing here replaces or
simulates a part of ComfyUI: there is no server, so PromptServer.instance does not exist.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .startup import PACK_ROOT, start

if TYPE_CHECKING:
    import torch

    from .builders import TinyModel

__all__ = [
    "NodeResult",
    "apply_lora",
    "build_unet",
    "conditioning",
    "empty_latent",
    "flatten_latent",
    "load_pack",
    "load_partially",
    "load_unet",
    "pack_module",
    "pack_nodes",
    "run_node",
    "sample",
    "start",
    "unload_all",
]

PACK_NAME = "kitchen_sol_under_test"


# --- the pack -----------------------------------------------------------------------------------


def load_pack(name: str = PACK_NAME) -> ModuleType:
    """The pack under test as the package `name`, imported by path as ComfyUI does it.

    Its root stays off sys.path. A second call returns the same module.
    """
    start()
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        name, PACK_ROOT / "__init__.py", submodule_search_locations=[str(PACK_ROOT)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def pack_module(dotted: str, name: str = PACK_NAME) -> ModuleType:
    """A submodule of the pack, for example pack_module("kernels_glue.quantization.plan")."""
    load_pack(name)
    return importlib.import_module(f"{name}.{dotted}")


def pack_nodes(name: str = PACK_NAME) -> dict[str, type]:
    """The pack's node classes by node id, obtained through its comfy_entrypoint."""
    pack = load_pack(name)

    async def collect() -> dict[str, type]:
        extension = await pack.comfy_entrypoint()
        await extension.on_load()
        return {node.GET_SCHEMA().node_id: node for node in await extension.get_node_list()}

    return asyncio.run(collect())


# --- models -------------------------------------------------------------------------------------


def _as_in_a_node(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function in inference mode, in which ComfyUI's executor runs every node.

    Quantized tensors made in inference mode cannot be moved outside of it, nor the other way round.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        import torch

        with torch.inference_mode():
            return function(*args, **kwargs)

    return run


@_as_in_a_node
def load_unet(path: Path | str, **model_options: Any) -> Any:
    """ModelPatcher from comfy.sd.load_diffusion_model, as UNETLoader returns it."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path), model_options=model_options)


@_as_in_a_node
def build_unet(
    path: Path | str,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
    disable_dynamic: bool = False,
) -> Any:
    """ModelPatcher with weight and compute dtype chosen by the caller instead of by the device.

    The steps are those of comfy.sd.load_diffusion_model_state_dict. With it a CPU, for which core
    always chooses fp32, runs a real bf16 computation. compute_dtype None means dtype.
    Raises ValueError if ComfyUI does not recognise the file.
    """
    import comfy.model_detection
    import comfy.model_management
    import comfy.model_patcher
    import comfy.utils

    weights, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    weights, metadata = comfy.utils.convert_old_quants(weights, "", metadata=metadata)
    config = comfy.model_detection.model_config_from_unet(weights, "", metadata=metadata)
    if config is None:
        raise ValueError(f"ComfyUI does not recognise {path}")
    device = comfy.model_management.get_torch_device()
    manual_cast = None if compute_dtype in (None, dtype) else compute_dtype
    config.set_inference_dtype(dtype, manual_cast, device=device)
    model = config.get_model(weights, "")
    patcher_class = (
        comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    )
    offload_device = comfy.model_management.unet_offload_device()
    patcher = patcher_class(model, load_device=device, offload_device=offload_device)
    if not comfy.model_management.is_device_cpu(offload_device):
        model.to(offload_device)
    model.load_model_weights(weights, "", assign=patcher.is_dynamic())
    patcher.cached_patcher_init = (build_unet, (path, dtype, compute_dtype))
    return patcher


@_as_in_a_node
def apply_lora(model: Any, lora_path: Path | str, strength: float) -> Any:
    """A clone of `model` with the LoRA added, by the steps of LoraLoaderModelOnly."""
    import comfy.sd
    import comfy.utils

    if strength == 0:
        return model
    lora, metadata = comfy.utils.load_torch_file(str(lora_path), safe_load=True, return_metadata=True)
    return comfy.sd.load_lora_for_models(model, None, lora, strength, 0, lora_metadata=metadata)[0]


@_as_in_a_node
def load_partially(patcher: Any, resident_bytes: int) -> int:
    """Load `patcher` with at most about `resident_bytes` of weights resident, and keep it so.

    The load is core's load with a budget. Sampling afterwards makes core fill up the free
    memory, so an ON_PRE_RUN callback takes the surplus out again by partially_unload, as memory
    pressure would; clones of `patcher` made later inherit it. Returns the bytes resident now.
    Raises ValueError for a dynamic-VRAM patcher, which pages weights in by itself.
    """
    import comfy.model_management
    from comfy.patcher_extension import CallbacksMP

    if patcher.is_dynamic():
        raise ValueError("a dynamic-VRAM patcher has no budget; load with disable_dynamic=True")

    def trim(running: Any) -> None:
        surplus = running.loaded_size() - resident_bytes
        if surplus > 0:
            running.partially_unload(running.offload_device, surplus)

    key = "kitchen_sol_test_residency"
    patcher.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, key)
    patcher.add_callback_with_key(CallbacksMP.ON_PRE_RUN, key, trim)
    comfy.model_management.unload_all_models()
    loaded = comfy.model_management.LoadedModel(patcher)
    # Core reads a budget of 0 as unlimited.
    loaded.model_load(lowvram_model_memory=max(resident_bytes, 0.1))
    comfy.model_management.current_loaded_models.insert(0, loaded)
    return patcher.loaded_size()


def unload_all() -> None:
    """Unload every model the way ComfyUI's "unload models" button does, and collect garbage."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
    gc.collect()
    comfy.model_management.cleanup_models_gc()
    comfy.model_management.soft_empty_cache()


# --- sampling -----------------------------------------------------------------------------------


def conditioning(tiny: TinyModel, seed: int = 3, hooks: Any = None) -> list[list[Any]]:
    """CONDITIONING that `tiny` accepts (see testnodes.data), with a comfy HookGroup if given."""
    import comfy.hooks

    from .testnodes.data import make_conditioning

    cond = make_conditioning(*tiny.context_shape, tiny.pooled_width, seed, tiny.attention_mask)
    return comfy.hooks.set_hooks_for_conditioning(cond, hooks)


def empty_latent(tiny: TinyModel, **overrides: int) -> dict[str, Any]:
    """The LATENT that ComfyUI's own empty-latent node for `tiny` makes.

    overrides: width and height in pixels, length in frames, instead of tiny.latent_inputs.
    """
    module = importlib.import_module(tiny.latent_module)
    return run_node(getattr(module, tiny.latent_node), **{**tiny.latent_inputs, **overrides})[0]


def flatten_latent(samples: Any) -> torch.Tensor:
    """Samples as a CPU tensor; the nested latents of an audio-video model become one 1-D tensor."""
    import torch

    if getattr(samples, "is_nested", False):
        samples = torch.cat([part.reshape(-1).cpu() for part in samples.unbind()])
    return samples.cpu().clone()


def sample(
    model: Any,
    tiny: TinyModel,
    *,
    steps: int = 3,
    seed: int = 7,
    cfg: float = 1.0,
    negative: bool = False,
    sampler: str = "euler",
    scheduler: str = "simple",
    positive: list[list[Any]] | None = None,
    denoise: float = 1.0,
    **latent_overrides: int,
) -> torch.Tensor:
    """Sample an empty latent by nodes.common_ksampler, which is what the KSampler node runs.

    negative: condition the negative on random text instead of zeros; core evaluates the
        negative only where cfg is not 1.
    positive: CONDITIONING instead of conditioning(tiny).
    latent_overrides: see empty_latent.

    Returns a CPU tensor, see flatten_latent.
    """
    import torch

    import nodes

    with torch.inference_mode():
        latent = empty_latent(tiny, **latent_overrides)
        positive = conditioning(tiny) if positive is None else positive
        unwanted = conditioning(tiny, seed=4)
        if not negative:
            unwanted = nodes.ConditioningZeroOut().zero_out(unwanted)[0]
        try:
            out = nodes.common_ksampler(
                model, seed, steps, cfg, sampler, scheduler, positive, unwanted, latent, denoise=denoise
            )
        finally:
            _after_node()
        samples = out[0]["samples"]
    return flatten_latent(samples)


# --- nodes --------------------------------------------------------------------------------------


class NodeResult(tuple):
    """A node's outputs as a tuple; `ui` is the dict of what it shows in the browser."""

    ui: dict[str, Any]


def run_node(node_class: type, *, unique_id: str = "1", **inputs: Any) -> NodeResult:
    """Execute a V3 or V1 node class by the functions with which ComfyUI's executor does it.

    That prepares the class, fills in hidden inputs such as unique_id, and sets the current-node
    context. As in the executor, inputs that are left out get no default, and values are not
    validated. Raises what the node raises; ValueError if the node expands into a subgraph.
    """
    import execution
    import torch

    async def call() -> tuple[list[Any], Mapping[str, Any], bool, bool]:
        values, _, v3_data = execution.get_input_data(inputs, node_class, unique_id)
        return await execution.get_output_data("test", unique_id, node_class(), values, v3_data=v3_data)

    try:
        with torch.inference_mode():
            outputs, ui, has_subgraph, pending = asyncio.run(call())
    finally:
        _after_node()
    if has_subgraph or pending:
        raise ValueError(f"{node_class.__name__} needs the full executor; use ComfyServer")
    # The executor maps a node over lists; a single call gives lists of length one.
    is_list = getattr(node_class, "OUTPUT_IS_LIST", None) or [False] * len(outputs)
    result = NodeResult(v if keep else v[0] for v, keep in zip(outputs, is_list, strict=True))
    result.ui = dict(ui)
    return result


def _after_node() -> None:
    """What the executor does after each node under dynamic VRAM."""
    import comfy.memory_management

    if not comfy.memory_management.aimdo_enabled:
        return
    import comfy.model_management
    import comfy.model_prefetch
    import comfy_aimdo.model_vbar

    comfy.model_management.reset_cast_buffers()
    comfy.model_prefetch.cleanup_prefetch_queues()
    comfy_aimdo.model_vbar.vbars_reset_watermark_limits()
