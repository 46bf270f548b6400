"""The errors of single layers: of the right size, on the same inputs, wherever the weights are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from comfyui import builders, inprocess
from comfyui.builders import TinyModel
from compare_node import STEPS, compare, hook_count, inputs
from int8_node import LORA_A, int8_layers, load_some, quantize, static
from offload_node import budget_for, offload, placed
from sol_node import SHORT, patch

pytestmark = pytest.mark.usefixtures("inference")

MakeTiny = Callable[..., TinyModel]

layers = inprocess.pack_module("kernels_glue.compare.layers")

# A layer of each family whose weight scales are spoiled; core reads that of H3 past its `forward`.
SPOILED = {"wan": "blocks.1.ffn.2", "h3": "blocks.0.mlp.fc2", "flux": "single_blocks.1.linear2"}


def errors(found: Any, kind: str = "int8") -> dict[str, float]:
    return {layer.name: layer.error for layer in found.layers if layer.kind == kind}


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "h3", "flux"])
def test_a_spoiled_layer_is_found_first(comfy: ModuleType, tiny: MakeTiny, family: str) -> None:
    model = tiny(family)
    int8 = quantize(comfy, comfy_model := comfy.load_unet(model.path))[0]
    name = SPOILED[family]
    given = inputs(comfy, model)
    *_, good = compare(int8, comfy_model, given, layers=True)
    spoil(int8, name, 1.5)
    *_, found = compare(int8, comfy_model, given, layers=True)
    assert found.remarks == ()
    assert set(errors(found)) == set(int8_layers(int8))
    assert found.layers[0].name == name and found.layers[0].calls == STEPS
    # All of its output is 1.5 times what it was, but for the bias.
    assert found.layers[0].error == pytest.approx(0.5, abs=0.01)
    others = {other: error for other, error in errors(found).items() if other != name}
    # The reference's inputs: what the spoiled layer hands on does not reach them.
    assert others == {other: error for other, error in errors(good).items() if other != name}
    assert min(errors(good).values()) > 0.005 and max(errors(good).values()) < 0.02
    assert not errors(compare(int8, comfy_model, given)[2])


def spoil(patcher: Any, name: str, factor: float) -> None:
    patcher.model.diffusion_model.get_submodule(name).weight._params.scale.mul_(factor)


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "h3"])
def test_the_same_while_blocks_are_streamed(comfy: ModuleType, tiny: MakeTiny, family: str) -> None:
    model = tiny(family, num_layers=4)
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source)[0]
    given = inputs(comfy, model)
    *_, expected = compare(int8, source, given, layers=True)
    streamed = offload(int8, late=True, vram_budget_gb=budget_for(int8, 1))[0]
    *_, found = compare(streamed, source, given, layers=True)
    assert errors(found) == errors(expected)
    assert found.final.psnr == expected.final.psnr
    # And the other way round: the reference is streamed.
    plain = offload(source, late=True, vram_budget_gb=budget_for(source, 1))[0]
    *_, found = compare(int8, plain, given, layers=True)
    assert errors(found) == errors(expected)


@pytest.mark.core
def test_a_streamed_layer_is_asked_while_its_weights_are_on_the_device(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU they give the same numbers before and after."""
    model = tiny("wan", num_layers=4)
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source)[0]
    streamed = offload(int8, vram_budget_gb=budget_for(int8, 1))[0]
    running: list[Any] = []
    real = layers.Int8Errors._compute

    def compute(self: Any, layer: Any, rows: Any) -> Any:
        running.append(placed(streamed).streaming._running)
        return real(self, layer, rows)

    monkeypatch.setattr(layers.Int8Errors, "_compute", compute)
    comfy.sample(streamed, model)  # its own hooks are there already
    compare(streamed, source, inputs(comfy, model), layers=True)
    plan = placed(streamed).streaming.plan
    assert len(plan.streamed) == 3
    assert set(running) == {*plan.streamed, None} and running.count(None) == 10 * len(plan.resident)


@pytest.mark.core
def test_one_evaluation_a_step_is_looked_at(comfy: ModuleType, tiny: MakeTiny) -> None:
    """MiniMax-H3 is evaluated apart for the positive and the negative."""
    model = tiny("h3")
    source = comfy.load_unet(model.path)
    patched = quantize(comfy, patch(comfy, source, dense_steps=0, min_tokens=1)[0])[0]
    *_, found = compare(patched, source, inputs(comfy, model, cfg=2.0), layers=True)
    refiner = [layer for layer in found.layers if layer.name.startswith("token_refiner")]
    assert {layer.calls for layer in refiner} == {1}  # the text is refined once, before the first step
    assert {layer.calls for layer in found.layers if layer not in refiner} == {STEPS}


