"""What Kitchen Compare Models says of a comparison, in lines and in facts."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from comfyui import inprocess
from compare_results import GIB, comparison, layers, results, steps, trials

report = inprocess.pack_module("kernels_glue.compare.report")
worst = inprocess.pack_module("kernels_glue.compare.worst")
wording = inprocess.pack_module("kernels_glue.compare.wording")
shape = inprocess.pack_module("kernels_glue.report")
patterns = inprocess.pack_module("kernels_glue.quantization.patterns")
attention_layers = inprocess.pack_module("kernels_glue.attention.layers")


def lines_of(**changes: Any) -> list[str]:
    return report.report_of(comparison(**changes)).text.splitlines()


def test_the_scores_come_first_and_then_what_they_cost() -> None:
    assert lines_of() == [
        "PSNR 31.23 dB, SSIM 0.9877 (latents)",
        "a step: 1.23 s (the first 2.5 s), reference 2.47 s (the first 3.5 s); 2.00x as fast",
        "device memory: 13.00 GiB, reference 30.00 GiB",
        "host memory: grew by 3.00 GiB, reference 5.00 GiB",
        "weights: 18.00 GiB, reference 36.00 GiB",
        "worst prediction: step 3 of 4, PSNR 33.50 dB, cosine 0.9996, relative error 2.1%",
    ]


def test_on_a_cpu_there_is_no_device_memory() -> None:
    usage = dataclasses.replace(comparison().model, peak_device_bytes=None)
    assert not [line for line in lines_of(model=usage) if "device memory" in line]


@pytest.mark.parametrize(
    ("seconds", "end"), [(2.468, "; 1.00x as fast"), (4.936, "; 2.00x as long"), (0.0, "(the first 3.5 s)")]
)
def test_the_speed(seconds: float, end: str) -> None:
    [line] = [
        x
        for x in lines_of(model=dataclasses.replace(comparison().model, seconds_per_step=seconds))
        if "a step" in x
    ]
    assert line.endswith(end)


@pytest.mark.parametrize(
    ("final", "line"),
    [
        ((28.5, 0.91, 0.0412, True), "PSNR 28.50 dB, SSIM 0.9100, LPIPS 0.0412 (images)"),
        ((math.inf, 1.0, None, False), "PSNR infinite (equal), SSIM 1.0000 (latents)"),
        ((math.nan, math.nan, None, False), "PSNR not defined, SSIM not defined (latents)"),
        ((61.0, 0.99999, None, True), "PSNR 61.00 dB, SSIM > 0.9999 (images)"),
    ],
)
def test_the_headline(final: tuple[Any, ...], line: str) -> None:
    assert lines_of(final=results.FinalScore(*final))[0] == line


@pytest.mark.parametrize(
    ("psnrs", "line"),
    [
        ((math.inf, math.inf), "all 2 predictions are equal"),
        ((math.inf,), "the only prediction is equal"),
        ((30.0, math.nan, 20.0), "worst prediction: step 2 of 3, PSNR not defined"),
        ((math.inf, 50.0), "worst prediction: step 2 of 2, PSNR 50.00 dB"),
    ],
)
def test_the_worst_step(psnrs: tuple[float, ...], line: str) -> None:
    assert [found for found in lines_of(steps=steps(*psnrs)) if found.startswith(line)]


def test_the_worst_layers_are_named_kind_by_kind() -> None:
    lines = lines_of(layers=layers(20))
    assert lines[6:8] == [
        "INT8 layers, 13 looked at: relative error on the same inputs 2.7% (median); the worst:",
        "- blocks.1.ffn.2: 15.0%",
    ]
    assert len(lines[7:]) == 10 + 1 + 7  # at most ten of a kind
    assert lines[17:20] == [
        "sparse attention, 7 looked at: relative error on the same inputs 3.0% (median); the worst:",
        "- layer 0: 30.0%",
        "- layer 3: 7.5%",
    ]


def test_a_layer_without_a_number_is_the_worst() -> None:
    made = [
        results.LayerError(name, "int8", error, 1)
        for name, error in (("a", 0.1), ("b", math.nan), ("c", 0.2))
    ]
    [found] = worst.worst_of(made)
    assert [layer.name for layer in found.layers] == ["b", "c", "a"]
    assert (found.count, found.median) == (3, pytest.approx(0.15))
    broken = worst.worst_of([results.LayerError("a", "dense attention", math.nan, 1)])
    assert broken[0].title == "dense attention" and math.isnan(broken[0].median)
    assert worst.worst_of(()) == ()
    assert [line for line in lines_of(layers=(made[1],)) if line.endswith("b: not defined")]


# --- the recommendation --------------------------------------------------------------------------


def test_what_is_recommended_can_be_pasted() -> None:
    lines = lines_of(recommendation=trials())
    start = lines.index("recommended to keep 37 dB, measured 37.50 dB:")
    assert lines[start + 1 :] == [
        "Kitchen INT8 Quantize Model:",
        "ignored_layers:",
        "blocks.1.ffn.2",
        "blocks.0",
        "Sol Attention Patch:",
        "tau: 1.25",
        "dense_layers: 0,3",
        "note: PSNR is assumed to fall as tau grows",
        "note: measured with this seed only",
    ]
    text = "\n".join(lines[start + 3 : start + 5])
    assert [pattern.text for pattern in patterns.parse_patterns(text)] == ["blocks.1.ffn.2", "blocks.0"]


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        ((None, "blocks.0", None), ["Kitchen INT8 Quantize Model:", "ignored_layers: blocks.0"]),
        ((0.85, None, ""), ["Sol Attention Patch:", "tau: 0.85", "dense_layers: (empty)"]),
    ],
)
def test_only_inputs_of_nodes_that_are_there(trial: tuple[Any, ...], expected: list[str]) -> None:
    chosen = results.Trial(*trial, 40.0)
    found = results.Recommendation(30.0, (chosen,), chosen)
    lines = lines_of(recommendation=found)
    assert lines[lines.index("recommended to keep 30 dB, measured 40.00 dB:") + 1 :] == expected


def test_that_nothing_keeps_the_limit_is_a_warning_right_below_the_scores() -> None:
    lines = lines_of(recommendation=trials(None))
    assert lines[1] == "WARNING: none of 5 settings that were tried is enough to keep 37 dB"
    assert not [line for line in lines if line.startswith("tau")]
    nothing = results.Recommendation(30.0, (), None, ("there is nothing to change",))
    assert lines_of(recommendation=nothing)[-1] == (
        "note: nothing to recommend to keep 30 dB: there is nothing to change"
    )
    one = results.Recommendation(37.0, trials().trials[:1], None)
    assert lines_of(recommendation=one)[1] == (
        "WARNING: the only setting that was tried is not enough to keep 37 dB"
    )


# --- remarks and facts ---------------------------------------------------------------------------


def test_remarks_are_notes() -> None:
    final = results.FinalScore(30.0, math.nan, None, False, ("no SSIM: a reason",))
    lines = lines_of(final=final, remarks=("another",))
    assert lines[-2:] == ["note: no SSIM: a reason", "note: another"]


def test_warnings_stand_right_below_the_scores() -> None:
    lines = lines_of(warnings=("broken",), recommendation=trials(None))
    assert lines[1] == "WARNING: broken" and lines[2].startswith("WARNING: none of 5 settings")


def test_the_facts_are_the_whole_comparison() -> None:
    made = comparison(
        layers=layers(12), recommendation=trials(), remarks=("a remark",), warnings=("a warning",)
    )
    found = report.report_of(made, shape.detail("written", files=["a"]))
    facts = shape.Report.from_json(found.to_json()).facts
    expected = json.loads(json.dumps(dataclasses.asdict(made)))
    for step in expected["steps"]:
        step["step"] += 1
    assert expected["steps"][0]["latent"]["psnr"] == math.inf
    expected["steps"][0]["latent"]["psnr"] = "inf"  # no number of JSON
    assert facts.pop("files") == ["a"]
    assert facts == expected
    assert facts["model"]["weight_bytes"] == 18 * GIB
    assert found.node == "Kitchen Compare Models"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (0.3, "30.0%"),
        (0.01, "1.0%"),
        (0.00996, "1.0%"),
        (0.00994, "0.99%"),
        (0.00123, "0.12%"),
        (2.5e-7, "2.5e-05%"),
        (0.0, "0.0%"),
    ],
)
def test_relative_errors_in_words(error: float, text: str) -> None:
    assert wording.relative(error) == text
    assert wording.relative(math.inf) == "infinite" and wording.relative(math.nan) == "not defined"
