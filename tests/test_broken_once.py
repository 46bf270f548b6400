"""Faults that a reader found once, each with the right value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import builders
from comfyui.builders import TinyModel
from int8_node import LORA_A, difference, int8_layers, quantize, quantize_showing

MakeTiny = Callable[..., TinyModel]
pytestmark = pytest.mark.core


def _merged(comfy: ModuleType, first: Any, second: Any) -> Any:
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    with torch.inference_mode():
        return ModelMergeSimple().merge(first, second, 0.5)[0]


def test_bake_after_merging_partly_int8_models_equals_the_merge_of_the_originals(
    comfy: ModuleType, tiny: MakeTiny
) -> None:
    a, b = tiny("wan"), tiny("wan", seed=5)
    plain = _merged(comfy, comfy.load_unet(a.path), comfy.load_unet(b.path))
    halves = [quantize(comfy, comfy.load_unet(x.path), ignored_layers="blocks.1")[0] for x in (a, b)]
    merge = _merged(comfy, *halves)
    expected = comfy.sample(plain, a)
    baked, kept = (quantize(comfy, merge, lora=how)[0] for how in ("bake", "keep"))
    assert difference(comfy.sample(kept, a), expected) < 0.05
    assert difference(comfy.sample(baked, a), expected) < 0.05
    comfy.unload_all()  # a loaded layer is patched already
    for layer in ("blocks.0.ffn.0", "blocks.1.ffn.0"):
        key = f"diffusion_model.{layer}.weight"
        exact = sum(
            comfy.load_unet(x.path).model.diffusion_model.get_submodule(layer).weight.double() / 2
            for x in (a, b)
        )
        with torch.inference_mode():
            weight = baked.patch_weight_to_device(key, return_weight=True).dequantize().double()
        assert difference(weight, exact) < 0.02


def test_bake_merges_a_lora_into_scaled_fp8(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> None:
    import json

    from safetensors.torch import load_file, save_file

    tiny_model = tiny("wan")
    weights = load_file(str(tiny_model.path))
    layer = LORA_A["wan"][0]
    scale = weights[f"{layer}.weight"].float().abs().max() / 448
    fp8 = (weights[f"{layer}.weight"].float() / scale).to(torch.float8_e4m3fn)
    conf = list(json.dumps({"format": "float8_e4m3fn"}).encode())
    save_file(
        {
            **weights,
            f"{layer}.weight": fp8,
            f"{layer}.weight_scale": scale,
            f"{layer}.comfy_quant": torch.tensor(conf, dtype=torch.uint8),
        },
        str(tmp_path / "fp8.safetensors"),
    )
    factors = builders.write_lora(tmp_path / "lora.safetensors", tiny_model, [layer])
    source = comfy.apply_lora(
        comfy.load_unet(tmp_path / "fp8.safetensors"), tmp_path / "lora.safetensors", 1.0
    )
    model, report = quantize(comfy, source, lora="bake")
    assert "LoRA: merged into 1 weights before quantizing" in report.splitlines()
    assert not model.patches
    up, down, alpha = factors[layer]
    exact = fp8.double() * scale.double() + alpha / up.shape[1] * up.double() @ down.double()
    with torch.inference_mode():
        weight = model.model.diffusion_model.get_submodule(layer).weight.dequantize().double()
    assert difference(weight, exact) < 0.02


def test_the_negative_model_of_a_dual_guider_is_told_and_refused_too(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path
) -> None:
    from comfy import samplers, sd, utils

    custom = pytest.importorskip("comfy_extras.nodes_custom_sampler")
    if not hasattr(custom, "DualModelGuider"):
        pytest.skip("this ComfyUI has no guider for two models")
    tiny_model = tiny("wan")
    texts: list[str] = []
    source = comfy.load_unet(tiny_model.path)
    quantized, _ = quantize_showing(comfy, source, texts.append)

    def run(negative: Any) -> None:
        with torch.inference_mode():
            positive = comfy.conditioning(tiny_model)
            guider = custom.DualModelGuider.execute(source, positive, 4.0, negative, positive)[0]
            latent = comfy.empty_latent(tiny_model)["samples"]
            sigmas = samplers.calculate_sigmas(source.get_model_object("model_sampling"), "simple", 2)
            noise = torch.randn_like(latent)
            guider.sample(noise, latent, samplers.sampler_object("euler"), sigmas, seed=1)

    run(quantized)
    assert texts and texts[-1].startswith("quantized 20 of 26 layers\nLoRA: none attached")
    builders.write_lora(tmp_path / "lora.safetensors", tiny_model, LORA_A["wan"])
    lora = utils.load_torch_file(str(tmp_path / "lora.safetensors"))
    with torch.inference_mode():
        bypass = sd.load_bypass_lora_for_models(quantized, None, lora, 1.0, 0)[0]
    with pytest.raises(ValueError, match="bypass mode"):
        run(bypass)
    run(quantized)


def test_names_of_the_report_can_be_pasted_into_ignored_layers(comfy: ModuleType, tiny: MakeTiny) -> None:
    tiny_model = tiny("wan", num_layers=12)
    source = comfy.load_unet(tiny_model.path)
    model, report = quantize(comfy, source)
    names = next(line for line in report.splitlines() if line.startswith("INT8 layers: "))
    assert "blocks.[0-11].cross_attn.k" in names
    fewer, text = quantize(comfy, source, ignored_layers="blocks.[0-11].cross_attn.k\nblocks.[1,3-4].ffn.0")
    gone = set(int8_layers(model)) - set(int8_layers(fewer))
    assert gone == {f"blocks.{i}.cross_attn.k" for i in range(12)} | {f"blocks.{i}.ffn.0" for i in (1, 3, 4)}
    assert "matches no linear layer" not in text


def test_running_out_of_memory_in_the_probe_is_not_remembered(
    comfy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = comfy.pack_module("kernels_glue.probe")
    probe.int8_fault.cache_clear()
    with monkeypatch.context() as full:

        def no_memory(*_: Any, **__: Any) -> None:
            raise torch.cuda.OutOfMemoryError("full")

        full.setattr(torch, "randn", no_memory)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            probe.int8_fault(torch.device("cpu"), torch.float32, 256)
    assert probe.int8_fault(torch.device("cpu"), torch.float32, 256) == ""


def test_of_one_source_the_results_of_two_nodes_are_kept(comfy: ModuleType, tiny: MakeTiny) -> None:
    import gc
    import weakref

    source = comfy.load_unet(tiny("wan").path)
    models = []
    for node in ("1", "2", "3"):
        made, _ = quantize(comfy, source, unique_id=node, ignored_layers=f"blocks.0.ffn.{node}, blocks.1")
        models.append(weakref.ref(made.model))
        del made
    comfy.unload_all()
    gc.collect()
    assert [model() is not None for model in models] == [False, True, True]
    _, again = quantize(comfy, source, unique_id="3", ignored_layers="blocks.0.ffn.3, blocks.1")
    assert "reused now" in again


def test_broken_weights_are_pointed_out(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(str(tiny("wan").path))
    weights["blocks.1.ffn.0.weight"][3, 4] = float("nan")
    save_file(weights, str(tmp_path / "nan.safetensors"))
    _, report = quantize(comfy, comfy.load_unet(tmp_path / "nan.safetensors"))
    assert "note: the file has NaN or infinite weights in blocks.1.ffn.0;" in report