def test_with_lora_whether_it_is_resident_or_not(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("wan")
    builders.write_lora(tmp_path / "a.safetensors", model, LORA_A["wan"])
    source = static(comfy.load_unet(model.path))
    with_lora = comfy.apply_lora(source, tmp_path / "a.safetensors", 0.8)
    int8 = quantize(comfy, with_lora)[0]
    given = inputs(comfy, model)
    *_, found = compare(int8, None, given, layers=True)
    assert set(errors(found)) == set(int8_layers(int8)) and max(errors(found).values()) < 0.02
    # Against the model without the LoRA its layers differ by the LoRA.
    *_, apart = compare(int8, source, given, layers=True)
    assert {name for name, error in errors(apart).items() if error > 0.1} >= set(LORA_A["wan"])
    load_some(comfy, int8, LORA_A["wan"])
    *_, partly = compare(int8, None, given, layers=True)
    assert set(errors(partly)) == set(int8_layers(int8)) and max(errors(partly).values()) < 0.02


def test_layers_outside_of_the_blocks(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("flux")
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source, layers="all")[0]
    *_, found = compare(int8, source, inputs(comfy, model), layers=True)
    outside = {"img_in", "txt_in", "final_layer.linear"}
    assert outside <= set(errors(found)) == set(int8_layers(int8))


@pytest.mark.core
def test_layers_that_could_not_be_looked_at_are_named(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source)[0]
    part = quantize(comfy, source, ignored_layers="blocks.0", unique_id="2")[0]
    *_, found = compare(int8, part, inputs(comfy, model), layers=True)
    assert all(name.startswith("blocks.0.") for name in errors(found)) and len(errors(found)) == 10
    [remark] = found.remarks
    assert remark.startswith("10 INT8 layers could not be looked at (quantized in the reference too, ")
    assert "blocks.1.ffn.0" in remark


@pytest.mark.core
@pytest.mark.parametrize("of_reference", [True, False])
def test_hooks_go_with_the_sampling_however_it_ends(
    comfy: ModuleType, tiny: MakeTiny, of_reference: bool
) -> None:
    from comfy.model_management import InterruptProcessingException

    model = tiny("wan")
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source)[0]
    given = inputs(comfy, model)
    *_, expected = compare(int8, source, given, layers=True)
    before = hook_count(source), hook_count(int8)
    seen: list[int] = []

    def interrupt(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(hook_count(source) + hook_count(int8))
        if len(seen) == 2:
            raise InterruptProcessingException
        return executor(*args, **kwargs)

    pair = [int8, source]
    pair[of_reference] = pair[of_reference].clone()
    pair[of_reference].add_wrapper("diffusion_model", interrupt)
    with pytest.raises(InterruptProcessingException):
        compare(*pair, given, layers=True)
    assert min(seen) > sum(before)
    assert (hook_count(source), hook_count(int8)) == before
    *_, again = compare(int8, source, given, layers=True)
    assert again.layers == expected.layers


# --- attention -----------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """q, k, v [B, T, H, D], the options and the result of each call of the Sol kernel."""
    provider = inprocess.pack_module("kernels_glue.attention.providers").PROVIDERS["reference"]
    real, seen = provider.run, []

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any) -> Any:
        result = real(q, k, v, options)
        seen.append((q.clone(), k.clone(), v.clone(), options, result.out.clone()))
        return result

    monkeypatch.setattr(provider, "run", run)
    yield seen


