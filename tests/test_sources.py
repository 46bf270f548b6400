"""Every kind of source: what is read from it, what is left as it is, and what is refused.

The expected value of each INT8 layer is computed in fp64 from the file, see int8_checks.check_int8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import int8_checks as checks
import pytest
import torch
from comfyui.builders import TinyModel
from int8_node import difference, quantize
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.core

MakeTiny = Callable[..., TinyModel]
Weights = dict[str, torch.Tensor]
E4M3 = torch.float8_e4m3fn


def block_matrices(weights: Mapping[str, torch.Tensor], prefix: str = "blocks.") -> Iterator[str]:
    """Names of the Wan layers whose matrices lie in the blocks."""
    for key, tensor in weights.items():
        if key.startswith(prefix) and key.endswith(".weight") and tensor.ndim == 2:
            yield key.removesuffix(".weight")


def check_layers(model: Any, expected: Mapping[str, torch.Tensor], group_size: int = 256) -> None:
    """Exactly the layers of `expected` are INT8, with these values, and compute in the source's dtype."""
    layers = checks.int8_modules(model)
    assert set(layers) == set(expected)
    for name, module in layers.items():
        checks.check_int8(module, expected[name], group_size)
        assert module.weight.dtype == model.model.get_dtype_inference()


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, bytes]:
    tensor = tensor.detach().cpu().contiguous().reshape(-1)
    return tensor.dtype, tensor.view(torch.uint8).numpy().tobytes()


def check_untouched(source: Any, model: Any, quantized: set[str]) -> None:
    """Everything but the quantized layers has the bits and the dtype that it has in the source."""
    for tensors in ("named_parameters", "named_buffers"):
        kept = dict(getattr(source.model.diffusion_model, tensors)())
        found = dict(getattr(model.model.diffusion_model, tensors)())
        assert set(found) == set(kept)
        for name in found:
            if name.rpartition(".")[0] not in quantized:
                assert bits(found[name]) == bits(kept[name]), name
            elif name.endswith(".bias"):  # core holds it in the compute dtype, which loses nothing
                assert torch.equal(found[name].double(), kept[name].double()), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["wan", "h3", "flux"])
def test_float_files(comfy: ModuleType, tiny: MakeTiny, family: str, dtype: torch.dtype) -> None:
    tiny_model = tiny(family, dtype=dtype)
    source = comfy.build_unet(tiny_model.path, dtype)
    model, report = quantize(comfy, source)
    weights = load_file(tiny_model.path)
    layers = checks.int8_modules(model)
    assert len(layers) == {"wan": 20, "h3": 12, "flux": 20}[family]
    check_layers(model, {name: weights[f"{name}.weight"] for name in layers})
    check_untouched(source, model, set(layers))
    assert "fp8" not in report


@pytest.mark.parametrize("family", ["wan", "flux"])
def test_raw_fp8_is_quantized_from_its_values_and_the_rest_stays_fp8(
    comfy: ModuleType, tiny: MakeTiny, family: str
) -> None:
    tiny_model = tiny(family, dtype=E4M3)
    source = checks.load(comfy, tiny_model.path, dtype=E4M3)
    kept = "blocks.0.ffn.0" if family == "wan" else "single_blocks.1.linear1"
    model, report = quantize(comfy, source, ignored_layers=kept)
    weights = load_file(tiny_model.path)
    layers = checks.int8_modules(model)
    check_layers(model, {name: weights[f"{name}.weight"].float() for name in layers})
    check_untouched(source, model, set(layers))
    assert model.model.diffusion_model.get_submodule(kept).weight.dtype is E4M3
    assert len(layers) == 19
    assert "note: 19 layers come from fp8, so they are rounded twice" in report
    plain, quantized = comfy.sample(source, tiny_model), comfy.sample(model, tiny_model)
    assert 1e-4 < difference(quantized, plain) < 0.03


