"""What the node says and shows: report, text after sampling, log, drawing; and in the real server."""

from __future__ import annotations

import itertools
import logging
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from comfyui.graphs import Graph, sampling_graph
from comfyui.server import ComfyServer, PromptRejected
from sol_node import LONG, NODE_ID, SHORT, patch, require_cpu, shown

pytestmark = pytest.mark.usefixtures("inference")

MakeTiny = Callable[..., TinyModel]
config = inprocess.pack_module("kernels_glue.attention.config")
NODE = config.NODE
GREY = torch.tensor([0xC9, 0xCE, 0xD6]) / 255
STEPS = 3


def drawn(comfy: ModuleType, source: Any, **settings: Any) -> torch.Tensor:
    node = comfy.pack_nodes()[NODE_ID]
    return comfy.run_node(node, model=source, **{"provider": "reference", **settings})[2]


# --- text ----------------------------------------------------------------------------------------


def test_the_report_says_what_will_run_where(comfy: ModuleType, tiny: MakeTiny) -> None:
    flux, wan = (comfy.load_unet(tiny(family).path) for family in ("flux", "wan"))
    _, report = patch(comfy, flux, tau=0.5, curve="linear", tau_end=1.5, dense_layers="0,-1", steps=10)
    assert report.splitlines() == [
        "sparse: reference; dense: fa",
        "layers: 4 (double_blocks 2, single_blocks 2); always dense: 0, 3",
        "sinks: the text rows of Flux, exact as keys",
        "with 10 steps (simple): 8 of 10 steps sparse, tau 0.5 to 1.5",
    ]
    _, report = patch(comfy, wan, dense_backend="current", dense_layers="")
    assert report.splitlines() == [
        "sparse: reference; dense: current (the model's own)",
        "layers: 2 (blocks 2); always dense: none",
        "sinks: none, this model has no text rows that the pack knows",
        "with 20 steps (simple): 16 of 20 steps sparse, tau 1",
    ]


@pytest.mark.parametrize(
    ("settings", "remark"),
    [
        ({"dense_layers": "0,7"}, "note: dense_layers: '7' not or only partly in the model"),
        ({"sink_start": 5}, "note: sink_tokens is 0, so sink_start has no effect"),
        ({"sinks": "off", "sink_tokens": 5}, "note: sinks is off, so sink_start and sink_tokens have no"),
        ({"tau_end": 2.0}, "note: curve is constant, so tau_end has no effect"),
        ({"dense_steps": 2, "dense_percent": 0.5}, "note: dense_steps is set, so dense_percent has no"),
    ],
)
def test_a_setting_without_effect_is_named(
    comfy: ModuleType, tiny: MakeTiny, settings: dict[str, Any], remark: str
) -> None:
    source = comfy.load_unet(tiny("wan").path)
    assert remark in patch(comfy, source, **settings)[1]
    assert "note:" not in patch(comfy, source)[1]


@pytest.mark.parametrize("profile", [False, True])
def test_the_text_after_sampling(
    comfy: ModuleType, tiny: MakeTiny, caplog: pytest.LogCaptureFixture, profile: bool
) -> None:
    require_cpu("SDPA is what computes dense calls there")
    model = tiny("flux")
    patched, texts = shown(comfy.load_unet(model.path), dense_steps=1, profile=profile)
    caplog.set_level(logging.INFO)
    for run in (1, 2):  # a second sampling counts anew
        comfy.sample(patched, model, steps=STEPS, **LONG["flux"])
        assert len(texts) == run
        lines = texts[-1].splitlines()
        # Layers 1 to 3 of steps 1 and 2 are sparse; step 0 and layer 0 dense.
        assert lines[:5] == [
            "sparse 6 calls: reference 6",
            "dense 6 calls: SDPA 6",
            "dense because of: dense step 4, dense layer 2",
            "2 of 3 steps sparse, tau 1",
            "tokens: 1040",  # 16 of text, 32 x 32 of the picture
        ]
        assert lines[5] == "sinks: rows 0-15 exact as keys (Flux)"
        density = float(re.fullmatch(r"exact blocks: ([\d.]+)%", lines[6])[1])
        # About 16% at tau 1, three diagonals of 17 blocks and one column of sinks.
        assert 15 < density < 60
        if profile:
            times = re.fullmatch(
                r"mean time a call: dense SDPA ([\d.]+) ms, sparse reference ([\d.]+) ms", lines[7]
            )
            assert all(float(time) > 0 for time in times.groups())
        assert len(lines) == (8 if profile else 7)
    logged = [record for record in caplog.records if record.getMessage().startswith(NODE)]
    assert [record.levelname for record in logged] == ["INFO", "INFO"]
    assert [record.getMessage() for record in logged] == [
        f"{NODE}: " + "; ".join(text.splitlines()) for text in texts
    ]


