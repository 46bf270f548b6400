"""LoRA on quantized models: before and after the node, several, resident or not, and what is reported.

Expected weights come from the LoRA files and the model file in fp64; ComfyUI only samples the
unquantized file that holds them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import builders, graphs
from comfyui.builders import TinyModel
from comfyui.server import ComfyServer
from int8_node import (
    DEFAULTS,
    DITS,
    LORA_A,
    LORA_B,
    NODE_ID,
    difference,
    int8_layers,
    load_some,
    merged_file,
    quantize,
    quantize_showing,
    static,
)
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.core

MakeTiny = Callable[..., TinyModel]

# A LoRA must move the samples by 5% to prove anything; the quantized run may be off by 3%.
MOVES, CLOSE = 0.05, 0.03


@pytest.fixture(autouse=True)
def as_in_a_node() -> Iterator[None]:
    """ComfyUI's executor runs nodes, loaders and samplers under inference mode."""
    with torch.inference_mode():
        yield


class Bench:
    """One model and its two LoRA files: samples with INT8 and what they should be."""

    def __init__(self, comfy: ModuleType, model: TinyModel, folder: Path) -> None:
        self.comfy, self.model, self.folder = comfy, model, folder
        self.base = comfy.load_unet(model.path)
        self.paths = {name: folder / f"{name}.safetensors" for name in "ab"}
        family = model.family
        self.factors = {
            # alpha is not the rank, so that a forgotten alpha / rank shows.
            "a": builders.write_lora(self.paths["a"], model, LORA_A[family], alpha=8.0),
            "b": builders.write_lora(self.paths["b"], model, LORA_B[family], rank=8, alpha=4.0, seed=12),
        }

    def sample(self, patcher: Any) -> torch.Tensor:
        return self.comfy.sample(patcher, self.model, steps=2)

    @cached_property
    def plain(self) -> torch.Tensor:
        return self.sample(self.base)

    def with_loras(self, patcher: Any, *loras: tuple[str, float]) -> Any:
        for name, strength in loras:
            patcher = self.comfy.apply_lora(patcher, self.paths[name], strength)
        return patcher

    def expected(self, *loras: tuple[str, float]) -> torch.Tensor:
        merged = [(self.factors[name], strength) for name, strength in loras]
        path = merged_file(self.folder / "merged.safetensors", self.model, merged)
        return self.sample(self.comfy.load_unet(path))


@pytest.fixture(scope="module")
def bench(
    comfy: ModuleType, tiny: MakeTiny, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Bench]:
    """bench(family, **arguments of its write function): one Bench for each model."""
    made: dict[tuple[Any, ...], Bench] = {}

    def make(family: str = "wan", **arguments: Any) -> Bench:
        key = (family, *sorted(arguments.items()))
        if key not in made:
            made[key] = Bench(comfy, tiny(family, **arguments), tmp_path_factory.mktemp("lora"))
        return made[key]

    return make


# --- values ---------------------------------------------------------------------------------------


def test_resident_and_offloaded_linear_give_the_fp64_product(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path
) -> None:
    model, layer = tiny("wan"), "blocks.0.self_attn.q"
    path = tmp_path / "lora.safetensors"
    up, down, alpha = builders.write_lora(path, model, [layer], rank=4)[layer]
    weights = load_file(str(model.path))
    exact_weight = weights[f"{layer}.weight"].double() + alpha / 4 * up.double() @ down.double()
    assert exact_weight.shape == (256, 256) and difference(exact_weight, weights[f"{layer}.weight"]) > 0.5

    patcher = comfy.apply_lora(static(quantize(comfy, comfy.load_unet(model.path))[0]), path, 1.0)
    linear = patcher.model.diffusion_model.get_submodule(layer)
    x = torch.randn((64, 256), generator=torch.Generator().manual_seed(1))
    x = x.to(patcher.load_device, patcher.model.get_dtype_inference())
    exact = x.cpu().double() @ exact_weight.T + weights[f"{layer}.bias"].double()

    def output() -> torch.Tensor:
        assert layer in int8_layers(patcher)
        return linear(x).cpu()

    import comfy.model_management as management

    management.load_models_gpu([patcher], force_full_load=True)
    assert not linear.weight_function
    assert difference(output(), exact) < 0.02
    comfy.load_partially(patcher, 0)
    assert linear.weight_function, "the layer must be one that was left out"
    assert difference(output(), exact) < 0.02
    comfy.unload_all()
    without_lora = exact - x.cpu().double() @ (alpha / 4 * up.double() @ down.double()).T
    assert difference(output(), without_lora) < 0.02, "unloading takes the LoRA out again"


