"""What other nodes do to a model goes on working after Kitchen INT8 Quantize Model, or is refused.

Each result is compared with the same thing on the unquantized model, and must have an effect of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import int8_checks as checks
import pytest
import torch
from comfyui import builders
from comfyui.builders import TinyModel
from comfyui.weights import fill, random_tensor
from int8_node import LORA_A, difference, quantize, quantize_showing
from safetensors.torch import load_file, save_file

MakeTiny = Callable[..., TinyModel]
Change = Callable[[Any], Any]


def compare(comfy: ModuleType, tiny: TinyModel, change: Change, **sampling: Any) -> None:
    """`change` and `sampling` do the same to the quantized model as to the source; both keep their bits."""
    source = comfy.load_unet(tiny.path)
    model = quantize(comfy, source)[0]
    latent = {"length": sampling["length"]} if "length" in sampling else {}
    plain, int8 = comfy.sample(source, tiny, **latent), comfy.sample(model, tiny, **latent)
    expected = comfy.sample(change(source), tiny, **sampling)
    result = comfy.sample(change(model), tiny, **sampling)
    print(f"effect {difference(expected, plain):.3f}, difference {difference(result, expected):.4f}")
    assert difference(result, expected) < 0.03
    assert difference(expected, plain) > 0.05 and difference(result, int8) > 0.05
    assert torch.equal(comfy.sample(model, tiny, **latent), int8)
    assert torch.equal(comfy.sample(source, tiny, **latent), plain)


def unchanged(model: Any) -> Any:
    return model


# --- conditioning --------------------------------------------------------------------------------


@pytest.mark.core
def test_controlnet_on_flux(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> None:
    from comfy.controlnet import load_controlnet
    from comfy.ldm.flux.controlnet import ControlNetFlux
    from comfy.ops import disable_weight_init

    import nodes

    tiny_model = tiny("flux")
    config = {**tiny_model.config, "depth_single_blocks": 0}
    del config["out_channels"]
    with torch.device("meta"):
        net = ControlNetFlux(**config, out_channels=16, dtype=torch.float32, operations=disable_weight_init)
    # The names of the public files, in which core recognises this kind.
    weights = {k.replace("_norm.weight", "_norm.scale"): v for k, v in fill(net.state_dict(), seed=9).items()}
    save_file(weights, tmp_path / "controlnet.safetensors")
    image = random_tensor("image", torch.Size((1, 64, 64, 3)), seed=1).sigmoid()
    with torch.inference_mode():
        control = load_controlnet(str(tmp_path / "controlnet.safetensors"))
    [positive] = comfy.run_node(
        nodes.ControlNetApply,
        conditioning=comfy.conditioning(tiny_model),
        control_net=control,
        image=image,
        strength=0.5,
    )
    compare(comfy, tiny_model, unchanged, positive=positive)


@pytest.mark.core
def test_wan_vace(comfy: ModuleType, tiny: MakeTiny) -> None:
    import node_helpers

    tiny_model = tiny("vace")
    [shape] = tiny_model.latent_shapes
    # What WanVaceToVideo adds, without the VAE that it encodes the frames with.
    frames = random_tensor("frames", torch.Size((1, 32, *shape[2:])), seed=1) * 5
    values = {"vace_frames": [frames], "vace_mask": [torch.ones((1, 64, *shape[2:]))], "vace_strength": [1.0]}
    positive = node_helpers.conditioning_set_values(comfy.conditioning(tiny_model), values, append=True)
    compare(comfy, tiny_model, unchanged, positive=positive)
    blocks = {
        name.split(".")[0]
        for name in checks.int8_modules(quantize(comfy, comfy.load_unet(tiny_model.path))[0])
    }
    assert blocks == {"blocks", "vace_blocks"}


# --- patches that a node installs ----------------------------------------------------------------


@pytest.mark.core
def test_context_windows_on_wan(comfy: ModuleType, tiny: MakeTiny) -> None:
    module = importlib.import_module("comfy_extras.nodes_context_windows")
    tiny_model = tiny("wan")
    windows = {"context_length": 5, "context_overlap": 4, "context_schedule": "standard_static"}
    windows |= {"context_stride": 1, "closed_loop": False, "fuse_method": "pyramid", "freenoise": True}

    def change(model: Any) -> Any:
        return comfy.run_node(module.WanContextWindowsManualNode, model=model, **windows)[0]

    # 13 frames are 4 latent ones, in windows of 2 that overlap by 1.
    compare(comfy, tiny_model, change, length=13)


@pytest.mark.core
@pytest.mark.parametrize("family", ["flux", "h3", "wan"])
def test_block_replacement(comfy: ModuleType, tiny: MakeTiny, family: str) -> None:
    ran: list[bool] = []

    def halve(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        """The original block, with half of what it adds to the image."""
        before = args["img"].clone()  # some blocks add in place
        out = extra["original_block"](args)
        ran.append(True)
        return {**out, "img": (before + out["img"]) / 2}

    def change(model: Any) -> Any:
        clone = model.clone()
        for block in range(2):
            clone.set_model_patch_replace(halve, "dit", "double_block", block)
        return clone

    compare(comfy, tiny(family), change)
    assert len(ran) == 2 * 2 * 3  # two models, two blocks, three steps


@pytest.mark.core
def test_attention_patches_on_wan(comfy: ModuleType, tiny: MakeTiny) -> None:
    def change(model: Any) -> Any:
        clone = model.clone()
        clone.set_model_attn1_output_patch(lambda x, options: x)  # not a Wan patch: must not disturb
        clone.set_model_patch(lambda args: args["x"] * 0.2, "attn1_patch")
        clone.set_model_patch(lambda args: args["x"] * 2, "attn2_patch")
        return clone

    compare(comfy, tiny("wan"), change)


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "h3", "flux"])
def test_attention_override(comfy: ModuleType, tiny: MakeTiny, family: str) -> None:
    def sharpened(func: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return func(q * 3, *args, **kwargs) * 1.5

    def change(model: Any) -> Any:
        clone = model.clone()
        options = clone.model_options["transformer_options"] = dict(
            clone.model_options["transformer_options"]
        )
        options["optimized_attention_override"] = sharpened
        return clone

    compare(comfy, tiny(family), change)


# --- merging -------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("quantized", ["model1", "model2", "both"])
def test_merging_models_gives_the_weights_of_an_fp64_merge(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path, quantized: str
) -> None:
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    first, second = tiny("wan"), tiny("wan", seed=1)
    one, two = load_file(first.path), load_file(second.path)
    # Core patches weights and biases of layers, not a parameter of a block itself (`modulation`).
    merged = {
        name: 0.7 * tensor.double() + 0.3 * two[name].double()
        if name.endswith((".weight", ".bias"))
        else tensor.double()
        for name, tensor in one.items()
    }
    save_file({name: tensor.float() for name, tensor in merged.items()}, tmp_path / "merged.safetensors")

    models = {"model1": comfy.load_unet(first.path), "model2": comfy.load_unet(second.path)}
    alone = {name: comfy.sample(model, first) for name, model in models.items()}
    texts: list[str] = []
    for name in models:
        if quantized in (name, "both"):
            models[name] = quantize_showing(comfy, models[name], texts.append)[0]
            alone[name] = comfy.sample(models[name], first)
    model = comfy.run_node(ModelMergeSimple, **models, ratio=0.7)[0]
    result = comfy.sample(model, first)
    expected = comfy.sample(comfy.load_unet(tmp_path / "merged.safetensors"), first)
    assert difference(result, expected) < 0.03
    assert all(difference(expected, sample) > 0.05 for sample in alone.values())
    int8 = checks.int8_modules(model)
    assert len(int8) == (0 if quantized == "model2" else 20)
    for name, tensor in merged.items():
        found = model.model.diffusion_model.get_parameter(name)
        found = found.dequantize() if hasattr(found, "_qdata") else found
        # An INT8 weight is off by 0.9%, and merging two of them rounds a second time.
        assert difference(found, tensor) < (0.015 if name.endswith(".weight") and found.ndim == 2 else 0.005)
    if quantized != "model2":  # 20 weights and 20 biases lie in INT8 layers, each parameter has one patch
        assert f"LoRA patches: 40 on INT8 layers, {len(merged) - 40} on other layers" in texts[-1]
    for name, sample in alone.items():
        assert torch.equal(comfy.sample(models[name], first), sample)


# --- hooks ---------------------------------------------------------------------------------------


@pytest.fixture
def lora(tiny: MakeTiny, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """lora(family): the name of a LoRA file for that tiny model, as core's loaders know it."""
    import folder_paths

    before = folder_paths.folder_names_and_paths["loras"]
    folder_paths.folder_names_and_paths["loras"] = ([str(tmp_path)], {".safetensors"})

    def write(family: str) -> str:
        builders.write_lora(tmp_path / f"{family}.safetensors", tiny(family), LORA_A[family])
        return f"{family}.safetensors"

    yield write
    folder_paths.folder_names_and_paths["loras"] = before


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "h3"])
def test_a_lora_hook_is_refused_at_sampling_and_leaves_the_model_usable(
    comfy: ModuleType, tiny: MakeTiny, lora: Callable[[str], str], family: str
) -> None:
    from comfy_extras.nodes_hooks import CreateHookLoraModelOnly

    tiny_model = tiny(family)
    source = comfy.load_unet(tiny_model.path)
    model = quantize(comfy, source)[0]
    before, plain = comfy.sample(model, tiny_model), comfy.sample(source, tiny_model)
    [hooks] = comfy.run_node(CreateHookLoraModelOnly, lora_name=lora(family), strength_model=1.0)
    positive = comfy.conditioning(tiny_model, hooks=hooks)
    message = (
        "the conditioning carries a LoRA hook, and ComfyUI cannot apply weight hooks to INT8 layers. "
        "Load that LoRA with a LoRA loader before or after this node, or remove this node."
    )
    for candidate in (model, quantize(comfy, model)[0]):  # a second application refuses as well
        with pytest.raises(ValueError, match=message):
            comfy.sample(candidate, tiny_model, positive=positive)
    assert torch.equal(comfy.sample(model, tiny_model), before)
    # The unquantized branch takes the hook, before and after.
    hooked = comfy.sample(source, tiny_model, positive=positive)
    assert difference(hooked, plain) > 0.05
    assert torch.equal(comfy.sample(source, tiny_model), plain)