def test_two_lengths_and_rows_by_hand_are_told(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    settings = {"sink_start": 3, "sink_tokens": 4, "sinks": "keys_and_queries"}
    patched, texts = shown(comfy.load_unet(model.path), dense_steps=1, **settings)
    comfy.sample(patched, model, steps=STEPS)
    assert "sinks: rows 3-6 exact as keys and queries (by hand)" in texts[-1].splitlines()
    assert "tokens: 32" in texts[-1].splitlines()
    off, texts = shown(comfy.load_unet(model.path), dense_steps=1, sinks="off")
    comfy.sample(off, model, steps=STEPS)
    assert "sinks: none" in texts[-1].splitlines()


def test_a_call_that_the_dense_backend_cannot_take_is_told(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 on a CPU, and a backend that is made to say that it runs there."""
    dense = inprocess.pack_module("kernels_glue.attention.dense")
    monkeypatch.setattr(dense.BACKENDS["kitchen_int8"], "missing", lambda device: "")
    monkeypatch.setattr(dense.BACKENDS["kitchen_int8"], "unfit", lambda call: "a reason")
    model = tiny("wan")
    patched, texts = shown(comfy.load_unet(model.path), dense_steps=1, dense_backend="kitchen_int8")
    comfy.sample(patched, model, steps=STEPS)
    # Of 12 calls the self-attention of layer 1 in two steps is sparse.
    assert "given to fa instead: kitchen_int8: a reason 10" in texts[-1].splitlines()


def test_what_a_dense_backend_remarks_is_told_once(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = inprocess.pack_module("kernels_glue.attention.dense.base")
    BACKENDS = inprocess.pack_module("kernels_glue.attention.dense").BACKENDS

    class Remarking(type(BACKENDS["fa"])):
        def run(self, call: Any) -> Any:
            return base.DenseResult(super().run(call).out, "stand-in", "stand-in: a remark")

    monkeypatch.setitem(BACKENDS, "fa", Remarking())
    model = tiny("wan")
    patched, texts = shown(comfy.load_unet(model.path), dense_steps=1)
    for _ in range(2):  # of each sampling, not of the first one alone
        comfy.sample(patched, model, steps=STEPS)
        lines = texts.pop().splitlines()
        assert "dense 10 calls: stand-in 10" in lines
        assert lines.count("stand-in: a remark") == 1


# --- drawing -------------------------------------------------------------------------------------


def grey_columns(image: torch.Tensor) -> float:
    """The part of the drawing's width that is grey, near the top of the axes."""
    row = image[0, image.shape[1] // 5]
    is_grey = ((row - GREY).abs() < 0.02).all(dim=1)
    return float(is_grey.float().mean())


def test_the_drawing_shows_dense_steps_grey(comfy: ModuleType, tiny: MakeTiny) -> None:
    pytest.importorskip("matplotlib")
    source = comfy.load_unet(tiny("wan").path)
    images = {percent: drawn(comfy, source, dense_percent=percent) for percent in (0.0, 0.2, 0.6, 1.0)}
    for image in images.values():
        assert image.shape[0] == 1 and image.shape[3] == 3 and image.dtype == torch.float32
        assert min(image.shape[1:3]) > 100 and image.min() >= 0 and image.max() <= 1
        assert (image == 1).float().mean() > 0.05
    grey = {percent: grey_columns(image) for percent, image in images.items()}
    assert grey[0.0] == 0 and grey[1.0] > 0.8
    # Grey is as wide as its part of the steps.
    assert grey[0.2] / grey[1.0] == pytest.approx(0.2, abs=0.03)
    assert grey[0.6] / grey[1.0] == pytest.approx(0.6, abs=0.03)


def test_the_drawing_shows_tau(comfy: ModuleType, tiny: MakeTiny) -> None:
    pytest.importorskip("matplotlib")
    source = comfy.load_unet(tiny("wan").path)
    base = {"tau": 0.5, "tau_end": 2.0, "dense_percent": 0.0}
    images = [drawn(comfy, source, curve=curve, **base) for curve in config.CURVE_OPTIONS]
    images.append(drawn(comfy, source, curve="linear", steps=7, **base))
    for index, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:index])
    again = drawn(comfy, source, curve="linear", steps=7, **base)
    assert torch.equal(images[-1], again)

    def height(image: torch.Tensor, part: float) -> float:
        """Row of the blue line at a part of the picture's width, 0 at the top; both ends are in the axes."""
        column = image[0, :, int(image.shape[2] * part)]
        blue = (column[:, 2] - column[:, 0] > 0.3).nonzero()
        return float(blue.float().mean()) / image.shape[1]

    linear = images[config.CURVE_OPTIONS.index("linear")]
    assert height(linear, 0.2) > height(linear, 0.55) + 0.1 > height(linear, 0.9) + 0.2


def test_without_matplotlib_all_else_works(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    node = comfy.pack_nodes()[NODE_ID]
    patched, report, image = comfy.run_node(node, model=source, provider="reference")
    assert image.ndim == 4 and image.shape[0] == 1 and image.shape[3] == 3 and not image.any()
    assert "note: the schedule was not drawn, matplotlib does not work here" in report
    monkeypatch.undo()
    again, with_drawing = patch(comfy, source)
    assert "not drawn" not in with_drawing
    assert torch.equal(comfy.sample(patched, model, steps=STEPS), comfy.sample(again, model, steps=STEPS))


# --- in the server -------------------------------------------------------------------------------


_SEEDS = itertools.count(100)
DEFAULTS = {field: getattr(config.SolConfig(), field) for field in config.SolConfig.__dataclass_fields__}


def graph_with(model: TinyModel, **settings: Any) -> Graph:
    inputs = {**DEFAULTS, "provider": "reference", "dense_steps": 1, **settings}
    # Another seed each time, so that no sampling comes from the cache.
    return sampling_graph(
        model, model_nodes=[(NODE_ID, inputs)], steps=STEPS, seed=next(_SEEDS), save_as="sol"
    )


def test_the_text_arrives_on_the_node_also_where_the_node_is_cached(
    comfy: ModuleType, server: ComfyServer, tiny: MakeTiny
) -> None:
    model = tiny("wan")
    server.add_model(model)
    settings = {"tau": 1.25}
    first = server.run(graph_with(model, **settings)).raise_for_errors()
    texts = first.texts_of("model_1")
    assert texts[0].startswith("sparse: reference; dense: fa")
    assert texts[-1].startswith("sparse 2 calls: reference 2")
    # Another seed: the node comes from the cache, and its text with the sampling.
    graph = graph_with(model, **settings)
    second = server.run(graph).raise_for_errors()
    assert "model_1" in second.cached and "model_1" not in second.executed
    assert second.texts_of("model_1") == texts[-1:]
    lines = [line for line in server.log().splitlines() if f"{NODE}: sparse 2 calls" in line]
    assert len(lines) == 2
    direct, _ = patch(comfy, comfy.load_unet(model.path), dense_steps=1, **settings)
    seed = graph["sampler"]["inputs"]["seed"]
    assert torch.equal(server.latent("sol"), comfy.sample(direct, model, steps=STEPS, seed=seed))


# For each choice another spelling, and what it means; test_sol_config.py has the others.
SPELLINGS = {
    "provider": ("REF", "reference"),
    "dense_backend": ("Flash-Attn", "fa"),
    "curve": ("COSINE", "cosine"),
    "thresh_type": (" Exact", "exact"),
    "kv_splits": (1, "1"),
    "sinks": ("Keys and queries", "keys_and_queries"),
}


def test_other_spellings_are_taken_by_the_server(
    comfy: ModuleType, server: ComfyServer, tiny: MakeTiny
) -> None:
    assert SPELLINGS.keys() == config.CHOICES.keys()
    model = tiny("flux")
    server.add_model(model)
    graph = graph_with(model, tau_end=2.0, **{name: spelled for name, (spelled, _) in SPELLINGS.items()})
    graph["empty"]["inputs"] |= SHORT["flux"]  # enough tokens for each setting to count
    server.run(graph).raise_for_errors()
    meant = {name: meaning for name, (_, meaning) in SPELLINGS.items()}
    direct, _ = patch(comfy, comfy.load_unet(model.path), dense_steps=1, tau_end=2.0, **meant)
    seed = graph["sampler"]["inputs"]["seed"]
    expected = comfy.sample(direct, model, steps=STEPS, seed=seed, **SHORT["flux"])
    assert torch.equal(server.latent("sol"), expected)


def test_a_wrong_choice_is_rejected_before_anything_runs(server: ComfyServer, tiny: MakeTiny) -> None:
    """One node for each choice, all in one graph."""
    model = tiny("wan")
    server.add_model(model)
    nodes = [(NODE_ID, {**DEFAULTS, name: "nonsense"}) for name in config.CHOICES]
    with pytest.raises(PromptRejected) as rejected:
        server.run(sampling_graph(model, model_nodes=nodes))
    for name, choices in config.CHOICES.items():
        assert f"{name} is 'nonsense'. Use one of: {', '.join(choices)}." in str(rejected.value)
