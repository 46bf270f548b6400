"""Core's ModelSave writes a quantized model so that core's UNETLoader brings the same model back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import builders, startup
from comfyui.builders import TinyModel
from comfyui.graphs import node, sampling_graph
from comfyui.server import ComfyServer
from int8_node import (
    DEFAULTS,
    DITS,
    LORA_A,
    NODE_ID,
    difference,
    int8_layers,
    merged_file,
    quantize,
    static,
)
from safetensors.torch import load_file

MakeTiny = Callable[..., TinyModel]
Save = Callable[[Any], Path]
PREFIX = "model.diffusion_model."


@pytest.fixture(autouse=True)
def as_in_a_node() -> Iterator[None]:
    """ComfyUI's executor runs nodes, loaders and samplers under inference mode."""
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def whole_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files as with --disable-mmap: a CPU's fp32 sums depend on the alignment of the weights."""
    import comfy.utils

    monkeypatch.setattr(comfy.utils, "DISABLE_MMAP", True)


@pytest.fixture
def save(comfy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    """Runs core's ModelSave; the file that it wrote."""
    import folder_paths
    from comfy_extras.nodes_model_merging import ModelSave

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))

    def run(patcher: Any) -> Path:
        earlier = set(tmp_path.glob("saved_*.safetensors"))
        comfy.run_node(ModelSave, model=patcher, filename_prefix="saved")
        [path] = set(tmp_path.glob("saved_*.safetensors")) - earlier
        return path

    return run


def sample(comfy: ModuleType, patcher: Any, model: TinyModel) -> torch.Tensor:
    return comfy.sample(patcher, model, steps=2)


def restore_fp32(patcher: Any, path: Path) -> int:
    """Put the linear layers that a saved file holds in fp32 back to fp32; how many that changed."""
    changed = 0
    for key, tensor in load_file(str(path)).items():
        layer, _, part = key.removeprefix(PREFIX).rpartition(".")
        module = patcher.model.diffusion_model.get_submodule(layer)
        is_linear = hasattr(module, "in_features") and part in ("weight", "bias")
        if is_linear and tensor.dtype == torch.float32 and getattr(module, part).dtype != torch.float32:
            parameter = torch.nn.Parameter(tensor.to(getattr(module, part).device), requires_grad=False)
            setattr(module, part, parameter)
            changed += 1
    return changed


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", DITS)
def test_the_file_holds_int8_weights_their_scales_and_nothing_else(
    comfy: ModuleType, tiny: MakeTiny, save: Save, family: str
) -> None:
    import comfy.model_management as management

    model = tiny(family)
    original = load_file(str(model.path))
    source = comfy.load_unet(model.path)
    quantized, _ = quantize(comfy, source)
    saved = {key.removeprefix(PREFIX): tensor for key, tensor in load_file(str(save(quantized))).items()}
    layers = int8_layers(quantized)
    assert len(layers) >= 8
    for layer in layers:
        rows, columns = original[f"{layer}.weight"].shape
        parts = {key[len(layer) + 1 :]: saved.pop(key) for key in list(saved) if key.startswith(f"{layer}.")}
        assert parts.keys() == {"weight", "weight_scale", "comfy_quant"} | (
            {"bias"} if f"{layer}.bias" in original else set()
        )
        assert parts["weight"].dtype == torch.int8 and parts["weight"].shape == (rows, columns)
        assert parts["weight_scale"].dtype == torch.float32 and parts["weight_scale"].shape == (rows, 1)
        group = next(g for g in (256, 64, 16) if columns % g == 0)
        text = parts.pop("comfy_quant")
        assert json.loads(text.numpy().tobytes()) == {
            "format": "int8_tensorwise",
            "convrot": True,
            "convrot_groupsize": group,
        }
        expected = rows * columns + 4 * rows
        if "bias" in parts:
            # Core keeps the bias of a quantized layer in the compute dtype.
            assert torch.equal(parts["bias"], original[f"{layer}.bias"].to(parts["bias"].dtype))
            assert parts["bias"].dtype == source.model.get_dtype_inference()
            expected += rows * parts["bias"].element_size()
        assert sum(part.nbytes for part in parts.values()) == expected
        # Core reserves memory for what the layer's state dict holds, the text included.
        module = quantized.model.diffusion_model.get_submodule(layer)
        assert management.module_size(module) == expected + text.nbytes
    # The rest is the source's, bit for bit.
    rest = {key: tensor for key, tensor in source.model.diffusion_model.state_dict().items() if key in saved}
    assert rest.keys() == saved.keys()
    for key, tensor in rest.items():
        assert saved[key].dtype == tensor.dtype and torch.equal(saved[key], tensor.cpu()), key


# --- the same samples -----------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("layers", ["blocks", "all"])
@pytest.mark.parametrize("family", DITS)
def test_a_reloaded_file_gives_the_same_bits(
    comfy: ModuleType, tiny: MakeTiny, save: Save, family: str, layers: str
) -> None:
    model = tiny(family)
    quantized, _ = quantize(comfy, comfy.load_unet(model.path), layers=layers)
    bits = sample(comfy, quantized, model)
    path = save(quantized)
    reloaded = comfy.load_unet(path)
    assert int8_layers(reloaded) == int8_layers(quantized)
    assert restore_fp32(reloaded, path) == 0 or family == "h3"
    assert torch.equal(sample(comfy, reloaded, model), bits)
    assert torch.equal(sample(comfy, quantized, model), bits), "saving changes nothing"