@pytest.mark.core
def test_hooks_that_touch_no_weights_work(comfy: ModuleType, tiny: MakeTiny) -> None:
    from comfy.hooks import HookGroup, TransformerOptionsHook

    hooks = HookGroup()
    patches = {"attn1_patch": [lambda args: -args["x"]]}
    hooks.add(TransformerOptionsHook(transformers_dict={"patches": patches}))
    tiny_model = tiny("wan")
    compare(comfy, tiny_model, unchanged, positive=comfy.conditioning(tiny_model, hooks=hooks))


# --- patches that hold layers of the source --------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "h3"])
def test_a_lora_in_bypass_mode_is_refused_before_and_after(
    comfy: ModuleType, tiny: MakeTiny, lora: Callable[[str], str], family: str
) -> None:
    from comfy_extras.nodes_lora_debug import LoraLoaderBypassModelOnly

    tiny_model = tiny(family)
    name = lora(family)

    def bypass(model: Any) -> Any:
        return comfy.run_node(LoraLoaderBypassModelOnly, model=model, lora_name=name, strength_model=1.0)[0]

    source = comfy.load_unet(tiny_model.path)
    with pytest.raises(ValueError, match=r"an injection \(bypass_lora\), bound to .* Put this node before"):
        quantize(comfy, bypass(source))
    model = quantize(comfy, source)[0]
    before = comfy.sample(model, tiny_model)
    with pytest.raises(
        ValueError, match=r"a LoRA in bypass mode comes after this node.* without bypass mode"
    ):
        comfy.sample(bypass(model), tiny_model)
    assert torch.equal(comfy.sample(model, tiny_model), before)
    assert difference(comfy.sample(bypass(source), tiny_model), comfy.sample(source, tiny_model)) > 0.05


@pytest.mark.core
@pytest.mark.parametrize("held", ["module", "method"])
def test_an_object_patch_that_holds_a_source_module_is_refused(
    comfy: ModuleType, tiny: MakeTiny, held: str
) -> None:
    source = comfy.load_unet(tiny("wan").path)
    block = source.model.diffusion_model.blocks[0]
    patched = source.clone()
    name = "diffusion_model.blocks.0" + (".forward" if held == "method" else "")
    patched.add_object_patch(name, block.forward if held == "method" else block)
    with pytest.raises(ValueError, match=rf"a replaced part \({name}\), bound to its unquantized layers"):
        quantize(comfy, patched)
    assert quantize(comfy, source)[1].startswith("quantized 20 of 26 layers\n")
