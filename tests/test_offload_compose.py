"""Layerwise Offload among other nodes: each does its work in any order, and the bits are those without it."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui.builders import TinyModel
from comfyui.lora import write_lora
from comfyui.weights import random_tensor
from int8_node import LORA_A, int8_layers, quantize, static
from offload_node import bits, budget_for, offload, placed, same, sizes
from sol_node import patch as sol
from sol_node import spy_on

MakeTiny = Callable[..., TinyModel]
Change = Callable[[Any], Any]
# Four main blocks or more; two where each takes seconds.
SMALL: dict[str, dict[str, int]] = {
    "wan": {"dim": 128, "ffn_dim": 128, "num_layers": 4},
    "shallow wan": {"dim": 128, "ffn_dim": 128, "num_layers": 2},
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
        model = tiny(family.removeprefix("shallow "), **SMALL[family])
        return static(comfy.load_unet(model.path)), model

    return make


def unload() -> None:
    """Core's button without the collection of garbage, which takes longer than all the rest here."""
    import comfy.model_management

    comfy.model_management.unload_all_models()


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
        unload()
        if order == "change, node":
            streamed, *_ = offload(change(source), late=True, **SETTINGS)
        else:
            streamed = change(offload(source, **SETTINGS)[0])
        assert torch.equal(comfy.sample(streamed, model, **sampling), expected), order
        streamed_blocks(streamed)
    unload()
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
    # Some 200 tokens, which are four blocks of Sol's.
    latent = {"wan": {"width": 160, "height": 160, "length": 5}, "h3": {"width": 256, "height": 256}}[family]
    nodes: dict[str, Change] = {
        "INT8": lambda patcher: quantize(comfy, patcher)[0],
        "Sol": lambda patcher: sol(comfy, patcher, dense_steps=1, dense_layers="", min_tokens=0)[0],
        "Offload": lambda patcher: offload(patcher, **SETTINGS)[0],
    }
    unquantized = sizes(source).blocks
    latent |= {"steps": 2}
    spy = spy_on(monkeypatch)
    dense = comfy.sample(nodes["INT8"](source), model, **latent)
    spy.calls.clear()
    expected = comfy.sample(nodes["Sol"](nodes["INT8"](source)), model, **latent)
    sparse = spy.count
    assert sparse and not torch.equal(expected, dense)
    for order in itertools.permutations(nodes):
        unload()
        patcher = source
        for name in order:
            patcher = nodes[name](patcher)
        spy.calls.clear()
        assert torch.equal(comfy.sample(patcher, model, **latent), expected), order
        assert spy.count == sparse
        streamed_blocks(patcher)
        # What streams are the INT8 weights, whoever was first.
        assert int8_layers(patcher)
        found = [block.bytes for block in placed(patcher).streaming.blocks]
        assert all(int8 < 0.8 * full for int8, full in zip(found, unquantized, strict=True))


def test_applied_twice_the_later_settings_win(comfy: ModuleType, load: Any) -> None:
    source, model = load("wan")
    expected = comfy.sample(source, model)
    unload()
    first, _, earlier = offload(source, **{**SETTINGS, "resident_blocks": 3})
    twice, _, later = offload(first.clone(), **SETTINGS)
    assert torch.equal(comfy.sample(twice, model), expected)
    assert (len(earlier), len(later)) == (0, 1) and streamed_blocks(twice) == 3
    # The first application, which another branch may use, is as it was.
    assert torch.equal(comfy.sample(first, model), expected)
    assert (len(earlier), len(later)) == (1, 1) and len(placed(first).streaming.plan.resident) == 3
    assert torch.equal(comfy.sample(twice, model), expected) and streamed_blocks(twice) == 3


def test_branches_with_different_settings(comfy: ModuleType, load: Any) -> None:
    source, model = load("wan")
    before, expected = bits(source), comfy.sample(source, model)
    unload()
    branches = {
        n: offload(source, resident_blocks=n, prefetch_blocks=2, vram_budget_gb=64) for n in (0, 3, 4)
    }
    for resident in (0, 3, 4, 0, 4, 3, 0):
        patcher, _, texts = branches[resident]
        assert torch.equal(comfy.sample(patcher, model), expected)
        plan = placed(patcher).streaming.plan
        assert (len(plan.resident), plan.slots) == (resident, min(3, 4 - resident))
        assert ("all 4 blocks resident" if resident == 4 else f"{resident} resident") in texts[-1]
    unload()
    assert same(bits(source), before)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_text_tells_the_truth(comfy: ModuleType, load: Any, prefetch: int) -> None:
    source, model = load("wan")
    patcher, _, texts = offload(source, **SETTINGS, prefetch_blocks=prefetch)
    comfy.sample(patcher, model, steps=5)
    block, outside, mib = max(sizes(source).blocks), sizes(source).outside, 2**20
    slabs = prefetch + 1
    # Three blocks go through fewer slabs, which are full again at the end; or they stay in three.
    copies = 3 if slabs == 3 else 5 * 3 + slabs
    assert placed(patcher).streaming.traffic.misses == 1, "only what runs first was not copied ahead"
    [text] = texts
    lines = text.splitlines()
    assert lines[0] == "streaming: 3 of 4 blocks, 1 resident (budget 64.00 GiB)"
    assert lines[1].startswith(f"copied {copies * block / 5 / mib:.2f} MiB a step; ")
    device = outside + (1 + slabs) * block
    assert lines[2].startswith(
        f"device: weights {device / mib:.2f} MiB (slabs {slabs * block / mib:.2f} MiB); "
    )
    assert lines[3].startswith("strategy stream: ")


