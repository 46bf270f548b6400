"""The quantized model computes in INT8, with the right numbers, and quantizing needs little memory.

What runs is counted where comfy_kitchen's registry finds its kernels, which keep running; the right
numbers are computed in fp64 from the definition of ConvRot, outside of comfy_kitchen and ComfyUI.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import int8_checks as checks
import pytest
import torch
from comfyui import builders
from comfyui.builders import TinyModel
from int8_node import difference, quantize

MakeTiny = Callable[..., TinyModel]
DITS = ("wan", "h3", "flux")
SCOPES = ("blocks", "blocks+modulation", "all")
STEPS = 2

# Linear layers of the tiny models, counted in ComfyUI's model files. Wan: 4 + 4 attention and 2 ffn
# layers a block. H3: 4 a block, refiner blocks too. Flux: 8 a double block, 2 a single block.
QUANTIZED = {
    ("wan", "blocks"): 2 * 10,
    ("wan", "blocks+modulation"): 2 * 10 + 1,  # time_projection
    ("wan", "all"): 2 * 10 + 3,  # text_embedding 0 and 2, head
    ("h3", "blocks"): 3 * 4,
    ("h3", "blocks+modulation"): 3 * 4 + 3,  # an adaln_proj a block and one in final_layer
    ("h3", "all"): 3 * 4 + 1,  # condition_proj; the other projections are kept in fp32
    ("flux", "blocks"): 2 * 8 + 2 * 2,
    ("flux", "blocks+modulation"): 2 * 8 + 2 * 2 + 2 * 2 + 2 + 1,  # img_mod, txt_mod; modulation; final
    ("flux", "all"): 2 * 8 + 2 * 2 + 3,  # img_in, txt_in, final_layer.linear
}
ALL_LINEARS = {"wan": 2 * 10 + 6, "h3": 3 * 4 + 10, "flux": 2 * 8 + 2 * 2 + 14}


def expected_runs(family: str, name: str, evaluations: int) -> int:
    """How often a linear layer runs: H3 refines each of the two texts once, before the sampling."""
    once_a_text = family == "h3" and name.startswith(("token_refiner.", "condition_proj"))
    return 2 if once_a_text else evaluations


def check_counts(family: str, model: object, seen: checks.Kernels) -> None:
    """Each INT8 layer ran int8_linear once an evaluation, each other linear layer ran as it is."""
    # Wan and Flux evaluate the two conditions in one batch, H3 one after the other.
    assert seen.evaluations == STEPS * (2 if family == "h3" else 1)
    layers = checks.int8_modules(model)
    assert seen.int8_linear == {name: expected_runs(family, name, seen.evaluations) for name in layers}
    assert not seen.dequantized
    linears = {n for n, m in model.model.diffusion_model.named_modules() if hasattr(m, "in_features")}
    assert len(linears) == ALL_LINEARS[family]
    plain = linears - set(layers)
    assert seen.plain == sum(expected_runs(family, name, seen.evaluations) for name in plain)


@pytest.mark.parametrize("scope", [pytest.param("blocks", marks=pytest.mark.core), *SCOPES[1:]])
@pytest.mark.parametrize("family", DITS)
def test_each_layer_runs_int8_linear_once_an_evaluation_and_nothing_dequantizes(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path, family: str, scope: str
) -> None:
    tiny_model = tiny(family)
    source = comfy.build_unet(tiny_model.path, torch.bfloat16)
    model, report = quantize(comfy, source, layers=scope)
    count = QUANTIZED[family, scope]
    assert report.startswith(f"quantized {count} of {ALL_LINEARS[family]} layers\n")
    assert len(checks.int8_modules(model)) == count
    with checks.watched(model) as seen:
        comfy.sample(model, tiny_model, steps=STEPS, cfg=3.0, negative=True)
    check_counts(family, model, seen)

    # A LoRA baked into resident layers: requantized when the model is loaded, INT8 while it samples.
    layers = list(checks.int8_modules(model))
    builders.write_lora(tmp_path / "lora.safetensors", tiny_model, [layers[0], layers[-1]])
    with_lora = comfy.apply_lora(model, tmp_path / "lora.safetensors", 1.0)
    comfy.sample(with_lora, tiny_model, steps=1)
    with checks.watched(with_lora) as seen:
        comfy.sample(with_lora, tiny_model, steps=STEPS, cfg=3.0, negative=True)
    check_counts(family, with_lora, seen)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", DITS)
def test_one_layer_is_within_1_5_percent_of_the_unquantized_layer(
    comfy: ModuleType, tiny: MakeTiny, family: str, dtype: torch.dtype
) -> None:
    source = comfy.build_unet(tiny(family).path, torch.bfloat16, dtype)
    model = quantize(comfy, source)[0]
    generator = torch.Generator().manual_seed(5)
    layers = list(checks.int8_modules(model).items())[-12:]  # a whole block of every kind
    with torch.inference_mode():
        for name, module in layers:
            original = source.model.diffusion_model.get_submodule(name)
            x = torch.randn((40, original.in_features), generator=generator).to(dtype)
            result, expected = module(x), original(x)
            assert result.dtype is dtype
            assert 0.005 < difference(result, expected) < 0.015, name


# Relative error of y = x W^T at K = 5376 (MiniMax-H3's width) for x with and without outlier channels
# (16 channels 30 times as large): a small group cannot spread an outlier over enough inputs. The test
# computes them in fp64 as well; here they stand so that a change of any of them is seen.
TABLE = {
    (256, False): 0.0127,
    (64, False): 0.0128,
    (16, False): 0.0127,
    (256, True): 0.0130,
    (64, True): 0.0157,
    (16, True): 0.0244,
}


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("group_size", [256, 64, 16])
def test_error_of_each_group_size_with_and_without_outliers(
    comfy: ModuleType, group_size: int, outliers: bool
) -> None:
    convert = comfy.pack_module("kernels_glue.quantization.convert")
    n, k = 256, 5376
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((n, k), generator=generator) / k**0.5
    x = torch.randn((64, k), generator=generator)
    if outliers:
        x[:, torch.randperm(k, generator=generator)[:16]] *= 30

    # fp64: rotate and quantize both operands, multiply.
    x_codes, x_scales = checks.int8_rows(checks.rotated(x, group_size))
    w_codes, w_scales = checks.int8_rows(checks.rotated(weight, group_size))
    expected = (x_codes.round() * x_scales) @ (w_codes.round() * w_scales).T
    exact = x.double() @ weight.double().T

    data, scale = convert.quantize_rows(weight, group_size)
    # Codes may differ by one where fp32 rounds a value that lies on a tie, nowhere else.
    off = data.double() != w_codes.round()
    assert off.double().mean() < 1e-4
    assert ((data.double() - w_codes).abs() < 0.501).all()
    torch.testing.assert_close(scale.double(), w_scales, rtol=2e-6, atol=0)

    from comfy_kitchen.tensor import QuantizedTensor, TensorWiseINT8Layout

    params = TensorWiseINT8Layout.Params(
        scale=scale, orig_dtype=weight.dtype, orig_shape=(n, k), convrot=True, convrot_groupsize=group_size
    )
    layer = QuantizedTensor(data, "TensorWiseINT8Layout", params)
    result = torch.nn.functional.linear(x, layer)
    assert difference(result, expected) < 1e-3
    error = difference(result, exact)
    print(f"group {group_size:3}, outliers {outliers!s:5}: relative error {error:.4f}")
    assert error == pytest.approx(difference(expected, exact), rel=0.02)
    assert error == pytest.approx(TABLE[group_size, outliers], rel=0.1)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_row_chunks_give_the_bits_of_the_whole(
    comfy: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    convert = comfy.pack_module("kernels_glue.quantization.convert")
    weight = torch.randn((300, 1024), generator=torch.Generator().manual_seed(2)).to(dtype)
    job = convert.Job("layer", 256, lambda: weight, torch.bfloat16)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        done = convert.quantize_jobs([job], torch.device("cpu"), lambda: None)["layer"]
        return done.data, done.scale

    whole = run()
    for rows in (5, 7, 128):  # 7 and 128 do not divide 300
        monkeypatch.setattr(convert, "CHUNK_BYTES", rows * 1024 * dtype.itemsize)
        chunked = run()
        assert torch.equal(chunked[0], whole[0]) and torch.equal(chunked[1], whole[1]), rows
    codes, scales = checks.int8_rows(checks.rotated(weight.float(), 256))
    assert ((whole[0].double() - codes).abs() < 0.501).all()
    torch.testing.assert_close(whole[1].double(), scales, rtol=2e-6, atol=0)


MEMORY_PROBE = """
import sys
import torch
from comfyui import inprocess