def exact_rows(call: tuple[Any, ...], rows: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(what the kernel made, exact attention) of evenly spaced rows, in float64 by numpy."""
    q, k, v, options, out = (x.double().numpy() if isinstance(x, torch.Tensor) else x for x in call)
    index = numpy.round(numpy.linspace(0, q.shape[1] - 1, rows)).astype(int)
    scores = numpy.einsum("bqhd,bkhd->bhqk", q[:, index], k) * options.scale
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return out[:, index], numpy.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.core
def test_sparse_attention_against_numpy(
    comfy: ModuleType, tiny: MakeTiny, calls: list[tuple[Any, ...]]
) -> None:
    model = tiny("wan")
    patched = patch(comfy, comfy.load_unet(model.path), dense_steps=1, dense_layers="")[0]
    given = inputs(comfy, model, **SHORT["wan"])
    *_, found = compare(patched, None, given, layers=True)
    assert len(calls) == 2 * (STEPS - 1)
    expected: dict[str, list[float]] = {"0": [], "1": []}
    for index, call in enumerate(calls):
        made, exact = exact_rows(call, layers.QUERY_ROWS)
        expected[str(index % 2)].append(numpy.linalg.norm(made - exact) / numpy.linalg.norm(exact))
    assert {layer.name: layer.calls for layer in found.layers} == {"0": 2, "1": 2}
    for name, error in errors(found, "attention").items():
        assert error == pytest.approx(numpy.mean(expected[name]), rel=1e-3)
        assert error > 0.05


@pytest.mark.core
@pytest.mark.parametrize("family", ["h3", "flux"])
def test_attention_of_joint_sequences(comfy: ModuleType, tiny: MakeTiny, family: str) -> None:
    """A dense layer and the text's own blocks are not among them."""
    model = tiny(family)
    patched = patch(comfy, comfy.load_unet(model.path), dense_steps=1, min_tokens=1)[0]
    *_, found = compare(patched, None, inputs(comfy, model, steps=2), layers=True)
    assert set(errors(found, "attention")) == ({"1"} if family == "h3" else {"1", "2", "3"})


@pytest.mark.core
def test_a_quantized_dense_backend(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = inprocess.pack_module("kernels_glue.attention.dense")
    sdpa = inprocess.pack_module("kernels_glue.attention.dense.sdpa")
    result = inprocess.pack_module("kernels_glue.attention.dense.base").DenseResult
    backend = dense.BACKENDS["kitchen_int8"]
    monkeypatch.setattr(backend, "missing", lambda device: "")
    monkeypatch.setattr(backend, "unfit", lambda call: "")
    monkeypatch.setattr(backend, "run", lambda call: result(sdpa.plain(call) * 1.02, "double"))
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    for name, kinds in (("kitchen_int8", {"dense attention"}), ("fa", set())):
        patched = patch(comfy, source, dense_backend=name, dense_percent=1.0)[0]
        *_, found = compare(patched, None, inputs(comfy, model), layers=True)
        assert {layer.kind for layer in found.layers} == kinds
        for error in errors(found, "dense attention").values():
            assert error == pytest.approx(0.02, rel=1e-3)
    assert found.remarks[0].startswith("no layer was looked at: the model has no INT8 layer")


def test_looking_changes_no_bits(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("h3")
    source = comfy.load_unet(model.path)  # a graph keeps what its nodes made
    patched = quantize(comfy, patch(comfy, source, min_tokens=1, dense_steps=1)[0])[0]
    given = inputs(comfy, model)
    plain, looked = (compare(patched, None, given, layers=value) for value in (False, True))
    for one, other in zip(plain[:2], looked[:2], strict=True):
        assert torch.equal(comfy.flatten_latent(one["samples"]), comfy.flatten_latent(other["samples"]))


def test_a_reference_whose_part_of_that_name_is_no_linear_layer() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.LayerNorm(4), "b": torch.nn.Linear(4, 4)})
    rows = layers.ReferenceRows(("a", "b", "c"), {0})
    with rows.watching(model):
        model["b"](model["a"](torch.ones(3, 4)))
    assert set(rows.found) == {"b"}


# --- decisions -----------------------------------------------------------------------------------


def test_where_to_look() -> None:
    assert layers.looked_at(20) == {0, 10, 19}
    assert layers.looked_at(1) == {0} and layers.looked_at(2) == {0, 1}
    assert layers.evenly_spaced(5, 8, torch.device("cpu")).tolist() == [0, 1, 2, 3, 4]
    spaced = layers.evenly_spaced(75_001, 64, torch.device("cpu")).tolist()
    assert spaced[0] == 0 and spaced[-1] == 75_000 and len(set(spaced)) == 64
    assert {b - a for a, b in itertools.pairwise(spaced)} <= {1190, 1191}


def test_rows_fit_into_memory() -> None:
    """MiniMax-H3's 50 blocks have layers of 88,000 inputs and outputs each."""
    assert layers.rows_for([1000] * 10, 3) == layers.MOST_ROWS
    rows = layers.rows_for([88_064] * 50, 3)
    assert layers.LEAST_ROWS < rows < layers.MOST_ROWS
    assert rows * 88_064 * 50 * 3 * 4 <= layers.ROWS_BYTES
    assert layers.rows_for([10**7] * 1000, 3) == layers.LEAST_ROWS
    assert layers.rows_for([], 3) == layers.MOST_ROWS


def test_which_block_a_layer_is_in() -> None:
    names = ["blocks.1.a", "blocks.10.a", "img_in", "blocks.1.b"]
    found = layers.owners(names, [f"blocks.{i}" for i in range(11)])
    assert found == {"blocks.1": ["blocks.1.a", "blocks.1.b"], "blocks.10": ["blocks.10.a"], "": ["img_in"]}


def test_nothing_against_nothing_is_no_error() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert layers._relative(zero, zero).item() == 0
    assert layers._relative(one, one).item() == 0
    assert layers._relative(one, 2 * one).item() == 0.5
    assert math.isinf(layers._relative(one, zero).item())
