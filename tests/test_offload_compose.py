"""Layerwise Offload among other nodes: each does its work in any order, and the bits are those without it."""

from __future__ import annotations

import importlib
import itertools
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui.builders import TinyModel
from comfyui.lora import write_lora
from comfyui.weights import random_tensor
from int8_node import LORA_A, difference, int8_layers, quantize, static
from offload_node import bits, offload, placed, same
from sol_node import patch as sol
from sol_node import spy_on

MakeTiny = Callable[..., TinyModel]
Change = Callable[[Any], Any]
# At least four main blocks each.
SMALL: dict[str, dict[str, int]] = {
    "wan": {"dim": 128, "ffn_dim": 128, "num_layers": 4},
    "vace": {"dim": 128, "ffn_dim": 128, "num_layers": 4, "vace_layers": 2},
    "h3": {"num_layers": 4},
    "flux": {},
    "z_image": {"n_layers": 4},
    "lumina2": {"n_layers": 4},
}
SETTINGS = {"resident_blocks": 1, "vram_budget_gb": 64.0, "strategy": "stream"}


@pytest.fixture(autouse=True)
def inference(comfy: ModuleType) -> Iterator[None]:
    """ComfyUI's executor runs nodes, loaders and samplers under inference mode."""
    with torch.inference_mode():
        yield
        comfy.unload_all()


@pytest.fixture
def load(comfy: ModuleType, tiny: MakeTiny) -> Callable[[str], tuple[Any, TinyModel]]:
    """load(family) -> (source, tiny model)."""

    def make(family: str) -> tuple[Any, TinyModel]:
        model = tiny(family, **SMALL[family])
        return static(comfy.load_unet(model.path)), model

    return make


def streamed_blocks(patcher: Any) -> int:
    """How many blocks of a patcher stream, all but one, when it was just sampled."""
    streaming = placed(patcher).streaming
    assert len(streaming.plan.resident) == 1 and streaming.traffic.copies > len(streaming.plan.streamed) > 2
    return len(streaming.plan.streamed)


def compare(comfy: ModuleType, source: Any, model: TinyModel, change: Change, **sampling: Any) -> None:
    """`change` and `sampling` have an effect, and before and after the node it is core's own, to the bit."""
    latent = {"length": sampling["length"]} if "length" in sampling else {}
    before = bits(source)
    plain = comfy.sample(source, model, **latent)
    expected = comfy.sample(change(source), model, **sampling)
    assert not torch.equal(expected, plain)
    for order in ("change, node", "node, change"):
        comfy.unload_all()
        if order == "change, node":
            streamed, *_ = offload(change(source), late=True, **SETTINGS)
        else:
            streamed = change(offload(source, **SETTINGS)[0])
        assert torch.equal(comfy.sample(streamed, model, **sampling), expected), order
        streamed_blocks(streamed)
    comfy.unload_all()
    assert same(bits(source), before)
    assert torch.equal(comfy.sample(source, model, **latent), plain)


def unchanged(patcher: Any) -> Any:
    return patcher