def test_refusals(comfy: ModuleType, load: Any, tiny: MakeTiny) -> None:
    source, model = load("wan")
    expected = comfy.sample(source, model)
    with pytest.raises(ValueError, match=r"strategy is 'core'.*loaded without it\. Choose stream or auto"):
        offload(source, vram_budget_gb=64.0, strategy="core")
    with pytest.raises(ValueError, match=r"no repeated transformer blocks.*not UNets such as SDXL"):
        offload(comfy.load_unet(tiny("sdxl").path))
    for wanted in (3, 4):  # three need a slab as well
        with pytest.raises(ValueError, match=rf"resident_blocks is {wanted}, which needs .* budget is"):
            offload(source, resident_blocks=wanted, vram_budget_gb=budget_for(source, 3, slots=0))
    with pytest.raises(ValueError, match=r"the budget is .* needs at least"):
        offload(source, vram_budget_gb=budget_for(source, 0) - 1e-5)
    assert torch.equal(comfy.sample(source, model), expected)


# --- what other nodes do ------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", ["h3", "wan"])
def test_two_conditions_and_several_evaluations_a_step(comfy: ModuleType, load: Any, family: str) -> None:
    source, model = load(family)
    compare(comfy, source, model, unchanged, cfg=3.0, negative=True, sampler="dpmpp_sde", steps=2)


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
    unload()
    streamed, report, _ = offload(source, **SETTINGS)
    assert "blocks 4" in report and "vace_blocks 2" in report
    comfy.sample(streamed, model, positive=positive)
    assert streamed_blocks(streamed) == 5


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
    unload()
    streamed, report, _ = offload(source, **SETTINGS)
    assert torch.equal(comfy.sample(streamed, model), expected)
    lists = [source.model.diffusion_model.get_submodule(name) for name in names]
    assert streamed_blocks(streamed) == sum(map(len, lists)) - 1
    assert all(f"{name} {len(blocks)}" in report for name, blocks in zip(names, lists, strict=True))
    running = {block.module for block in placed(streamed).streaming.blocks}
    assert running == {block for blocks in lists for block in blocks}


def test_compute_dtype(comfy: ModuleType, load: Any) -> None:
    """Core casts the weights at every call then; it asks for that by a mark on each layer."""
    from comfy_extras.nodes_model_advanced import ModelComputeDtype

    source, model = load("h3")

    def change(patcher: Any) -> Any:
        return ModelComputeDtype().patch(patcher, "bf16")[0]

    compare(comfy, source, model, change)


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


@pytest.mark.parametrize("family", ["wan", "h3"])
def test_a_lora_in_bypass_mode(comfy: ModuleType, load: Any, tmp_path: Path, family: str) -> None:
    from comfy.utils import load_torch_file

    loaders = importlib.import_module("comfy.sd")
    if not hasattr(loaders, "load_bypass_lora_for_models"):
        pytest.skip("this ComfyUI has no bypass mode")
    source, model = load(family)
    write_lora(tmp_path / "lora.safetensors", model, LORA_A[family])
    weights = load_torch_file(str(tmp_path / "lora.safetensors"))

    def change(patcher: Any) -> Any:
        return loaders.load_bypass_lora_for_models(patcher, None, weights, 1.0, 0.0)[0]

    compare(comfy, source, model, change)


# --- torch.compile ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "whole"), [("compile, node", False), ("node, compile", True)])
def test_torch_compile(comfy: ModuleType, load: Any, order: str, whole: bool) -> None:
    """As core's TorchCompileModel does it, but for the backend: without one the bits stay the same."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    source, model = load("shallow wan")
    keys = ["diffusion_model"] if whole else [f"diffusion_model.blocks.{i}" for i in range(2)]

    def compiled(patcher: Any) -> Any:
        clone = patcher.clone(disable_dynamic=True)
        set_torch_compile_wrapper(model=clone, backend="eager", keys=keys)
        return clone

    before = bits(source)
    expected = comfy.sample(source, model)
    unload()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = {"resident_blocks": 0, "vram_budget_gb": 64.0, "prefetch_blocks": 0}
    if order == "compile, node":
        patcher, *_ = offload(compiled(source), **settings)
    else:
        patcher = compiled(offload(source, **settings)[0])
    result = comfy.sample(patcher, model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it was compiled at all
    assert torch.equal(result, expected)
    assert placed(patcher).streaming.traffic.copies == 3 * 2 + 1
    torch._dynamo.reset()
    unload()
    assert same(bits(source), before)
    assert torch.equal(comfy.sample(source, model), expected)
