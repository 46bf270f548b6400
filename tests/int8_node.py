"""What several test files need to run Kitchen INT8 Quantize Model on real ComfyUI objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from comfyui.builders import TinyModel
    from comfyui.lora import LoraFactors
    from pytest import MonkeyPatch

NODE_ID = "KitchenInt8QuantizeModel"
DEFAULTS = {"group_size": "auto", "layers": "blocks", "ignored_layers": "", "lora": "keep", "device": "auto"}
DITS = ("wan", "h3", "flux")

# The one operation by which comfy_kitchen makes ConvRot weights, found by core and the pack in its registry.
QUANTIZE_OP = "quantize_int8_convrot_weight"

# Linear layers that the node quantizes by default: two sets without a common layer, for two LoRA.
LORA_A = {
    "wan": ("blocks.0.self_attn.q", "blocks.0.self_attn.o", "blocks.0.ffn.0", "blocks.1.ffn.2"),
    "h3": ("blocks.0.attn.qkv_proj", "blocks.1.mlp.fc2"),
    "flux": ("double_blocks.0.img_attn.qkv", "single_blocks.1.linear2"),
}
LORA_B = {
    "wan": ("blocks.0.cross_attn.v", "blocks.1.self_attn.v", "blocks.1.self_attn.o"),
    "h3": ("blocks.0.mlp.fc1", "blocks.1.attn.out_proj"),
    "flux": ("double_blocks.1.img_mlp.0", "single_blocks.0.linear1"),
}


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2 distance of a from b."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def quantize(comfy: ModuleType, model: Any, *, unique_id: str = "1", **settings: str) -> tuple[Any, str]:
    """Run the node with its defaults and `settings`; (model, report)."""
    node = comfy.pack_nodes()[NODE_ID]
    return comfy.run_node(node, unique_id=unique_id, model=model, **{**DEFAULTS, **settings})


def quantize_showing(
    comfy: ModuleType, model: Any, show: Callable[[str], None], **settings: str
) -> tuple[Any, str]:
    """Like `quantize`, below the node: without a server only this way does its text go anywhere."""
    apply = comfy.pack_module("kernels_glue.quantization.apply")
    config = comfy.pack_module("kernels_glue.quantization.config")
    with torch.inference_mode():
        quantized, report = apply.quantize_model(
            model, config.QuantizeConfig(**settings), lambda shown: show(shown.text), "1"
        )
    return quantized, report.text


def int8_layers(patcher: Any) -> list[str]:
    """Names of the INT8 layers of a patcher's diffusion model."""
    from comfy.quant_ops import QuantizedTensor

    modules = patcher.model.diffusion_model.named_modules()
    return [name for name, module in modules if isinstance(getattr(module, "weight", None), QuantizedTensor)]


def static(patcher: Any) -> Any:
    """`patcher`, or a copy of it without dynamic VRAM, which has no budget to load it in part."""
    return patcher.clone(disable_dynamic=True) if patcher.is_dynamic() else patcher


def merged_file(
    path: Path,
    model: TinyModel,
    loras: list[tuple[LoraFactors, float]],
    extra: Mapping[str, torch.Tensor] = {},
) -> Path:
    """Write an fp32 copy of a model's file with W + sum(strength * alpha / rank * up @ down), in fp64.

    extra: changes to add to parameters by their name in the file, in fp64. Nothing of ComfyUI's
    LoRA code takes part.
    """
    from safetensors.torch import load_file, save_file

    weights = {name: tensor.double() for name, tensor in load_file(str(model.path)).items()}
    for factors, strength in loras:
        for layer, (up, down, alpha) in factors.items():
            weights[f"{layer}.weight"] += strength * alpha / up.shape[1] * (up.double() @ down.double())
    for name, change in extra.items():
        weights[name] += change.double()
    save_file({name: tensor.float().contiguous() for name, tensor in weights.items()}, str(path))
    return path


def load_some(comfy: ModuleType, patcher: Any, layers: Iterable[str]) -> None:
    """Keep a patcher partly loaded, so that during sampling some of the named layers are offloaded."""
    from comfy.model_management import load_models_gpu

    modules = [patcher.model.diffusion_model.get_submodule(name) for name in layers]
    too_little, too_much = 0, 2 * patcher.model_size()
    while too_little + 1 < too_much:
        budget = (too_little + too_much) // 2
        comfy.load_partially(patcher, budget)
        # What a sampler does: core fills up the memory, then load_partially's callback takes it back.
        load_models_gpu([patcher])
        patcher.pre_run()
        offloaded = {bool(module.weight_function) for module in modules}
        if offloaded == {True, False}:
            return
        too_little, too_much = (budget, too_much) if offloaded == {True} else (too_little, budget)
    raise AssertionError("no budget splits these layers")


def on_quantize(monkeypatch: MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` before comfy_kitchen quantizes a weight for the node; the work is still done by it."""
    from comfy_kitchen.registry import registry

    def observed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, stochastic_rounding: int = 0, **kwargs: Any) -> Any:
            # Core rounds with a seed when it bakes a LoRA into a resident layer; the node never does.
            if not stochastic_rounding:
                act()
            return real(*args, stochastic_rounding=stochastic_rounding, **kwargs)

        return call

    for backend in registry._backends.values():
        if hasattr(backend, QUANTIZE_OP):
            monkeypatch.setattr(backend, QUANTIZE_OP, observed(getattr(backend, QUANTIZE_OP)))