# --- the pack's own nodes ---------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "h3"])
def test_all_orders_of_the_three_nodes(
    comfy: ModuleType, load: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = load(family)
    latent = {"wan": {"width": 160, "height": 160, "length": 9}, "h3": {"width": 256, "height": 256}}[family]
    nodes: dict[str, Change] = {
        "INT8": lambda patcher: quantize(comfy, patcher)[0],
        "Sol": lambda patcher: sol(comfy, patcher, dense_steps=1, dense_layers="", min_tokens=0)[0],
        "Offload": lambda patcher: offload(patcher, **SETTINGS)[0],
    }
    spy = spy_on(monkeypatch)
    dense = comfy.sample(nodes["INT8"](source), model, **latent)
    spy.calls.clear()
    expected = comfy.sample(nodes["Sol"](nodes["INT8"](source)), model, **latent)
    sparse = spy.count
    assert sparse and not torch.equal(expected, dense)
    for order in itertools.permutations(nodes):
        comfy.unload_all()
        patcher = source
        for name in order:
            patcher = nodes[name](patcher)
        spy.calls.clear()
        assert torch.equal(comfy.sample(patcher, model, **latent), expected), order
        assert spy.count == sparse
        streamed_blocks(patcher)
        # What streams are the INT8 weights, whoever was first.
        assert int8_layers(patcher)
        for block in placed(patcher).streaming.blocks:
            weights = sum(p.numel() for p in block.module.parameters() if p.ndim == 2)
            assert block.bytes < 1.5 * weights < 2 * weights


# --- what other nodes do ------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", ["h3", "wan"])
def test_two_conditions_and_several_evaluations_a_step(comfy: ModuleType, load: Any, family: str) -> None:
    source, model = load(family)
    compare(comfy, source, model, unchanged, cfg=3.0, negative=True, sampler="dpmpp_sde", steps=2)


@pytest.mark.core
@pytest.mark.parametrize("family", ["h3", "flux", "wan"])
def test_skipped_layers(comfy: ModuleType, load: Any, family: str) -> None:
    """The condition is evaluated a second time in each step without two of the blocks."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    source, model = load(family)
    settings = {"double_layers": "1", "single_layers": "0", "scale": 3.0, "rescaling_scale": 0.0}
    settings |= {"start_percent": 0.0, "end_percent": 1.0}

    def change(patcher: Any) -> Any:
        return comfy.run_node(SkipLayerGuidanceDiT, model=patcher, **settings)[0]

    compare(comfy, source, model, change, cfg=3.0, negative=True)


@pytest.mark.core
def test_repeated_and_reordered_blocks(comfy: ModuleType, load: Any) -> None:
    """Blocks that another node runs twice: the order that was learned first does not hold."""
    source, model = load("wan")

    def again(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        return extra["original_block"]({**args, "img": out["img"] * 0.5})

    def change(patcher: Any) -> Any:
        clone = patcher.clone()
        for block in (0, 3):
            clone.set_model_patch_replace(again, "dit", "double_block", block)
        return clone

    compare(comfy, source, model, change)


@pytest.mark.core
def test_context_windows(comfy: ModuleType, load: Any) -> None:
    module = importlib.import_module("comfy_extras.nodes_context_windows")
    source, model = load("wan")
    windows = {"context_length": 5, "context_overlap": 4, "context_schedule": "standard_static"}
    windows |= {"context_stride": 1, "closed_loop": False, "fuse_method": "pyramid", "freenoise": True}

    def change(patcher: Any) -> Any:
        return comfy.run_node(module.WanContextWindowsManualNode, model=patcher, **windows)[0]

    compare(comfy, source, model, change, length=13)


@pytest.mark.core
def test_wan_vace(comfy: ModuleType, load: Any) -> None:
    import node_helpers

    source, model = load("vace")
    [shape] = model.latent_shapes
    # What WanVaceToVideo adds, without the VAE that it encodes the frames with.
    frames = random_tensor("frames", torch.Size((1, 32, *shape[2:])), seed=1) * 5
    values = {"vace_frames": [frames], "vace_mask": [torch.ones((1, 64, *shape[2:]))], "vace_strength": [1.0]}
    positive = node_helpers.conditioning_set_values(comfy.conditioning(model), values, append=True)
    compare(comfy, source, model, unchanged, positive=positive)
    streamed, report, _ = offload(source, **SETTINGS)
    assert "blocks 4" in report and "vace_blocks 2" in report
    comfy.sample(streamed, model, positive=positive)
    assert streamed_blocks(streamed) == 5


@pytest.mark.core
@pytest.mark.parametrize("family", ["z_image", "lumina2", "flux", "h3"])
def test_blocks_in_several_lists(comfy: ModuleType, load: Any, family: str) -> None:
    """Refiners, which H3 runs before the first evaluation, and double and single blocks."""
    names = {
        "z_image": ("layers", "noise_refiner", "context_refiner"),
        "lumina2": ("layers", "noise_refiner", "context_refiner"),
        "flux": ("double_blocks", "single_blocks"),
        "h3": ("blocks", "token_refiner.blocks"),
    }[family]
    source, model = load(family)
    expected = comfy.sample(source, model)
    comfy.unload_all()
    streamed, report, _ = offload(source, **SETTINGS)
    assert torch.equal(comfy.sample(streamed, model), expected)
    lists = [source.model.diffusion_model.get_submodule(name) for name in names]
    assert streamed_blocks(streamed) == sum(map(len, lists)) - 1
    assert all(f"{name} {len(blocks)}" in report for name, blocks in zip(names, lists, strict=True))
    running = {block.module for block in placed(streamed).streaming.blocks}
    assert running == {block for blocks in lists for block in blocks}


@pytest.mark.core
def test_compute_dtype(comfy: ModuleType, load: Any) -> None:
    """Core casts the weights at every call then; it asks for that by a mark on each layer."""
    from comfy_extras.nodes_model_advanced import ModelComputeDtype

    source, model = load("h3")

    def change(patcher: Any) -> Any:
        return ModelComputeDtype().patch(patcher, "bf16")[0]

    compare(comfy, source, model, change)


@pytest.mark.core
def test_object_patches(comfy: ModuleType, load: Any) -> None:
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    source, model = load("wan")

    def change(patcher: Any) -> Any:
        clone = ModelSamplingSD3().patch(patcher, shift=9.0)[0]
        norm = clone.get_model_object("diffusion_model.blocks.2.norm1")
        clone.add_object_patch(
            "diffusion_model.blocks.2.norm1.forward", lambda x: 0.5 * type(norm).forward(norm, x)
        )
        return clone

    compare(comfy, source, model, change)


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "h3"])
def test_a_lora_in_bypass_mode(comfy: ModuleType, load: Any, tmp_path: Path, family: str) -> None:
    import comfy.utils

    loaders = pytest.importorskip("comfy.sd")
    if not hasattr(loaders, "load_bypass_lora_for_models"):
        pytest.skip("this ComfyUI has no bypass mode")
    source, model = load(family)
    write_lora(tmp_path / "lora.safetensors", model, LORA_A[family])
    weights = comfy.utils.load_torch_file(str(tmp_path / "lora.safetensors"))

    def change(patcher: Any) -> Any:
        return loaders.load_bypass_lora_for_models(patcher, None, weights, 1.0, 0.0)[0]

    compare(comfy, source, model, change)


# --- torch.compile ------------------------------------------------------------------------------------


@pytest.mark.skipif(
    sys.platform == "win32" or not (shutil.which("g++") or shutil.which("clang++")),
    reason="torch.compile needs a C++ compiler",
)
@pytest.mark.parametrize("order", ["compile, node", "node, compile"])
def test_torch_compile(comfy: ModuleType, load: Any, order: str) -> None:
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    def compiled(patcher: Any) -> Any:
        return comfy.run_node(TorchCompileModel, model=patcher, backend="inductor")[0]

    torch._dynamo.reset()
    source, model = load("wan")
    expected = comfy.sample(source, model, steps=2)
    comfy.unload_all()
    torch._dynamo.utils.counters.clear()
    if order == "compile, node":
        patcher, *_ = offload(compiled(source), **SETTINGS)
    else:
        patcher = compiled(offload(source, **SETTINGS)[0])
    result = comfy.sample(patcher, model, steps=2)
    torch._dynamo.reset()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it was compiled at all
    assert difference(result, expected) < 1e-4
    streamed_blocks(patcher)
    assert torch.equal(comfy.sample(source, model, steps=2), expected)