def reload_computing_in(path: Path, dtype: torch.dtype) -> Any:
    """UNETLoader's steps for a quantized file (comfy.sd.load_diffusion_model_state_dict), but with a
    weight and compute dtype that core would not choose on a CPU."""
    import comfy.model_detection
    import comfy.model_management
    import comfy.model_patcher
    import comfy.utils

    weights, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(weights)
    assert prefix == PREFIX
    weights = comfy.utils.state_dict_prefix_replace(weights, {prefix: ""}, filter_keys=True)
    weights, metadata = comfy.utils.convert_old_quants(weights, "", metadata=metadata)
    config = comfy.model_detection.model_config_from_unet(weights, "", metadata=metadata)
    assert config.quant_config
    device = comfy.model_management.get_torch_device()
    config.set_inference_dtype(dtype, dtype, device=device)
    built = config.get_model(weights, "")
    offload_device = comfy.model_management.unet_offload_device()
    patcher = comfy.model_patcher.CoreModelPatcher(built, load_device=device, offload_device=offload_device)
    built.load_model_weights(weights, "", assign=patcher.is_dynamic())
    return patcher


@pytest.mark.core
@pytest.mark.parametrize("family", DITS)
def test_a_reloaded_file_gives_the_same_bits_computing_in_bf16(
    comfy: ModuleType, tiny: MakeTiny, save: Save, family: str
) -> None:
    model = tiny(family)
    source = comfy.build_unet(model.path, dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
    quantized, _ = quantize(comfy, source)
    assert quantized.model.get_dtype_inference() == torch.bfloat16
    bits = sample(comfy, quantized, model)
    path = save(quantized)
    reloaded = reload_computing_in(path, torch.bfloat16)
    assert reloaded.model.get_dtype_inference() == torch.bfloat16
    first = sample(comfy, reloaded, model)
    if family == "h3":
        # Core casts the layers that this model wants in fp32; the node does not.
        assert 1e-4 < difference(first, bits) < 0.02
        assert restore_fp32(reloaded, path) > 0
    else:
        assert restore_fp32(reloaded, path) == 0
    assert torch.equal(sample(comfy, reloaded, model), bits)


# --- with a LoRA ----------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("partly", [False, True], ids=["resident", "partly loaded"])
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_a_lora_attached_while_saving_is_in_the_file(
    comfy: ModuleType, tiny: MakeTiny, save: Save, tmp_path: Path, family: str, partly: bool
) -> None:
    from comfy.patcher_extension import CallbacksMP

    model = tiny(family)
    lora = tmp_path / "lora.safetensors"
    factors = builders.write_lora(lora, model, LORA_A[family])
    quantized, _ = quantize(comfy, comfy.load_unet(model.path))
    plain = sample(comfy, quantized, model)
    with_lora = comfy.apply_lora(static(quantized), lora, 1.0)
    if partly:
        # ModelSave loads the model first; this is memory pressure right after it did.
        with_lora.add_callback(CallbacksMP.ON_LOAD, lambda p, *_: p.partially_unload(p.offload_device, 1e32))
    bits = sample(comfy, with_lora, model)
    path = save(with_lora)
    patched = [with_lora.model.diffusion_model.get_submodule(layer) for layer in LORA_A[family]]
    assert {bool(module.weight_function) for module in patched} == {partly}
    stored = load_file(str(path))
    assert all(stored[f"{PREFIX}{layer}.weight"].dtype == torch.int8 for layer in LORA_A[family])

    reloaded = comfy.load_unet(path)
    assert not reloaded.patches
    got = sample(comfy, reloaded, model)
    merged = merged_file(tmp_path / "merged.safetensors", model, [(factors, 1.0)])
    expected = sample(comfy, comfy.load_unet(merged), model)
    assert difference(expected, plain) > 0.05
    assert difference(got, expected) < 0.03
    if not partly:
        assert torch.equal(got, bits), "a resident layer has the LoRA baked in with the same rounding"
    assert torch.equal(sample(comfy, quantized, model), plain), "the model itself is as before"


# --- in the server --------------------------------------------------------------------------------


def test_the_server_saves_and_reloads_in_the_next_prompt(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path
) -> None:
    arguments = startup.comfyui_args()
    with ComfyServer(tmp_path, device_args=arguments, extra_args=["--disable-mmap"]) as server:
        for model in (tiny("wan"), tiny("flux")):
            server.add_model(model)
            name = f"int8_{model.family}"
            graph = sampling_graph(
                model, model_nodes=[(NODE_ID, DEFAULTS)], steps=2, save_as=f"{name}_before"
            )
            graph["plain"] = node("KSampler", **{**graph["sampler"]["inputs"], "model": ["unet", 0]})
            graph["save_plain"] = node("TestSaveLatent", samples=["plain", 0], filename=f"{name}_plain")
            graph["save_model"] = node(
                "ModelSave", model=["model_1", 0], filename_prefix=f"diffusion_models/{name}"
            )
            server.run(graph).raise_for_errors()

            # ComfyUI lists what it saves there among the models that UNETLoader offers.
            again = sampling_graph(model, steps=2, save_as=f"{name}_after")
            again["unet"]["inputs"]["unet_name"] = f"{name}_00001_.safetensors"
            server.run(again).raise_for_errors()
            before, after = server.latent(f"{name}_before"), server.latent(f"{name}_after")
            assert torch.equal(after, before)
            assert 1e-4 < difference(before, server.latent(f"{name}_plain")) < 0.02