def scaled_fp8(weights: Weights, names: list[str]) -> tuple[Weights, Weights, Weights]:
    """(fp8 matrices, their scales, their values in fp32), with scales that are no powers of two."""
    scales = {n: weights[f"{n}.weight"].float().abs().max() / 448 for n in names}
    matrices = {n: (weights[f"{n}.weight"].float() / scales[n]).to(E4M3) for n in names}
    return matrices, scales, {n: matrices[n].float() * scales[n] for n in names}


@pytest.mark.parametrize("file_format", ["scaled_fp8", "scaled_fp8 full precision", "comfy_quant"])
def test_scaled_fp8_is_quantized_from_its_dequantized_values(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path, file_format: str
) -> None:
    tiny_model = tiny("wan")
    weights = load_file(tiny_model.path)
    matrices, scales, values = scaled_fp8(weights, list(block_matrices(weights)))
    for name, matrix in matrices.items():
        weights[f"{name}.weight"] = matrix
        if file_format == "comfy_quant":
            weights[f"{name}.weight_scale"] = scales[name]
            weights[f"{name}.comfy_quant"] = checks.quant_key(format="float8_e4m3fn")
        else:  # core tells the two older forms apart by the number of elements of a marker
            weights[f"{name}.scale_weight"] = scales[name]
            weights["scaled_fp8"] = torch.zeros(2 if "full" in file_format else 0, dtype=E4M3)
    path = tmp_path / "scaled.safetensors"
    save_file(weights, path)

    source = checks.load(comfy, path)
    model, report = quantize(comfy, source, ignored_layers="blocks.1")
    # Core dequantizes to the compute dtype, whatever comes after.
    dtype = source.model.get_dtype_inference()
    check_layers(model, {n: v.to(dtype) for n, v in values.items() if n.startswith("blocks.0.")})
    assert "note: 10 layers come from fp8, so they are rounded twice" in report
    for name in block_matrices(weights, "blocks.1."):
        weight = model.model.diffusion_model.get_submodule(name).weight
        assert bits(weight._qdata) == bits(matrices[name])
        assert bits(weight._params.scale) == bits(scales[name])
    plain, quantized = comfy.sample(source, tiny_model), comfy.sample(model, tiny_model)
    assert 1e-4 < difference(quantized, plain) < 0.03


def saved(comfy: ModuleType, model: Any, folder: Path) -> Path:
    """The file that core's ModelSave node writes."""
    import folder_paths
    from comfy_extras.nodes_model_merging import ModelSave

    before = folder_paths.get_output_directory()
    folder_paths.set_output_directory(str(folder))
    try:
        comfy.run_node(ModelSave, model=model, filename_prefix="saved")
    finally:
        folder_paths.set_output_directory(before)
    [path] = folder.glob("saved*.safetensors")
    return path


def test_an_int8_file_passes_through_and_names_the_settings_without_effect(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path
) -> None:
    tiny_model = tiny("wan")
    path = saved(comfy, quantize(comfy, checks.load(comfy, tiny_model.path))[0], tmp_path)
    source = checks.load(comfy, path)
    expected = comfy.sample(source, tiny_model)
    model, report = quantize(
        comfy,
        source,
        group_size="64",
        layers="blocks+modulation",
        ignored_layers="blocks.1\ntime_projection",
        lora="bake",
        device="cpu",
    )
    assert model is not source and model.model is source.model
    lines = report.splitlines()
    assert lines[0] == "quantized 0 of 26 layers: 20 are already INT8, the model passes through"
    assert set(lines[1:]) == {
        "note: ignored_layers: 'blocks.1' had no effect, its layers are already INT8.",
        "note: group_size 64 had no effect: the model has INT8 layers of group 256.",
        "note: layers blocks+modulation had no effect: there is no layer left to quantize.",
        "note: lora bake had no effect: there is no layer left to quantize.",
        "note: device cpu had no effect: there is no layer left to quantize.",
        "LoRA: none attached",
    }
    assert torch.equal(comfy.sample(model, tiny_model), expected)
    # With the same settings there is nothing to say.
    assert quantize(comfy, source)[1].splitlines() == [lines[0], "LoRA: none attached"]


