"""What a recommendation does where results are no numbers, the source is gone, or nothing helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import builders, inprocess
from comfyui.builders import TinyModel
from compare_node import compare, inputs
from int8_node import LORA_A, quantize
from sol_node import patch

pytestmark = pytest.mark.usefixtures("inference")

MakeTiny = Callable[..., TinyModel]

layers = inprocess.pack_module("kernels_glue.compare.layers")
recommend = inprocess.pack_module("kernels_glue.compare.recommend")
results = inprocess.pack_module("kernels_glue.compare.results")
Search = inprocess.pack_module("kernels_glue.compare.search").Search
applied = inprocess.pack_module("kernels_glue.applied")
INT8, SOL = "Kitchen INT8 Quantize Model", "Sol Attention Patch"
NAN = float("nan")


def spoil(patcher: Any, name: str, factor: float) -> None:
    patcher.model.diffusion_model.get_submodule(name).weight._params.scale.mul_(factor)


def count_samplings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each sampling."""
    import comfy.sample

    real, made = comfy.sample.sample_custom, []
    monkeypatch.setattr(comfy.sample, "sample_custom", lambda *a, **k: made.append(1) or real(*a, **k))
    return made


# --- no numbers ----------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("factor", [NAN, float("inf")])
def test_a_layer_that_gives_no_numbers_is_left_alone(
    comfy: ModuleType, tiny: MakeTiny, factor: float
) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source)[0]
    spoil(int8, "blocks.0.ffn.2", factor)
    *_, found = compare(int8, None, inputs(comfy, model, steps=1), layers=True, keep_psnr=40.0)
    assert found.warnings == (
        "the result of the model has NaN or infinite values, so its scores mean nothing",
    )
    proposed = found.recommendation
    before, tried = proposed.trials
    assert before.psnr != before.psnr and tried.psnr > 40
    assert proposed.chosen == tried and tried.ignored_layers == "blocks.0.ffn.2"


def test_attention_behind_such_a_layer_is_not_blamed(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source)[0]
    sol = patch(comfy, int8, dense_steps=0, min_tokens=1, dense_layers="")[0]
    spoil(int8, "blocks.0.ffn.2", NAN)
    *_, found = compare(sol, None, inputs(comfy, model, steps=1), layers=True, keep_psnr=40.0)
    kinds = {kind: [x for x in found.layers if x.kind == kind] for kind in ("int8", "attention")}
    assert len(kinds["int8"]) == 20 and [layer.name for layer in kinds["attention"]] == ["0"]
    chosen = found.recommendation.chosen
    assert chosen.ignored_layers == "blocks.0.ffn.2" and chosen.dense_layers == "" and chosen.psnr > 40


def test_a_psnr_that_is_none_is_worse_than_any() -> None:
    assert recommend.worth(NAN) < recommend.worth(-1e9) < recommend.worth(0.0)
    assert recommend.equal(NAN, NAN) and recommend.equal(1.5, 1.5) and not recommend.equal(NAN, 1.5)


