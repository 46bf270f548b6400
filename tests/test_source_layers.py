"""Layers and models out of the ordinary: refused with a clear error, or kept exactly as they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import int8_checks as checks
import pytest
import torch
from comfyui.builders import TinyModel
from int8_node import difference, quantize, quantize_showing
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.core

MakeTiny = Callable[..., TinyModel]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


# --- refused -------------------------------------------------------------------------------------


class PackedTensor(torch.Tensor):
    """Stands in for ComfyUI-GGUF's GGMLTensor, which is on no package index: its loader cannot be installed.

    Like that class: packed uint8 rows that report the shape of the weight, and no way to unpack them.
    """

    @staticmethod
    def __new__(cls, data: torch.Tensor, shape: torch.Size) -> PackedTensor:
        return data.as_subclass(cls)

    def __init__(self, data: torch.Tensor, shape: torch.Size) -> None:
        self.tensor_shape = shape

    @property
    def shape(self) -> torch.Size:
        return self.tensor_shape

    def detach(self) -> PackedTensor:
        return self


def packed(weight: torch.Tensor) -> PackedTensor:
    """Q8_0: 32 codes and a fp16 scale in 34 bytes."""
    rows, columns = weight.shape
    return PackedTensor(torch.zeros((rows, columns // 32 * 34), dtype=torch.uint8), weight.shape)


def load_packed(path: Path) -> Any:
    """Loads a model as ComfyUI-GGUF does: by core's loader with operations of its own."""
    from comfy.ops import manual_cast
    from comfy.sd import load_diffusion_model_state_dict

    class Operations(manual_cast):
        class Linear(manual_cast.Linear):
            def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
                for part in ("weight", "bias"):
                    if (tensor := state_dict.get(prefix + part)) is not None:
                        setattr(self, part, torch.nn.Parameter(tensor, requires_grad=False))

    weights = load_file(path)
    weights = {k: packed(v) if "blocks." in k and v.ndim == 2 else v for k, v in weights.items()}
    return load_diffusion_model_state_dict(weights, model_options={"custom_operations": Operations})


def test_gguf_is_refused_by_the_name_of_a_layer(comfy: ModuleType, tiny: MakeTiny) -> None:
    source = load_packed(tiny("wan").path)
    weight = source.model.diffusion_model.blocks[0].self_attn.q.weight
    assert weight.shape == (256, 256) and weight.untyped_storage().nbytes() == 256 * 8 * 34
    message = (
        "the weight of blocks.0.self_attn.q is a PackedTensor of torch.uint8; the model was loaded by a"
        " loader with a weight format of its own (GGUF, nunchaku, bitsandbytes). Load a bf16, fp16 or fp8"
        " safetensors file with Load Diffusion Model instead."
    )
    with pytest.raises(ValueError, match=f"^Kitchen INT8 Quantize Model: {re.escape(message)}$"):
        quantize(comfy, source)


@pytest.mark.parametrize(("layers", "count"), [("blocks", 20), ("blocks+modulation", 21), ("all", 23)])
def test_ignoring_everything_is_refused(comfy: ModuleType, tiny: MakeTiny, layers: str, count: int) -> None:
    source = comfy.load_unet(tiny("wan").path)
    message = rf"no linear layer is left to quantize \({count} x in ignored_layers \(\*\); "
    with pytest.raises(ValueError, match=message):
        quantize(comfy, source, layers=layers, ignored_layers="*")


def test_a_model_that_no_group_divides_is_refused(comfy: ModuleType, tiny: MakeTiny) -> None:
    source = comfy.load_unet(tiny("wan", dim=128, ffn_dim=384).path)
    with pytest.raises(ValueError) as refusal:
        quantize(comfy, source, group_size="256")
    assert "no linear layer is left to quantize (" in str(refusal.value)
    assert "18 x in_features 128 divides by no group size (256)" in str(refusal.value)
    assert "2 x in_features 384 divides by no group size (256)" in str(refusal.value)
    assert quantize(comfy, source, group_size="64")[1].startswith("quantized 20 of 26 layers\n")


