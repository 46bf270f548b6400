"""Several branches of one loader, of which some are quantized: none of them changes another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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
    quantize,
    quantize_showing,
)

pytestmark = pytest.mark.core

MakeTiny = Callable[..., TinyModel]
Lora = Callable[[Any, str], Any]


@pytest.fixture(autouse=True)
def as_in_a_node() -> Iterator[None]:
    """ComfyUI's executor runs nodes, loaders and samplers under inference mode."""
    with torch.inference_mode():
        yield


def sample(comfy: ModuleType, patcher: Any, model: TinyModel) -> torch.Tensor:
    return comfy.sample(patcher, model, steps=1)


def weights_of(patcher: Any) -> dict[str, torch.Tensor]:
    """Copies of all weights as they were loaded, whatever is patched in at the moment."""
    return {key: patches[0][0].clone() for key, patches in patcher.get_key_patches().items()}


# --- the branch without the node ------------------------------------------------------------------


@pytest.fixture(scope="module")
def loras(tiny: MakeTiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """loras(family): two LoRA files, `plain` and `int8`, on layers that the node quantizes."""

    def write(family: str) -> dict[str, Path]:
        folder = tmp_path_factory.mktemp("loras")
        paths = {name: folder / f"{family}_{name}.safetensors" for name in ("plain", "int8")}
        builders.write_lora(paths["plain"], tiny(family), LORA_A[family])
        builders.write_lora(paths["int8"], tiny(family), (*LORA_A[family], *LORA_B[family]), seed=12)
        return paths

    return write


@pytest.mark.parametrize("lora", ["none", "plain", "int8"])
@pytest.mark.parametrize("family", DITS)
def test_the_plain_branch_keeps_the_bits_it_has_alone(
    comfy: ModuleType, tiny: MakeTiny, loras: Callable[[str], dict[str, Path]], family: str, lora: str
) -> None:
    model = tiny(family)
    paths = loras(family)

    def branches(source: Any) -> tuple[Any, Callable[[], Any]]:
        plain = comfy.apply_lora(source, paths["plain"], 1.0) if lora == "plain" else source

        def int8() -> Any:
            quantized, _ = quantize(comfy, source)
            return comfy.apply_lora(quantized, paths["int8"], 1.0) if lora == "int8" else quantized

        return plain, int8

    alone_plain, _ = branches(comfy.load_unet(model.path))
    plain_bits = sample(comfy, alone_plain, model)
    _, alone_int8 = branches(comfy.load_unet(model.path))
    int8_bits = sample(comfy, alone_int8(), model)
    assert difference(int8_bits, plain_bits) > 1e-4

    for order in ("plain first", "int8 first"):
        comfy.unload_all()
        source = comfy.load_unet(model.path)
        plain, make_int8 = branches(source)
        if order == "plain first":
            # The node then reads weights into which a LoRA may be patched at that moment.
            assert torch.equal(sample(comfy, plain, model), plain_bits)
        int8 = make_int8()
        assert torch.equal(sample(comfy, int8, model), int8_bits), order
        assert torch.equal(sample(comfy, plain, model), plain_bits), order
        assert torch.equal(sample(comfy, int8, model), int8_bits), order
        comfy.unload_all()
        assert torch.equal(sample(comfy, plain, model), plain_bits), order
        assert torch.equal(sample(comfy, int8, model), int8_bits), order


@pytest.mark.parametrize("setting", ["keep", "bake"])
def test_the_source_weights_are_untouched(
    comfy: ModuleType, tiny: MakeTiny, loras: Callable[[str], dict[str, Path]], setting: str
) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    before, classes = weights_of(source), {n: type(m) for n, m in source.model.named_modules()}
    options, patches = repr(source.model_options), dict(source.patches)
    patched = comfy.apply_lora(source, loras("wan")["int8"], 1.0)
    quantized, _ = quantize(comfy, patched, lora=setting)
    sample(comfy, quantized, model)
    after = weights_of(source)
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    assert {n: type(m) for n, m in source.model.named_modules()} == classes
    assert (repr(source.model_options), source.patches) == (options, patches)


# --- two quantized branches -----------------------------------------------------------------------

VARIANTS = ({"group_size": "256"}, {"group_size": "16", "layers": "all"}, {"ignored_layers": "blocks.0"})


def test_two_quantized_branches_give_the_bits_they_have_alone(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    alone = []
    for settings in VARIANTS:
        alone.append(sample(comfy, quantize(comfy, comfy.load_unet(model.path), **settings)[0], model))
    assert all(difference(a, b) > 1e-4 for a, b in itertools.combinations(alone, 2))

    source = comfy.load_unet(model.path)
    quantized = [
        quantize(comfy, source, unique_id=str(index), **settings)[0]
        for index, settings in enumerate(VARIANTS)
    ]
    for _ in range(2):
        for patcher, bits in zip(quantized, alone, strict=True):
            assert torch.equal(sample(comfy, patcher, model), bits)


# --- the node twice -------------------------------------------------------------------------------


def test_twice_equals_once_with_the_later_settings(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    first, _ = quantize(comfy, comfy.load_unet(model.path))
    twice, report = quantize(comfy, first, unique_id="2", layers="all")
    once, once_report = quantize(comfy, comfy.load_unet(model.path), layers="all")
    assert int8_layers(twice) == int8_layers(once) and len(int8_layers(first)) < len(int8_layers(once))
    assert torch.equal(sample(comfy, twice, model), sample(comfy, once, model))
    already, after = len(int8_layers(first)), len(int8_layers(once))
    total = once_report.splitlines()[0].removeprefix(f"quantized {after} of ")
    expected = f"quantized {after - already} of {total} ({already} were already INT8)"
    assert report.splitlines()[0] == expected
    assert "had no effect" not in report


def test_settings_without_effect_are_named_one_by_one(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    first, _ = quantize(comfy, comfy.load_unet(model.path), group_size="256", layers="all")
    bits = sample(comfy, first, model)

    def remarks(**settings: str) -> list[str]:
        again, report = quantize(comfy, first, unique_id="2", **settings)
        assert again.model is first.model and torch.equal(sample(comfy, again, model), bits)
        assert "the model passes through" in report.splitlines()[0]
        return [line for line in report.splitlines() if line.startswith("note: ")]

    assert remarks() == []
    expected = {
        "group_size": "64",
        "layers": "all",
        "ignored_layers": "blocks.0",
        "lora": "bake",
        "device": "cpu",
    }
    for name, value in expected.items():
        [line] = remarks(**{name: value})
        assert name in line and value in line and "no effect" in line
    assert len(remarks(**expected)) == len(expected)
    assert remarks(group_size="256") == []


def test_each_of_two_nodes_shows_only_its_own_text(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    earlier: list[str] = []
    later: list[str] = []
    first, _ = quantize_showing(comfy, comfy.load_unet(model.path), earlier.append)
    twice, _ = quantize_showing(comfy, first, later.append)
    sample(comfy, twice, model)
    assert not earlier and "the model passes through" in later[-1]
    sample(comfy, first, model)
    assert len(later) == 1 and earlier and "passes through" not in earlier[-1]


# --- in the server --------------------------------------------------------------------------------


def test_branches_of_one_graph_in_the_server(comfy: ModuleType, server: ComfyServer, tiny: MakeTiny) -> None:
    """One prompt with three samplers; then the node bypassed; then muted.

    The browser resolves both modes before it posts a graph: it leaves the node out, and a bypassed
    node's consumers are linked to its input, while those of a muted one lose theirs.
    """
    model = tiny("wan")
    server.add_model(model)
    plain_bits = comfy.sample(comfy.load_unet(model.path), model)
    int8_bits = [
        comfy.sample(quantize(comfy, comfy.load_unet(model.path), **settings)[0], model)
        for settings in VARIANTS[:2]
    ]

    def with_branches(name: str) -> graphs.Graph:
        graph = graphs.sampling_graph(model, save_as=f"{name}_plain")
        for index, settings in enumerate(VARIANTS[:2]):
            graph[f"int8_{index}"] = graphs.node(NODE_ID, model=["unet", 0], **{**DEFAULTS, **settings})
            sampler = {**graph["sampler"]["inputs"], "model": [f"int8_{index}", 0]}
            graph[f"sampler_{index}"] = graphs.node("KSampler", **sampler)
            graph[f"save_{index}"] = graphs.node(
                "TestSaveLatent", samples=[f"sampler_{index}", 0], filename=f"{name}_{index}"
            )
        return graph

    result = server.run(with_branches("both")).raise_for_errors()
    assert torch.equal(server.latent("both_plain"), plain_bits)
    for index, bits in enumerate(int8_bits):
        assert torch.equal(server.latent(f"both_{index}"), bits)
    for index in range(2):
        assert "quantized" in result.texts_of(f"int8_{index}")[0]

    bypassed = with_branches("bypassed")
    del bypassed["int8_0"]
    bypassed["sampler_0"]["inputs"]["model"] = ["unet", 0]
    result = server.run(bypassed).raise_for_errors()
    assert torch.equal(server.latent("bypassed_plain"), plain_bits)
    assert torch.equal(server.latent("bypassed_0"), plain_bits)
    assert torch.equal(server.latent("bypassed_1"), int8_bits[1])
    assert not result.texts_of("int8_0")

    muted = with_branches("muted")
    del muted["int8_0"]
    del muted["sampler_0"]["inputs"]["model"]
    result = server.run(muted).raise_for_errors()
    assert "sampler_0" not in result.executed
    assert torch.equal(server.latent("muted_plain"), plain_bits)
    assert torch.equal(server.latent("muted_1"), int8_bits[1])