# (before the node, its `lora` setting, after the node)
PLACEMENTS = {
    "before, kept": ([("a", 1.0)], "keep", []),
    "before, baked": ([("a", 1.0)], "bake", []),
    "after": ([], "keep", [("a", 1.0)]),
    "one before, kept, one after": ([("a", 1.0)], "keep", [("b", 1.0)]),
    "one before, baked, one after": ([("a", 1.0)], "bake", [("b", 1.0)]),
    "both on the same layers": ([("a", 1.0)], "bake", [("a", 1.0)]),
    "strength 0.5": ([("a", 0.5)], "bake", [("b", 0.5)]),
    "strength -1": ([("a", -1.0)], "keep", [("b", -1.0)]),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", DITS)
def test_samples_match_the_fp64_weights(bench: Callable[..., Bench], family: str, placement: str) -> None:
    case = bench(family)
    before, setting, after = PLACEMENTS[placement]
    quantized, _ = quantize(case.comfy, case.with_loras(case.base, *before), lora=setting)
    got = case.sample(case.with_loras(quantized, *after))
    expected = case.expected(*before, *after)
    assert difference(expected, case.plain) > MOVES
    assert difference(got, expected) < CLOSE


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Change the tensors of a LoRA file in place; its path."""
    tensors = load_file(str(path))
    change(tensors)
    save_file(tensors, str(path))
    return path


def test_a_lora_without_alpha_has_scale_one(bench: Callable[..., Bench], tmp_path: Path) -> None:
    case = bench()
    path = tmp_path / "no_alpha.safetensors"
    factors = builders.write_lora(path, case.model, LORA_A["wan"], rank=4, alpha=8.0, size=2.0)
    rewritten(path, lambda tensors: [tensors.pop(key) for key in list(tensors) if key.endswith(".alpha")])
    unscaled = {layer: (up, down, 4.0) for layer, (up, down, _) in factors.items()}
    expected = case.sample(
        case.comfy.load_unet(merged_file(tmp_path / "m.safetensors", case.model, [(unscaled, 1.0)]))
    )
    assert difference(expected, case.plain) > MOVES
    for setting in ("keep", "bake"):
        patched = case.comfy.apply_lora(case.base, path, 1.0)
        got = case.sample(quantize(case.comfy, patched, lora=setting)[0])
        assert difference(got, expected) < CLOSE, setting


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("setting", ["keep", "bake", "after"])
def test_full_differences_of_weight_and_bias_are_applied(
    bench: Callable[..., Bench], tmp_path: Path, setting: str, resident: bool
) -> None:
    case, layer, strength = bench(), "blocks.0.ffn.2", 0.5
    generator = torch.Generator().manual_seed(5)
    changes = {
        "weight": torch.randn((256, 512), generator=generator) / 22,
        "bias": torch.randn(256, generator=generator),
    }
    keys = {"weight": "diff", "bias": "diff_b"}
    path = tmp_path / "diff.safetensors"
    save_file({f"diffusion_model.{layer}.{keys[part]}": t for part, t in changes.items()}, str(path))

    def expected(*parts: str) -> torch.Tensor:
        extra = {f"{layer}.{part}": strength * changes[part].double() for part in parts}
        merged = merged_file(tmp_path / "merged.safetensors", case.model, [], extra)
        return case.sample(case.comfy.load_unet(merged))

    only_weight, both = expected("weight"), expected("weight", "bias")
    assert difference(only_weight, case.plain) > MOVES and difference(both, only_weight) > MOVES
    if setting == "after":
        patcher = case.comfy.apply_lora(quantize(case.comfy, case.base)[0], path, strength)
    else:
        patcher = quantize(case.comfy, case.comfy.apply_lora(case.base, path, strength), lora=setting)[0]
    if not resident:
        patcher = static(patcher)
        case.comfy.load_partially(patcher, 0)
    assert difference(case.sample(patcher), both) < CLOSE


def test_bake_leaves_the_lora_of_int8_layers_as_patches(bench: Callable[..., Bench]) -> None:
    case = bench()
    inside, outside = LORA_A["wan"][:3], LORA_A["wan"][3:]
    half, _ = quantize(case.comfy, case.base, ignored_layers="blocks.1")
    texts: list[str] = []
    patched = case.with_loras(half, ("a", 1.0))
    both, report = quantize_showing(case.comfy, patched, texts.append, lora="bake")
    assert set(both.patches) == {f"diffusion_model.{layer}.weight" for layer in inside}
    assert set(inside) | set(outside) <= set(int8_layers(both))
    assert "LoRA: merged into 1 weights before quantizing" in report.splitlines()
    expected = case.expected(("a", 1.0))
    assert difference(expected, case.plain) > MOVES
    assert difference(case.sample(both), expected) < CLOSE
    assert "LoRA patches: 3 on INT8 layers, 0 on other layers" in texts[-1].splitlines()


# --- the second run -------------------------------------------------------------------------------


@pytest.mark.parametrize("unload", [False, True], ids=["kept loaded", "unloaded between"])
@pytest.mark.parametrize("partly", [False, True], ids=["resident", "partly loaded"])
def test_a_second_run_after_another_model_is_bit_equal(
    bench: Callable[..., Bench], partly: bool, unload: bool
) -> None:
    case, other = bench("flux"), bench("flux", seed=1)
    loras = (("a", 1.0), ("b", 1.0))

    def with_lora(on: Bench) -> Any:
        patcher = on.with_loras(static(quantize(on.comfy, on.base)[0]), *loras)
        if partly:
            load_some(on.comfy, patcher, LORA_A["flux"] + LORA_B["flux"])
        return patcher

    a, b = with_lora(case), with_lora(other)
    first = case.sample(a)
    layers = [a.model.diffusion_model.get_submodule(name) for name in LORA_A["flux"] + LORA_B["flux"]]
    assert {bool(layer.weight_function) for layer in layers} == ({True, False} if partly else {False})
    assert difference(first, case.plain) > MOVES
    between = other.sample(b)
    if unload:
        case.comfy.unload_all()
    assert torch.equal(case.sample(a), first)
    assert torch.equal(other.sample(b), between)
    assert difference(between, other.plain) > MOVES
    assert difference(first, case.expected(*loras)) < CLOSE


def test_the_lora_of_one_clone_does_not_reach_another(bench: Callable[..., Bench]) -> None:
    case = bench()
    quantized, _ = quantize(case.comfy, case.base)
    alone = case.sample(quantized)
    with_a, with_b = (case.with_loras(quantized, (name, 1.0)) for name in "ab")
    a, b = case.sample(with_a), case.sample(with_b)
    assert difference(a, b) > MOVES and difference(a, alone) > MOVES
    assert torch.equal(case.sample(quantized), alone)
    assert torch.equal(case.sample(with_a), a) and torch.equal(case.sample(with_b), b)


# --- what is reported -----------------------------------------------------------------------------


def test_a_doubled_key_prefix_binds_nothing_and_the_text_says_so(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    case = bench()
    path = tmp_path / "doubled.safetensors"
    builders.write_lora(path, case.model, LORA_A["wan"], prefix="diffusion_model.diffusion_model.")
    texts: list[str] = []
    quantized, _ = quantize_showing(case.comfy, case.base, texts.append)
    patched = case.comfy.apply_lora(quantized, path, 1.0)
    assert not patched.patches
    assert torch.equal(case.sample(patched), case.sample(quantized))
    assert "LoRA: none attached" in texts[-1].splitlines() and "WARNING" not in texts[-1]


@pytest.mark.parametrize("family, layer", [("wan", "time_embedding.0"), ("flux", "img_in")])
def test_a_lora_that_misses_every_int8_layer_is_warned_about(
    bench: Callable[..., Bench], tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, layer: str
) -> None:
    case = bench(family)
    path = tmp_path / "outside.safetensors"
    builders.write_lora(path, case.model, [layer])
    texts: list[str] = []
    quantized, _ = quantize_showing(case.comfy, case.base, texts.append)
    patched = case.comfy.apply_lora(quantized, path, 1.0)
    with caplog.at_level(logging.INFO):
        case.sample(patched)
    warning = "WARNING: a LoRA is attached, but none of its patches reaches an INT8 layer"
    assert texts[-1].splitlines()[1:3] == ["LoRA patches: 0 on INT8 layers, 1 on other layers", warning]
    warned = [record for record in caplog.records if warning in record.getMessage()]
    assert warned and all(record.levelno == logging.WARNING for record in warned)


def test_the_counts_are_those_of_the_lora_files(bench: Callable[..., Bench], tmp_path: Path) -> None:
    case = bench()
    outside = tmp_path / "outside.safetensors"
    builders.write_lora(outside, case.model, ["time_embedding.0", "head.head", LORA_A["wan"][0]])
    texts: list[str] = []
    before = case.with_loras(case.base, ("a", 1.0), ("b", 1.0))
    quantized, report = quantize_showing(case.comfy, before, texts.append)
    assert "LoRA patches: 7 on INT8 layers, 0 on other layers" in report.splitlines()
    patched = case.comfy.apply_lora(quantized, outside, 1.0)
    case.sample(patched)
    # 4 of the first, 3 of the second, and 1 that is on the same layer as one of the first.
    assert texts[-1].splitlines()[1] == "LoRA patches: 8 on INT8 layers, 2 on other layers"
    assert texts[-1].startswith(report.splitlines()[0])


def test_the_server_shows_the_counts_on_the_node(
    server: ComfyServer, bench: Callable[..., Bench], tmp_path: Path
) -> None:
    case = bench()
    outside, doubled = tmp_path / "server_outside.safetensors", tmp_path / "server_doubled.safetensors"
    builders.write_lora(outside, case.model, ["time_embedding.0", "head.head"])
    builders.write_lora(doubled, case.model, LORA_A["wan"], prefix="diffusion_model.diffusion_model.")
    server.add_model(case.model)
    names = {"inside": server.add_lora(case.paths["b"])}
    names |= {"outside": server.add_lora(outside), "doubled": server.add_lora(doubled)}

    def last_text(before: list[tuple[str, float]], after: list[tuple[str, float]]) -> list[str]:
        def loaders(chosen: list[tuple[str, float]]) -> list[tuple[str, dict[str, Any]]]:
            return [
                ("LoraLoaderModelOnly", {"lora_name": names[name], "strength_model": strength})
                for name, strength in chosen
            ]

        chain = [*loaders(before), (NODE_ID, DEFAULTS), *loaders(after)]
        graph = graphs.sampling_graph(case.model, model_nodes=chain, steps=1, save_as="lora_texts")
        result = server.run(graph).raise_for_errors()
        text = result.texts_of(f"model_{len(before) + 1}")[-1]
        return [line.rstrip() for line in text.splitlines()]

    inside, other = ("inside", 1.0), ("outside", 1.0)
    assert last_text([inside], [])[1] == "LoRA patches: 3 on INT8 layers, 0 on other layers"
    assert last_text([inside], [inside, other])[1] == "LoRA patches: 6 on INT8 layers, 2 on other layers"
    # Now the node is cached and only the sampler runs again: its text comes again all the same.
    assert last_text([inside], [other])[1] == "LoRA patches: 3 on INT8 layers, 2 on other layers"
    assert last_text([], [("doubled", 1.0)])[1] == "LoRA: none attached"
    assert last_text([], [other])[2].startswith("WARNING: a LoRA is attached, but none of its patches")
    assert "WARNING" in server.log()