def test_sdxl_is_refused_as_a_unet(comfy: ModuleType, tiny: MakeTiny) -> None:
    message = (
        "UNetModel has no repeated transformer block list.*UNets such as SDXL. Connect the model without"
    )
    with pytest.raises(ValueError, match=message):
        quantize(comfy, comfy.load_unet(tiny("sdxl").path))


# --- kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["none", "absent"])
def test_a_linear_without_weight_is_left_alone(comfy: ModuleType, tiny: MakeTiny, missing: str) -> None:
    from comfy.ops import disable_weight_init

    tiny_model = tiny("wan")
    source = comfy.load_unet(tiny_model.path)
    block = source.model.diffusion_model.blocks[0]
    if missing == "none":
        block.unused = disable_weight_init.Linear(256, 256)
        block.unused.weight = None
    else:  # core itself cannot load one of its own layers in that state
        block.unused = torch.nn.Linear(256, 256)
        del block.unused.weight
    block.unused.bias = None
    model, report = quantize(comfy, source)
    assert "- holds no weight (1): blocks.0.unused" in report
    assert len(checks.int8_modules(model)) == 20
    # Wan's own norms without affine weights stay as they are too.
    for patcher in (source, model):
        assert patcher.model.diffusion_model.blocks[1].norm1.weight is None
    assert difference(comfy.sample(model, tiny_model), comfy.sample(source, tiny_model)) < 0.03


def test_a_weight_that_an_int8_file_lacks_stays_absent(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path
) -> None:
    weights = load_file(tiny("wan").path)
    key = "blocks.0.ffn.2"
    scale = weights[f"{key}.weight"].float().abs().amax(1, keepdim=True) / 127
    weights[f"{key}.weight"] = (weights[f"{key}.weight"] / scale).round().to(torch.int8)
    weights[f"{key}.weight_scale"] = scale
    weights[f"{key}.comfy_quant"] = checks.quant_key(format="int8_tensorwise")
    del weights["blocks.1.ffn.2.weight"]
    save_file(weights, tmp_path / "lacking.safetensors")
    source = checks.load(comfy, tmp_path / "lacking.safetensors")
    assert source.model.diffusion_model.blocks[1].ffn[2].weight is None
    model, report = quantize(comfy, source)
    assert report.startswith("quantized 18 of 26 layers (1 were already INT8)\n")
    assert "- holds no weight (1): blocks.1.ffn.2" in report
    assert model.model.diffusion_model.blocks[1].ffn[2].weight is None


@pytest.mark.parametrize("family", ["wan", "h3", "flux"])
def test_a_quantized_linear_has_the_attributes_of_a_linear(
    comfy: ModuleType, tiny: MakeTiny, family: str
) -> None:
    source = comfy.build_unet(tiny(family).path, BF16)
    model = quantize(comfy, source)[0]
    biases = set()
    for name, module in checks.int8_modules(model).items():
        original = source.model.diffusion_model.get_submodule(name)
        assert (module.in_features, module.out_features) == (original.in_features, original.out_features)
        assert module.weight.shape == original.weight.shape == (module.out_features, module.in_features)
        assert module.weight.dtype is BF16 and module.weight.device == original.weight.device
        assert (module.bias is None) == (original.bias is None)
        assert module.bias is None or torch.equal(module.bias, original.bias)
        biases.add(module.bias is None)
    assert biases == ({True} if family == "h3" else {False})


@pytest.mark.parametrize("curves", [False, True], ids=["time embedder", "curve table"])
def test_h3_keeps_its_fp32_layers_bit_for_bit(comfy: ModuleType, tiny: MakeTiny, curves: bool) -> None:
    tiny_model = tiny("h3", **({"adaln_curve_grid": 9} if curves else {}))
    source = comfy.build_unet(tiny_model.path, BF16, BF16)
    single = {name: tensor for name, tensor in load_file(tiny_model.path).items() if tensor.dtype is FP32}
    layers = {name.rpartition(".")[0] for name in single}
    assert {
        "video_patch_proj",
        "audio_patch_proj",
        "final_layer.video_out",
        "final_layer.audio_out",
    } <= layers
    assert ("blocks.1.adaln_proj.linear" in layers) is curves is ("time_embedder.proj_in" not in layers)
    for scope in ("blocks+modulation", "all"):
        model, report = quantize(comfy, source, layers=scope)
        comfy.sample(model, tiny_model)  # loading and sampling must not cast them either
        state = model.model.diffusion_model.state_dict()
        for name, tensor in single.items():
            assert state[name].dtype is FP32 and torch.equal(state[name], tensor), name
    assert "- the model keeps it in fp32 (4): video_patch_proj, audio_patch_proj" in report
    # 0.3% is what rounding them to bf16 costs; INT8 itself is at that size here, so bits are the test.
    assert difference(comfy.sample(model, tiny_model), comfy.sample(source, tiny_model)) < 0.03