@pytest.mark.parametrize("group_size", ["auto", "64", "256"])
def test_a_partly_int8_file_is_finished_with_its_group_size(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path, group_size: str
) -> None:
    tiny_model = tiny("wan")
    whole = checks.load(comfy, tiny_model.path)
    path = saved(comfy, quantize(comfy, whole, group_size="64", ignored_layers="blocks.1")[0], tmp_path)
    source = checks.load(comfy, path)
    assert len(checks.int8_modules(source)) == 10
    model, report = quantize(comfy, source, group_size=group_size)
    assert report.startswith("quantized 10 of 26 layers (10 were already INT8)\n")
    without_effect = "note: group_size 256 had no effect: the model has INT8 layers of group 64."
    assert (without_effect in report) == (group_size == "256")
    weights = load_file(tiny_model.path)
    layers = checks.int8_modules(model)
    check_layers(model, {name: weights[f"{name}.weight"] for name in block_matrices(weights)}, 64)
    file = load_file(path)
    for name in block_matrices(weights, "blocks.0."):
        stored = f"model.diffusion_model.{name}.weight"  # ModelSave's prefix
        assert bits(layers[name].weight._qdata) == bits(file[stored])
        assert bits(layers[name].weight._params.scale) == bits(file[f"{stored}_scale"])
    plain, quantized = comfy.sample(whole, tiny_model), comfy.sample(model, tiny_model)
    assert 1e-4 < difference(quantized, plain) < 0.03


@pytest.mark.parametrize("quant_format", ["nvfp4", "mxfp8", "convrot_w4a4"])
def test_layers_in_other_formats_are_kept_with_a_reason(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path, quant_format: str
) -> None:
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    if quant_format not in QUANT_ALGOS:
        pytest.skip(f"this ComfyUI has no {quant_format}")
    tiny_model = tiny("wan")
    weights = load_file(tiny_model.path)
    file = dict(weights)
    foreign = set(block_matrices(weights, "blocks.0."))
    for name in foreign:
        key = f"{name}.weight"
        layout = QUANT_ALGOS[quant_format]["comfy_tensor_layout"]
        parts = QuantizedTensor.from_float(weights[key].bfloat16(), layout).state_dict(key)
        # safetensors knows no e8m0; core reads it from bytes.
        file |= {k: v.view(torch.uint8) if "e8m0" in str(v.dtype) else v for k, v in parts.items()}
        file[f"{name}.comfy_quant"] = checks.quant_key(format=quant_format)
    path = tmp_path / "mixed.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in file.items()}, path)

    source = checks.load(comfy, path)
    model, report = quantize(comfy, source)
    assert report.startswith("quantized 10 of 26 layers\n")
    assert f"- already quantized ({quant_format}) (10): blocks.0.self_attn.q, " in report
    done = list(block_matrices(weights, "blocks.1."))
    check_layers(model, {name: weights[f"{name}.weight"] for name in done})
    kept, found = source.model.diffusion_model.state_dict(), model.model.diffusion_model.state_dict()
    for key in kept:
        if any(key.startswith(f"{name}.") for name in foreign):
            assert bits(found[key]) == bits(kept[key]), key
    plain, quantized = comfy.sample(source, tiny_model), comfy.sample(model, tiny_model)
    # The W4A4 layers round their inputs to 4 bits, which magnifies any difference before them.
    assert 1e-4 < difference(quantized, plain) < 0.06
    with pytest.raises(
        ValueError, match=rf"no linear layer is left .*10 x already quantized .{quant_format}"
    ):
        quantize(comfy, source, ignored_layers="blocks.1")
