"""Kitchen Compare Models through ComfyUI: what comes out, what stands on it, and what it refuses."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from comfyui.graphs import Graph, node
from comfyui.server import ComfyServer, PromptRejected
from compare_node import by_hand
from int8_node import quantize

pytestmark = pytest.mark.usefixtures("inference")

NODE_ID = "KitchenCompareModels"
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError
STEPS = 3
DEFAULTS: dict[str, Any] = {
    "add_noise": True,
    "layers": False,
    "keep_psnr": 0.0,
    "lpips": "auto",
    "filename_prefix": "",
}

MakeTiny = Callable[..., TinyModel]


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path


def sampling(tiny: TinyModel, model: Any, seed: int = 5, sampler: str = "euler") -> dict[str, Any]:
    """The inputs that core's SamplerCustom and the node share, but the model."""
    import comfy.samplers

    steps = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", STEPS)
    return {
        "noise_seed": seed,
        "cfg": 1.0,
        "positive": inprocess.conditioning(tiny),
        "negative": inprocess.conditioning(tiny, seed=4),
        "sampler": comfy.samplers.sampler_object(sampler),
        "sigmas": steps,
        "latent_image": inprocess.empty_latent(tiny),
    }


def compare(comfy: ModuleType, model: Any, inputs: dict[str, Any], **settings: Any) -> Any:
    return comfy.run_node(comfy.pack_nodes()[NODE_ID], model=model, **{**DEFAULTS, **inputs, **settings})


# --- what comes out ------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "h3", "flux"])
def test_both_latents_are_those_of_cores_own_sampling(
    comfy: ModuleType, tiny: MakeTiny, output: Path, family: str
) -> None:
    model = tiny(family)
    source = comfy.load_unet(model.path)
    quantized, _ = quantize(comfy, source)
    inputs = sampling(model, source)
    expected = [by_hand(patcher, inputs) for patcher in (quantized, source)]
    assert not torch.equal(*expected)
    for reference in ({}, {"reference": source}):
        latent, other, report, plot = compare(comfy, quantized, inputs, filename_prefix="a", **reference)
        found = [inprocess.flatten_latent(x["samples"]) for x in (latent, other)]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        a, b = (x.double().numpy().ravel() for x in found)
        psnr = 20 * math.log10(b.max() - b.min()) - 10 * math.log10(np.mean((a - b) ** 2))
        assert re.match(rf"PSNR {psnr:.2f} dB, SSIM (0\.9\d+|> 0.9999) \(latents\)\n", report)
        assert plot.ndim == 4 and plot.shape[2:] == (1024, 3)
    assert sorted(path.name for path in output.iterdir()) == [
        f"a_0000{number}_.{suffix}" for number in (1, 2) for suffix in ("csv", "json")
    ]
    steps = json.loads((output / "a_00002_.json").read_text())["lines"]
    [facts] = [line["facts"] for line in steps if "steps" in line["facts"]]
    assert [step["step"] for step in facts["steps"]] == [1, 2, 3]
    assert len((output / "a_00002_.csv").read_text().splitlines()) == 1 + STEPS