@pytest.mark.parametrize(
    ("stored", "compute"),
    [(BF16, None), (BF16, FP32), (BF16, FP16), (FP16, None), (FP32, None), (FP32, BF16)],
)
def test_the_source_decides_the_dtypes(
    comfy: ModuleType, tiny: MakeTiny, stored: torch.dtype, compute: torch.dtype | None
) -> None:
    source = comfy.build_unet(tiny("wan").path, stored, compute)
    model = quantize(comfy, source)[0].model
    assert model.get_dtype() is source.model.get_dtype() is stored
    assert model.get_dtype_inference() is source.model.get_dtype_inference() is (compute or stored)
    assert {m.weight.dtype for m in checks.int8_modules(quantize(comfy, source)[0]).values()} == {
        compute or stored
    }


# --- ModelComputeDtype ---------------------------------------------------------------------------


def compute_in(comfy: ModuleType, model: Any, dtype: str) -> Any:
    from comfy_extras.nodes_model_advanced import ModelComputeDtype

    return comfy.run_node(ModelComputeDtype, model=model, dtype=dtype)[0]


@pytest.mark.parametrize(("before", "chosen"), [(FP32, "bf16"), (BF16, "fp32"), (FP32, "fp16")])
def test_model_compute_dtype_before_the_node_chooses_what_int8_computes_in(
    comfy: ModuleType, tiny: MakeTiny, before: torch.dtype, chosen: str
) -> None:
    dtype = {"bf16": BF16, "fp32": FP32, "fp16": FP16}[chosen]
    tiny_model = tiny("wan")
    source = compute_in(comfy, comfy.build_unet(tiny_model.path, BF16, before), chosen)
    texts: list[str] = []
    model = quantize_showing(comfy, source, texts.append)[0]
    assert model.model.get_dtype_inference() is dtype
    with checks.watched(model) as seen:
        result = comfy.sample(model, tiny_model, steps=2)
    assert len(seen.int8_linear) == 20 and set(seen.int8_linear.values()) == {2} and not seen.dequantized
    assert {m.weight.dtype for m in checks.int8_modules(model).values()} == {dtype}
    assert not any("WARNING" in text for text in texts)
    plain = comfy.sample(source, tiny_model, steps=2)
    assert 1e-4 < difference(result, plain) < 0.03
    # The choice has an effect, and it is the one that the unquantized model shows.
    other = quantize(comfy, comfy.build_unet(tiny_model.path, BF16, before))[0]
    assert not torch.equal(comfy.sample(other, tiny_model, steps=2), result)


def test_model_compute_dtype_after_the_node_is_warned_about(comfy: ModuleType, tiny: MakeTiny) -> None:
    tiny_model = tiny("wan")
    texts: list[str] = []
    model, report = quantize_showing(comfy, comfy.load_unet(tiny_model.path), texts.append)
    after = compute_in(comfy, model, "bf16")
    with checks.watched(after) as seen:
        comfy.sample(after, tiny_model, steps=1)
    warning = (
        "WARNING: ModelComputeDtype after this node makes ComfyUI dequantize every INT8 layer;"
        " put it before Kitchen INT8 Quantize Model"
    )
    assert texts[-1].splitlines()[2] == warning and texts[-1].startswith(report.splitlines()[0])
    # What the text says is so, and the model without that node is not affected.
    assert not seen.int8_linear and sum(seen.dequantized.values()) == 20
    with checks.watched(model) as seen:
        comfy.sample(model, tiny_model, steps=1)
    assert len(seen.int8_linear) == 20 and not seen.dequantized
    assert warning not in texts[-1]
