"""The node on a real GPU: tiny models and four blocks at MiniMax-H3's width, with room for all of the
weights and for half of them. Run with dynamic VRAM and without: `python tools/dev.py test --gpu`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui.builders import TinyModel
from comfyui.lora import write_lora
from int8_node import LORA_A, LORA_B, difference, int8_layers, quantize, static

pytestmark = pytest.mark.gpu

MIB, GIB = 2**20, 2**30
# Wan in fp16: core loads an INT8 Wan file in fp16, whatever the dtype it was saved from.
MODELS = {
    "wan": ("wan", {"dtype": torch.float16}),
    "h3": ("h3", {}),
    "flux": ("flux", {}),
    "h3_wide": (
        "h3",
        {
            "hidden_size": 5376,
            "num_layers": 4,
            "num_attention_heads": 56,
            "ffn_hidden_size": 14336,
            "time_embed_dim": 64,
        },
    ),
}
LORA_TOLERANCE = 0.03


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tiny: Callable[..., TinyModel]) -> TinyModel:
    family, arguments = MODELS[request.param]
    return tiny(family, **arguments)


@pytest.fixture(params=["room for all", "room for half"])
def room(request: pytest.FixtureRequest, comfy: ModuleType) -> Callable[[Any], Any]:
    """room(patcher): context in which `patcher` is sampled with all or half of its weights resident."""
    return _all_of if request.param == "room for all" else lambda patcher: _half_of(comfy, patcher)


@pytest.fixture(autouse=True)
def unloaded(comfy: ModuleType) -> Iterator[None]:
    yield
    comfy.unload_all()


@contextmanager
def _all_of(patcher: Any) -> Iterator[Any]:
    yield patcher


@contextmanager
def _half_of(comfy: ModuleType, patcher: Any) -> Iterator[Any]:
    half = patcher.model_size() // 2
    if not patcher.is_dynamic():
        comfy.load_partially(patcher, half)
        yield patcher
        assert patcher.loaded_size() <= half
        return
    if patcher.model_size() < 256 * MIB:
        pytest.skip("dynamic VRAM pages by larger units than half of a tiny model")
    comfy.unload_all()
    # What stays free beside half of the weights is for activations and core's cast buffers.
    ballast = _fill_vram_up_to(half + 640 * MIB)
    try:
        yield patcher
        assert patcher.loaded_size() < patcher.model_size()
    finally:
        del ballast
        torch.cuda.empty_cache()


def _fill_vram_up_to(free: int) -> list[torch.Tensor]:
    available, _ = torch.cuda.mem_get_info()
    pieces, wanted = [], available - free
    while wanted > GIB:
        pieces.append(torch.empty(min(wanted, 8 * GIB), dtype=torch.uint8, device="cuda"))
        wanted -= pieces[-1].nbytes
    return pieces


def _lora(tmp_path: Path, model: TinyModel, layers: dict[str, tuple[str, ...]], seed: int) -> Path:
    path = tmp_path / f"lora_{seed}.safetensors"
    write_lora(path, model, layers=layers[model.family], seed=seed)
    return path


def test_the_node_changes_little_and_repeats_its_bits(
    comfy: ModuleType, model: TinyModel, room: Callable[[Any], Any]
) -> None:
    source = comfy.load_unet(model.path)
    plain = comfy.sample(source, model)
    quantized, _ = quantize(comfy, source)
    with room(quantized) as patcher:
        first, second = comfy.sample(patcher, model), comfy.sample(patcher, model)
    assert torch.equal(first, second)
    assert 0 < difference(first, plain) < 0.03


@pytest.mark.parametrize("where", ["after", "before, keep", "before, bake"])
def test_a_lora_does_what_it_does_to_the_unquantized_model(
    comfy: ModuleType, model: TinyModel, room: Callable[[Any], Any], tmp_path: Path, where: str
) -> None:
    lora = _lora(tmp_path, model, LORA_A, seed=1)
    source = comfy.load_unet(model.path)
    plain = comfy.sample(source, model)
    with_lora = comfy.apply_lora(source, lora, 1.0)
    expected = comfy.sample(with_lora, model)
    assert difference(expected, plain) >= 0.05
    if where == "after":
        patched = comfy.apply_lora(quantize(comfy, source)[0], lora, 1.0)
    else:
        patched, _ = quantize(comfy, with_lora, lora=where.removeprefix("before, "))
    with room(patched) as patcher:
        assert difference(comfy.sample(patcher, model), expected) < LORA_TOLERANCE


def test_two_models_with_a_lora_each_keep_theirs_when_they_alternate(
    comfy: ModuleType, model: TinyModel, room: Callable[[Any], Any], tmp_path: Path
) -> None:
    a = comfy.apply_lora(
        quantize(comfy, comfy.load_unet(model.path))[0], _lora(tmp_path, model, LORA_A, 1), 1.0
    )
    b = comfy.apply_lora(
        quantize(comfy, comfy.load_unet(model.path))[0], _lora(tmp_path, model, LORA_B, 2), 1.0
    )
    with room(a):
        first = comfy.sample(a, model)
        other = comfy.sample(b, model)
        assert torch.equal(comfy.sample(a, model), first)
    assert difference(other, first) > 0.05


def test_the_unquantized_branch_keeps_its_bits(
    comfy: ModuleType, model: TinyModel, room: Callable[[Any], Any]
) -> None:
    alone = comfy.sample(comfy.load_unet(model.path), model)
    source = comfy.load_unet(model.path)
    quantized, _ = quantize(comfy, source)
    with room(quantized):
        before = comfy.sample(quantized, model)
        assert torch.equal(comfy.sample(source, model), alone)
        assert torch.equal(comfy.sample(quantized, model), before)
    comfy.unload_all()
    assert torch.equal(comfy.sample(source, model), alone)


def test_a_saved_and_reloaded_model_gives_the_same_bits(
    comfy: ModuleType, model: TinyModel, room: Callable[[Any], Any], tmp_path: Path
) -> None:
    quantized, _ = quantize(comfy, comfy.load_unet(model.path))
    reloaded = comfy.load_unet(_save(quantized, tmp_path))
    comfy.unload_all()
    expected = comfy.sample(quantized, model)
    _put_back_fp32(reloaded, quantized)
    with room(reloaded) as patcher:
        assert torch.equal(comfy.sample(patcher, model), expected)


def test_a_copy_without_dynamic_vram_gives_the_same_bits(comfy: ModuleType, model: TinyModel) -> None:
    quantized, _ = quantize(comfy, comfy.load_unet(model.path))
    expected = comfy.sample(quantized, model)
    assert torch.equal(comfy.sample(static(quantized), model), expected)


def test_each_int8_layer_runs_int8_linear_and_nothing_dequantizes(
    comfy: ModuleType, model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, _ = quantize(comfy, comfy.load_unet(model.path))
    patched = comfy.apply_lora(quantized, _lora(tmp_path, model, LORA_A, 1), 1.0)
    comfy.sample(patched, model)  # bakes the LoRA, which dequantizes
    calls = _count_kernels(monkeypatch)
    comfy.sample(patched, model, steps=2)
    refiner = [name for name in int8_layers(patched) if name.startswith("token_refiner.")]
    per_step = len(int8_layers(patched)) - len(refiner)
    assert calls["int8_linear"] >= 2 * per_step + len(refiner)
    assert not [name for name, count in calls.items() if "dequantize" in name and count]


def test_gpu_and_cpu_quantize_to_neighbouring_codes(
    comfy: ModuleType, tiny: Callable[..., TinyModel]
) -> None:
    path = tiny("flux").path
    on_gpu, _ = quantize(comfy, comfy.load_unet(path))
    on_cpu, _ = quantize(comfy, comfy.load_unet(path), device="cpu")
    for name in int8_layers(on_gpu):
        a = on_gpu.model.diffusion_model.get_submodule(name).weight._qdata
        b = on_cpu.model.diffusion_model.get_submodule(name).weight._qdata
        assert (a.cpu().int() - b.cpu().int()).abs().max() <= 1


@pytest.mark.parametrize("group_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_odd_sizes_compute_the_right_product(
    comfy: ModuleType, group_size: int, dtype: torch.dtype
) -> None:
    from comfy.quant_ops import QuantizedTensor

    wrong = []
    for rows in (1, 3, 96, 97, 127, 128, 300):
        for n in (1, 2, 3, 5, 8, 12, 30, 100):
            for k in (group_size, 3 * group_size):
                weight = torch.randn(n, k, device="cuda", dtype=dtype)
                bias = torch.randn(n, device="cuda", dtype=dtype)
                x = torch.randn(rows, k, device="cuda", dtype=dtype)
                exact = x.double() @ weight.double().T + bias.double()
                quantized = QuantizedTensor.from_float(
                    weight,
                    "TensorWiseINT8Layout",
                    per_channel=True,
                    convrot=True,
                    convrot_groupsize=group_size,
                )
                try:
                    error = difference(torch.nn.functional.linear(x, quantized, bias), exact)
                except RuntimeError as reason:
                    error = str(reason).splitlines()[0]
                if not isinstance(error, float) or not error < 0.1:
                    wrong.append((rows, n, k, error))
    assert not wrong, wrong[:20]


def test_rows_are_quantized_alike_in_chunks_and_whole(comfy: ModuleType) -> None:
    convert = comfy.pack_module("kernels_glue.quantization.convert")
    weight = torch.randn(28672, 5376, dtype=torch.bfloat16, device="cuda").cpu()
    job = convert.Job("layer", 256, lambda: weight, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    streamed = convert.quantize_jobs([job], torch.device("cuda"), lambda: None)["layer"]
    assert torch.cuda.max_memory_allocated() - start < 2 * GIB
    gc.collect()
    assert torch.cuda.memory_allocated() == start
    data, scale = convert.quantize_rows(weight.cuda(), 256)
    assert torch.equal(streamed.data, data.cpu())
    assert torch.equal(streamed.scale, scale.cpu())


def test_memory_returns_to_the_start(comfy: ModuleType, model: TinyModel) -> None:
    comfy.unload_all()
    start = torch.cuda.memory_allocated()
    quantized, _ = quantize(comfy, comfy.load_unet(model.path))
    comfy.sample(quantized, model)
    del quantized
    comfy.unload_all()
    assert torch.cuda.memory_allocated() - start < 16 * MIB


def _save(patcher: Any, folder: Path) -> Path:
    from comfy_extras.nodes_model_merging import save_checkpoint

    with torch.inference_mode():
        save_checkpoint(patcher, filename_prefix="saved", output_dir=str(folder))
    return next(folder.glob("saved*.safetensors"))


def _put_back_fp32(reloaded: Any, quantized: Any) -> None:
    """What core does not do: layers that the model keeps in fp32 come out of a quantized file in bf16."""
    weights = quantized.model.diffusion_model
    for name, module in reloaded.model.diffusion_model.named_modules():
        for part in ("weight", "bias"):
            ours = getattr(weights.get_submodule(name), part, None)
            if isinstance(ours, torch.Tensor) and ours.dtype == torch.float32:
                with torch.inference_mode():
                    kept = torch.nn.Parameter(ours.detach().cpu().clone(), requires_grad=False)
                setattr(module, part, kept)
                # What dynamic VRAM casts it to when it is faulted in.
                setattr(module, f"{part}_comfy_model_dtype", torch.float32)


def _count_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the calls of comfy_kitchen's INT8 functions, which go on doing their work."""
    from comfy_kitchen.registry import registry

    calls: dict[str, int] = {}
    for backend in registry._backends.values():
        for name in [n for n in dir(backend) if "int8" in n and callable(getattr(backend, n))]:
            real = getattr(backend, name)

            def counted(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
                calls[_name] = calls.get(_name, 0) + 1
                return _real(*args, **kwargs)

            monkeypatch.setattr(backend, name, counted)
    return calls