def test_without_noise_the_latent_is_the_start(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    quantized, _ = quantize(comfy, source)
    inputs = sampling(model, source)
    latent, *_ = compare(comfy, quantized, inputs, add_noise=False)
    found = inprocess.flatten_latent(latent["samples"])
    assert torch.equal(found, by_hand(quantized, {**inputs, "add_noise": False}))
    assert not torch.equal(found, by_hand(quantized, inputs))


def test_a_model_without_nodes_of_the_pack_is_equal_to_itself(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    report = compare(comfy, source, sampling(model, source))[2].splitlines()
    assert report[0] == "PSNR infinite (equal), SSIM 1.0000 (latents)"
    assert f"all {STEPS} predictions are equal" in report
    assert "written" not in report[-1]


def test_with_a_vae_images_are_compared(comfy: ModuleType, tiny: MakeTiny) -> None:
    class Decoder:
        """Stands in for a VAE: the first three channels of Wan's latents, as core's gives images."""

        def decode(self, samples: torch.Tensor) -> torch.Tensor:
            return samples[:, :3].movedim(1, -1).sigmoid()  # [B, T, H, W, 3]

    model = tiny("wan")
    source = comfy.load_unet(model.path)
    quantized, _ = quantize(comfy, source)
    latent, other, report, _ = compare(comfy, quantized, sampling(model, source), vae=Decoder(), lpips="off")
    a, b = (x["samples"][:, :3].double().sigmoid().numpy() for x in (latent, other))
    psnr = -10 * math.log10(np.mean((a - b) ** 2))  # of values in 0..1
    assert re.match(rf"PSNR {psnr:.2f} dB, SSIM (0\.9\d+|> 0.9999) \(images\)\n", report)


def test_layers_and_recommendation_are_in_the_report(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    quantized, _ = quantize(comfy, source)
    inputs = sampling(model, source)
    report = compare(comfy, quantized, inputs, layers=True, keep_psnr=1.0)[2].splitlines()
    [start] = [i for i, line in enumerate(report) if line.startswith("INT8 layers, 20 looked at: ")]
    assert all(line.startswith("- blocks.") for line in report[start + 1 : start + 11])
    assert report[start + 11].startswith("recommended to keep 1 dB, measured ")
    assert report[start + 12 : start + 14] == ["Kitchen INT8 Quantize Model:", "ignored_layers: (empty)"]
    unreachable = compare(comfy, quantized, inputs, keep_psnr=100.0)[2].splitlines()
    assert unreachable[1] == "WARNING: the only setting that was tried is not enough to keep 100 dB"


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_psnr": 101.0}, "keep_psnr is 101.0."),
        ({"keep_psnr": -1.0}, "keep_psnr is -1.0."),
        ({"keep_psnr": math.nan}, "keep_psnr is nan."),
        ({"lpips": "always"}, "lpips is 'always'."),
        (
            {"filename_prefix": "../a"},
            "filename_prefix is '../a', which is no name inside of ComfyUI's output",
        ),
        ({"sigmas": torch.tensor([])}, "sigmas has 0 values, which is no step."),
        ({"sigmas": torch.tensor([1.0])}, "sigmas has 1 value, which is no step."),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sampled(
    comfy: ModuleType,
    tiny: MakeTiny,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    message: str,
) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    inputs = sampling(model, source)
    monkeypatch.setattr("comfy.sample.sample_custom", lambda *args, **kwargs: pytest.fail("sampled"))
    with pytest.raises(KitchenSolError) as caught:
        compare(comfy, source, inputs, **settings)
    assert str(caught.value).startswith(f"Kitchen Compare Models: {message}")


# --- in the server -------------------------------------------------------------------------------

_SEEDS = itertools.count(500)


def graph_with(tiny: TinyModel, **settings: Any) -> Graph:
    """INT8 and the comparison, with nothing behind it."""
    tokens, width = tiny.context_shape
    sizes = {"tokens": tokens, "width": width, "pooled_width": tiny.pooled_width}
    quantization = {
        "group_size": "auto",
        "layers": "blocks",
        "ignored_layers": "",
        "lora": "keep",
        "device": "auto",
    }
    return {
        "unet": node("UNETLoader", unet_name=tiny.path.name, weight_dtype="default"),
        "int8": node("KitchenInt8QuantizeModel", model=["unet", 0], **quantization),
        "positive": node("TestConditioning", **sizes, seed=3),
        "negative": node("TestConditioning", **sizes, seed=4),
        "empty": node(tiny.latent_node, **{**tiny.latent_inputs, "batch_size": 1}),
        "sampler": node("KSamplerSelect", sampler_name="euler"),
        "sigmas": node("BasicScheduler", model=["unet", 0], scheduler="simple", steps=STEPS, denoise=1.0),
        "compare": node(
            NODE_ID,
            model=["int8", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            sampler=["sampler", 0],
            sigmas=["sigmas", 0],
            latent_image=["empty", 0],
            **{**DEFAULTS, "noise_seed": next(_SEEDS), "cfg": 2.0, **settings},
        ),
    }


@pytest.mark.core
def test_a_graph_that_ends_in_the_node_runs_and_tells_what_it_does(
    server: ComfyServer, tiny: MakeTiny
) -> None:
    model = tiny("wan")
    server.add_model(model)
    result = server.run(graph_with(model, filename_prefix="sub/compared")).raise_for_errors()
    texts = [html.unescape(text) for text in result.texts_of("compare")]
    for who in ("reference", "model"):
        assert [text for text in texts if text.startswith(who)], texts
    assert texts[0].startswith("reference") and texts[-1].startswith("PSNR ")
    written = sorted(path.name for path in (server.base / "output" / "sub").iterdir())
    assert written == ["compared_00001_.csv", "compared_00001_.json"]
    assert "written: sub/compared_00001_.csv, sub/compared_00001_.json" in texts[-1]
    assert "Kitchen Compare Models: PSNR " in server.log()


def test_a_wrong_input_is_rejected_before_anything_runs(server: ComfyServer, tiny: MakeTiny) -> None:
    model = tiny("wan")
    server.add_model(model)
    for settings, part in (
        ({"filename_prefix": "../../a"}, "no name inside of ComfyUI's output folder"),
        ({"keep_psnr": 101.0}, "keep_psnr"),
        ({"lpips": "always"}, "lpips"),
        ({"cfg": -1.0}, "cfg"),
    ):
        with pytest.raises(PromptRejected) as rejected:
            server.run(graph_with(model, **settings))
        assert part in str(rejected.value)