convert = inprocess.pack_module("kernels_glue.quantization.convert")

def peak():
    # Not ru_maxrss on Linux: there a process begins with the peak of the one that started it.
    if sys.platform == "linux":
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    if sys.platform == "win32":
        import psutil
        return psutil.Process().memory_info().peak_wset
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

rows, columns, layers = 28672, 5376, 2
# One touched weight for all layers: the model's own memory is not what is measured.
weight = torch.linspace(-1, 1, columns).to(torch.bfloat16).expand(rows, columns).contiguous()
convert.quantize_jobs([convert.Job("warm", 16, lambda: weight[:64], torch.bfloat16)],
                      torch.device("cpu"), lambda: None)
before = peak()
jobs = (convert.Job(str(i), 16, lambda: weight, torch.bfloat16) for i in range(layers))
results = convert.quantize_jobs(jobs, torch.device("cpu"), lambda: None)
result = sum(r.data.nbytes + r.scale.nbytes for r in results.values())
print(result, peak() - before)
"""


def test_quantizing_the_largest_layers_of_h3_needs_less_than_1_gib_beside_the_result() -> None:
    """Two layers of 28672 x 5376 in a process of its own; group 16 needs the same memory as 256."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result, extra = map(int, done.stdout.split()[-2:])
    print(f"result {result / 2**20:.0f} MiB, peak beside it {(extra - result) / 2**20:.0f} MiB")
    assert result == 2 * (28672 * 5376 + 28672 * 4)
    # The lower bound says that something was measured: a kernel short of memory takes cold pages away.
    assert 0.2 * result < extra < result + 2**30
