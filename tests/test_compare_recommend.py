"""What Kitchen Compare Models proposes can be pasted as it is, and holds when it is run again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import builders, inprocess
from comfyui.builders import TinyModel
from compare_node import compare, hook_count, inputs
from int8_node import LORA_A, int8_layers, quantize
from safetensors.torch import load_file, save_file
from sol_node import patch

MakeTiny = Callable[..., TinyModel]

recommend = inprocess.pack_module("kernels_glue.compare.recommend")
results = inprocess.pack_module("kernels_glue.compare.results")
patterns = inprocess.pack_module("kernels_glue.quantization.patterns")
parse_layers = inprocess.pack_module("kernels_glue.attention.layers").parse_layers


def layer(name: str, error: float, kind: str = "int8") -> Any:
    return results.LayerError(name, kind, error, 3)


# --- which layers --------------------------------------------------------------------------------


def test_layers_stand_out_among_their_kind() -> None:
    int8 = [layer(f"blocks.{i}", 0.01) for i in range(5)]
    worse, bad = layer("blocks.5", 0.0299), layer("blocks.6", 0.031)
    sparse = [layer(str(i), 0.2, "attention") for i in range(5)] + [layer("5", 0.9, "attention")]
    found = [*int8, worse, bad, *sparse]
    assert recommend.standing_out(found) == (sparse[-1], bad)
    assert recommend.ranked(found)[:4] == (sparse[-1], bad, worse, int8[0])
    assert recommend.standing_out([]) == () and recommend.standing_out(int8) == ()


def test_errors_that_are_no_numbers_come_first() -> None:
    odd = [layer("a", float("nan")), layer("b", float("inf"))]
    rest = [layer(f"blocks.{i}", 0.01) for i in range(5)]
    assert recommend.standing_out([*rest, *odd]) == tuple(odd)
    zero = [layer(f"blocks.{i}", 0.0) for i in range(5)]
    assert recommend.standing_out(zero) == ()
    assert recommend.standing_out([*zero, layer("c", 0.1)]) == (layer("c", 0.1),)


NAMES = ("blocks.1.ffn.0", "blocks.10.ffn.0", "a*b", "a?b", "a[0]", "a#b", "a,b", "re:a", "x.", "ein satz")


@pytest.mark.parametrize("current", ["", "blocks.0", "blocks.0, blocks.2 # why\nre:[0-9]x", "blocks.0\n\n"])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_leaves_this_layer_and_no_other(current: str, name: str) -> None:
    text = recommend.ignored_text(current, [name])
    before, after = patterns.parse_patterns(current), patterns.parse_patterns(text)
    assert patterns.first_match(after, name) is not None
    others = [*NAMES, f"{name}x", f"x{name}", "blocks.0.ffn", "blocks.3", "xab", "5x"]
    for other in others:
        if other != name:
            was = patterns.first_match(before, other) is not None
            assert (patterns.first_match(after, other) is not None) == was, other
    assert recommend.ignored_text(text, [name]) == text  # it is there already


@pytest.mark.parametrize(
    ("current", "layers", "text"),
    [
        ("", [3], "3"),
        ("0", [7, 2], "0,2,7"),
        ("0,1,", [1], "0,1"),
        ("0\n-1, 10-12", [20], "0,-1,10-12,20"),
        ("0", [], "0"),
    ],
)
def test_the_text_for_dense_layers(current: str, layers: list[int], text: str) -> None:
    found = recommend.dense_text(current, layers)
    assert found == text
    assert parse_layers(found, 30).layers == parse_layers(current, 30).layers | set(layers)


def test_only_inputs_that_the_model_has() -> None:
    worst = [layer("blocks.1", 1.0), layer("4", 1.0, "attention"), layer("5", 1.0, "dense attention")]
    choice = recommend.Choice
    assert recommend.leaving(choice(1.0, "", "0"), worst) == choice(1.0, "blocks.1", "0,4")
    assert recommend.leaving(choice(None, "", None), worst) == choice(None, "blocks.1", None)
    assert recommend.leaving(choice(1.0, None, "0"), worst) == choice(1.0, None, "0,4")


# --- tau -----------------------------------------------------------------------------------------


def test_tau_comes_in_steps_of_its_widget() -> None:
    above, below = recommend.taus_to_try(1.0, True), recommend.taus_to_try(1.0, False)
    assert above[0] == 1.05 and above[-1] == 3.0 and len(above) == 40
    assert below[0] == 0.0 and below[-1] == 0.95 and len(below) == 20
    assert all(tau == round(tau * 20) / 20 for tau in (*above, *below))
    assert recommend.taus_to_try(0.97, True)[0] == 1.0 and recommend.taus_to_try(0.97, False)[-1] == 0.95
    assert recommend.taus_to_try(5.0, True) == () and recommend.taus_to_try(-1.0, False) == ()


@pytest.mark.parametrize("count", [0, 1, 2, 20, 40])
def test_bisection_finds_the_largest(count: int) -> None:
    for border in range(-1, count):
        asked: list[int] = []

        def keeps(value: int, border: int = border, asked: list[int] = asked) -> bool:
            asked.append(value)
            return value <= border

        assert recommend.largest_kept(range(count), keeps) == (border if border >= 0 else None)
        assert len(asked) == len(set(asked)) <= 6


def test_what_is_found_was_measured_even_where_it_is_not_monotone() -> None:
    for kept in itertools.product((False, True), repeat=5):
        found = recommend.largest_kept(range(5), lambda value, kept=kept: kept[value])
        assert found is None or kept[found]


# --- with models ---------------------------------------------------------------------------------


def with_outlier(model: TinyModel, folder: Path) -> tuple[TinyModel, str]:
    """A model in which INT8 hurts one layer alone, and the name of the layer.

    One of its inputs is always 0, so that the weights for it do nothing: but they are so large that their
    group has no levels left for the others.
    """
    weights = load_file(model.path)
    if model.family == "h3":
        name, first = "blocks.1.mlp.fc2", "blocks.1.mlp.fc1"
        width = weights[f"{first}.weight"].shape[0] // 2
        rows = [3, 3 + width]  # of the gate, and of what it opens
    else:
        name, first, rows = "blocks.1.ffn.2", "blocks.1.ffn.0", [3]
        weights[f"{first}.bias"][rows] = 0.0
    weights[f"{first}.weight"][rows] = 0.0
    weights[f"{name}.weight"][:, 3] = 300.0
    path = folder / f"outlier_{model.family}.safetensors"
    save_file(weights, path)
    return dataclasses.replace(model, path=path), name


@pytest.mark.core
@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("family", ["wan", "h3"])
def test_a_layer_that_int8_hurts(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path, family: str) -> None:
    model, name = with_outlier(tiny(family), tmp_path)
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source, ignored_layers="blocks.9 # none")[0]
    given = inputs(comfy, model)
    *_, first = compare(int8, None, given, layers=True, keep_psnr=45)
    assert first.layers[0].name == name and first.layers[0].error > 0.1 > 5 * first.layers[1].error
    proposed = first.recommendation
    before, tried = proposed.trials
    assert before.psnr == first.final.psnr < 45 < tried.psnr
    assert proposed.chosen == tried and tried.ignored_layers == f"blocks.9 # none\n{name}"
    assert tried.tau is None and tried.dense_layers is None
    # Where the limit is kept already, the layer is not made slower.
    *_, enough = compare(int8, None, given, layers=True, keep_psnr=1)
    assert enough.recommendation.chosen == before and len(enough.recommendation.trials) == 1
    # The user takes it over and runs again.
    again = quantize(comfy, source, ignored_layers=tried.ignored_layers)[0]
    assert name not in int8_layers(again)
    *_, second = compare(again, None, given, layers=True, keep_psnr=45)
    assert second.final.psnr == tried.psnr
    assert second.recommendation.chosen == second.recommendation.trials[0] == tried
    assert len(second.recommendation.trials) == 1
    assert hook_count(source) == 0


@pytest.mark.core
@pytest.mark.usefixtures("inference")
def test_the_largest_tau(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> None:
    """Sol and INT8 with LoRA before and after, from a tau on either side."""
    model = tiny("wan")
    builders.write_lora(tmp_path / "a.safetensors", model, LORA_A["wan"])
    source = comfy.load_unet(model.path)
    with_lora = comfy.apply_lora(source, tmp_path / "a.safetensors", 0.5)
    given = inputs(comfy, model, steps=1, width=160, height=160, length=9)

    def build(tau: float) -> Any:
        int8 = quantize(comfy, with_lora)[0]
        sol = patch(comfy, int8, tau=tau, dense_steps=0, dense_layers="")[0]
        return comfy.apply_lora(sol, tmp_path / "a.safetensors", 0.3)

    psnr = {tau: compare(build(tau), None, given)[2].final.psnr for tau in (0.3, 1.5)}
    limit = (psnr[0.3] + psnr[1.5]) / 2
    assert psnr[0.3] > limit > psnr[1.5]
    chosen = []
    for tau in (0.3, 1.5):
        *_, found = compare(build(tau), None, given, keep_psnr=limit)
        proposed = found.recommendation
        assert proposed.trials[0].psnr == psnr[tau] and 4 <= len(proposed.trials) <= 7
        assert all(trial.ignored_layers == "" == trial.dense_layers for trial in proposed.trials)
        assert proposed.chosen.psnr >= limit
        measured = {trial.tau: trial.psnr for trial in proposed.trials}
        assert measured[round(proposed.chosen.tau + 0.05, 2)] < limit
        chosen.append(proposed.chosen)
        assert any("`layers` is off" in remark for remark in proposed.remarks)
    for trial in chosen:
        *_, again = compare(build(trial.tau), None, given)
        assert again.final.psnr == trial.psnr


@pytest.mark.usefixtures("inference")
def test_a_limit_that_nothing_keeps(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = inprocess.pack_module("kernels_glue.compare.metrics")
    real, scored = metrics.structural_similarity, []
    monkeypatch.setattr(metrics, "structural_similarity", lambda *args: scored.append(1) or real(*args))
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    given = inputs(comfy, model, steps=1)
    patched = patch(comfy, quantize(comfy, source)[0], dense_steps=0, min_tokens=1, dense_layers="")[0]
    *_, found = compare(patched, None, given, keep_psnr=100.0)
    proposed = found.recommendation
    assert proposed.chosen is None and proposed.trials
    assert len(scored) == 1  # of many frames it takes longer than the sampling, and a trial needs none
    best = max(trial.psnr for trial in proposed.trials)
    assert f"no setting that was tried keeps it; the best has {best:.2f} dB" in proposed.remarks


@pytest.mark.core
@pytest.mark.usefixtures("inference")
def test_what_the_model_does_not_have(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    given = inputs(comfy, model, steps=1)
    *_, found = compare(source, None, given, keep_psnr=30.0)
    assert found.recommendation == results.Recommendation(
        30.0, (), None, ("the model has neither INT8 nor Sol of this pack",)
    )
    dense = patch(comfy, source, dense_percent=1.0)[0]
    *_, found = compare(dense, None, given, keep_psnr=30.0)
    assert len(found.recommendation.trials) == 1
    assert "no attention was sparse, so tau changed nothing and was not searched" in (
        found.recommendation.remarks
    )
    *_, found = compare(dense, None, given)
    assert found.recommendation is None


REFUSED = inprocess.pack_module("kernels_glue.errors").KitchenSolError("Node", "tau is odd.", "Take another.")


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (REFUSED, "Node: tau is odd. Take another."),
        (torch.cuda.OutOfMemoryError("no room\nfor it"), "OutOfMemoryError: no room"),
        (RuntimeError("a bug"), None),
    ],
)
def test_what_stops_a_trial_costs_the_recommendation_alone(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str | None
) -> None:
    search = inprocess.pack_module("kernels_glue.compare.search")

    def stop(*_: Any) -> None:
        raise error

    monkeypatch.setattr(search, "apply_settings", stop)
    model = tiny("wan")
    patched = patch(comfy, source := comfy.load_unet(model.path), dense_steps=0, min_tokens=1)[0]
    given = inputs(comfy, model, steps=1)
    if why is None:  # what nobody expects is not hidden
        with pytest.raises(RuntimeError, match="a bug"):
            compare(patched, source, given, keep_psnr=30.0)
        return
    *_, found = compare(patched, source, given, keep_psnr=30.0)
    assert found.recommendation is None and found.final.psnr > 30
    assert found.remarks == (f"no recommendation: {why}",)


@pytest.mark.usefixtures("inference")
def test_no_model_of_a_trial_stays(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> None:
    import gc

    from comfy.model_base import BaseModel

    def count() -> int:
        gc.collect()
        return sum(issubclass(type(found), BaseModel) for found in gc.get_objects())

    model, _ = with_outlier(tiny("wan"), tmp_path)
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source)[0]
    given = inputs(comfy, model, steps=1)
    compare(int8, None, given)
    before = count()
    *_, found = compare(int8, None, given, layers=True, keep_psnr=45)
    assert len(found.recommendation.trials) == 2
    assert count() == before
    assert torch.equal(
        compare(int8, None, given)[0]["samples"],
        compare(quantize(comfy, source)[0], None, given)[0]["samples"],
    )