def test_nothing_is_searched_against_a_reference_without_numbers(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("wan")
    source, broken = comfy.load_unet(model.path), comfy.load_unet(model.path)
    broken.model.diffusion_model.head.head.bias.fill_(NAN)
    int8 = quantize(comfy, source)[0]
    made = count_samplings(monkeypatch)
    *_, found = compare(int8, broken, inputs(comfy, model, steps=1), keep_psnr=30.0)
    assert len(made) == 2 and found.recommendation is None
    assert found.warnings[0].startswith("the result of the reference has NaN")
    assert found.remarks == ("no recommendation: there is nothing to measure other settings against",)


class Decoder:
    """A VAE that gives NaN from its second call on, or from the first."""

    def __init__(self, good: int):
        self.good = good

    def decode(self, samples: torch.Tensor) -> torch.Tensor:
        self.good -= 1
        images = samples[:, :3].movedim(1, -1).sigmoid()
        return images if self.good >= 0 else images * NAN


@pytest.mark.parametrize(("good", "who"), [(0, ["reference", "model"]), (1, ["model"])])
def test_a_vae_that_gives_no_numbers_is_named(
    comfy: ModuleType, tiny: MakeTiny, good: int, who: list[str]
) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    given = inputs(comfy, model, steps=1)
    *_, found = compare(source, source.clone(), given, vae=Decoder(good))
    assert len(found.warnings) == len(who)
    for name, warning in zip(who, found.warnings, strict=True):
        assert warning.startswith(f"the VAE makes NaN or infinite values of the result of the {name}, so")


# --- the source ----------------------------------------------------------------------------------


def test_with_the_source_gone_nothing_is_recommended(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model at `reference` is no start: here it lacks the LoRA."""
    model = tiny("wan")
    builders.write_lora(tmp_path / "a.safetensors", model, LORA_A["wan"])
    source = comfy.apply_lora(comfy.load_unet(model.path), tmp_path / "a.safetensors", 0.5)
    given = inputs(comfy, model, steps=1)
    int8 = quantize(comfy, source)[0]
    made = count_samplings(monkeypatch)
    # What the remark asks for.
    *_, found = compare(int8, source, given, keep_psnr=30.0)
    assert found.recommendation.chosen.psnr == found.final.psnr > 30
    del source
    *_, found = compare(int8, comfy.load_unet(model.path), given, keep_psnr=100.0)
    assert found.recommendation is None and len(made) == 4
    remark = found.remarks[-1]
    assert remark.startswith("no recommendation: ") and "no longer in memory" in remark
    assert "Connect the very output that goes into Kitchen INT8 Quantize Model" in remark
    assert "its LoRA included" in remark


# --- tau -----------------------------------------------------------------------------------------


class Fake:
    """A search whose trials have the PSNR that a function gives for their tau and nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, psnr: Callable[[Any], float], **settings: Any):
        search = inprocess.pack_module("kernels_glue.compare.search")
        monkeypatch.setattr(search, "apply_settings", lambda base, settings: base or settings)
        monkeypatch.setattr(Search, "_int8", lambda self, settings: None)
        self.psnr, self.asked = psnr, []
        config = inprocess.pack_module("kernels_glue.attention.config").SolConfig(tau=1.0, dense_layers="")
        self.settings = applied.Settings(sol=config, **settings)

    def run(self, limit: float) -> Any:
        def measure(settings: Any, name: str) -> float:
            self.asked.append((None if settings.sol is None else settings.sol.tau, name))
            return self.psnr(settings)

        first = self.psnr(self.settings)
        return Search(None, self.settings, limit, measure, first).run((), True)


@pytest.mark.parametrize("limit", [30.0, 90.0])
@pytest.mark.parametrize("psnr", [50.0, NAN])
def test_a_tau_that_changes_nothing_is_tried_at_two_values(
    monkeypatch: pytest.MonkeyPatch, limit: float, psnr: float
) -> None:
    fake = Fake(monkeypatch, lambda settings: psnr)
    found = fake.run(limit)
    assert len(fake.asked) == 2 and len(found.trials) == 3
    assert recommend.IDLE_TAU in found.remarks and recommend.MONOTONE not in found.remarks
    assert found.chosen == (found.trials[0] if psnr >= limit else None)


def test_a_tau_that_changes_something_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, lambda settings: 50.0 if settings.sol.tau < 2.5 else 20.0)
    found = fake.run(30.0)
    assert found.chosen.tau == 2.45 and recommend.IDLE_TAU not in found.remarks
    taus = [tau for tau, _ in fake.asked]
    assert len(set(taus)) == len(taus) <= 7


# --- what is to blame ----------------------------------------------------------------------------


def test_each_node_is_tried_alone_where_no_setting_helps(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    given = inputs(comfy, model, steps=1)
    int8 = quantize(comfy, source)[0]

    def sol(patcher: Any) -> Any:
        return patch(comfy, patcher, dense_steps=0, min_tokens=1, dense_layers="")[0]

    *_, found = compare(sol(int8), None, given, keep_psnr=100.0)
    proposed = found.recommendation
    assert proposed.chosen is None
    expected = {INT8: compare(int8, None, given), SOL: compare(sol(source), None, given)}
    assert proposed.alone == {node: run[2].final.psnr for node, run in expected.items()}
    [remark] = [x for x in proposed.remarks if "alone" in x]
    assert f"{INT8} alone {proposed.alone[INT8]:.2f} dB, {SOL} alone " in remark
    for patched, limit in ((int8, 100.0), (sol(int8), 1.0)):  # one node, and a limit that is kept
        assert compare(patched, None, given, keep_psnr=limit)[2].recommendation.alone == {}


# --- without layers ------------------------------------------------------------------------------


def test_without_layers_no_exact_attention_is_computed(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("wan")
    patched = patch(comfy, comfy.load_unet(model.path), dense_steps=0, min_tokens=1, dense_layers="")[0]
    monkeypatch.setattr(layers, "plain", lambda call: pytest.fail("computed"))
    *_, found = compare(patched, None, inputs(comfy, model, steps=1), keep_psnr=30.0)
    assert found.layers == () and len(found.recommendation.trials) > 1  # it knows that tau does something
