"""Measures what Kitchen Compare Models costs over running its two samplings by hand.

Run by `python tools/dev.py bench compare`. One run, one table: the same models, noise and schedule, by hand
(core's SamplerCustom, twice) and by the node's engine, in turns; the ratio of the medians is the result. Both
are warm: nothing is loaded, compiled or chosen within. It works on a CPU too, with `--blocks 2`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from benchkit.models import MODELS, BenchModel, load, random_weights, shrunk
from comfyui import inprocess


def main() -> None:
    options = _options()
    inprocess.start()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MODELS[options.model]
    model = (model if device == "cuda" else shrunk(model)).with_blocks(options.blocks)
    with torch.inference_mode():
        rows = _measure(model, device, options)
    rows = {"device": torch.cuda.get_device_name() if device == "cuda" else "CPU", **rows}
    for name, value in rows.items():
        print(f"{name:<42} {value}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench compare", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="h3")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--length", default="7k", help="2k, 7k or 33k tokens")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="also write the table to this file")
    return parser.parse_args()


def _measure(model: BenchModel, device: str, options: argparse.Namespace) -> dict[str, Any]:
    from compare_node import by_hand as sample_by_hand  # imports torch, so not before ComfyUI has started

    compare = inprocess.pack_module("kernels_glue.compare.apply")
    config = inprocess.pack_module("kernels_glue.compare.config").CompareConfig
    quantize = inprocess.pack_module("kernels_glue.quantization.apply").quantize_model
    int8 = inprocess.pack_module("kernels_glue.quantization.config").QuantizeConfig()

    reference = load(random_weights(model, device))
    quantized, _ = quantize(reference, int8, lambda _: None)
    inputs = _inputs(compare.Inputs, reference, model, options)

    def by_hand() -> None:
        for patcher in (reference, quantized):
            sample_by_hand(patcher, vars(inputs))

    def by_node(layers: bool) -> None:
        compare.compare(quantized, reference, inputs, config(layers=layers))

    ways: dict[str, Callable[[], None]] = {
        "by hand": by_hand,
        "Kitchen Compare Models": lambda: by_node(False),
        "Kitchen Compare Models, layers": lambda: by_node(True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(options.repeats + 1):
        for name, way in ways.items():
            seconds = _timed(way, device)
            if repeat:  # the first round warms everything up
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = {"model": f"{model.title}, {options.blocks} blocks, {options.length}, {options.steps} steps"}
    for name, seconds in medians.items():
        spread = f"{min(times[name]):.3f} to {max(times[name]):.3f}"
        rows[name] = f"{seconds:.3f} s ({spread}), {seconds / medians['by hand']:.3f} of by hand"
    return rows


def _inputs(make: Callable[..., Any], patcher: Any, model: BenchModel, options: argparse.Namespace) -> Any:
    import comfy.samplers

    tiny = model.sampling(options.length)
    sampling = patcher.get_model_object("model_sampling")
    return make(
        noise_seed=7,
        cfg=1.0,
        positive=inprocess.conditioning(tiny, seed=3),
        negative=inprocess.conditioning(tiny, seed=4),
        sampler=comfy.samplers.sampler_object("euler"),
        sigmas=comfy.samplers.calculate_sigmas(sampling, "simple", options.steps),
        latent_image=inprocess.empty_latent(tiny),
    )


def _timed(function: Callable[[], None], device: str) -> float:
    import torch

    started = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
