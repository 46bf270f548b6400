"""The INT8 part of the demo: tiny random models in a real ComfyUI that is driven over its HTTP API.

For each model family it posts the same graph without and with the node Kitchen INT8 Quantize Model, and
compares the two results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from comfyui import builders, graphs
from comfyui.server import ComfyServer, PromptRejected, RunResult
from demo_options import FAMILIES
from demo_results import DemoError, Report, Result, summary
from devkit.console import say

if TYPE_CHECKING:
    import torch
    from comfyui.builders import TinyModel

NODE = "KitchenInt8QuantizeModel"
NODE_INPUTS = {
    "group_size": "auto",
    "layers": "blocks",
    "ignored_layers": "",
    "lora": "keep",
    "device": "auto",
}
STEPS = 8
SEED = 7
_LOG_LINES = 30


def run(chosen: Sequence[str] | None, arguments: Sequence[str]) -> bool:
    """Runs the families and prints what came out.

    Args:
        chosen: None is all that this ComfyUI has.
        arguments: ComfyUI's, for the device.

    Returns:
        Whether every model was quantized and its result stayed close to the original's.
    """
    families = chosen or [family for family in FAMILIES if family in builders.supported_families()]
    # On Windows the files of a process that has just ended stay locked for a moment.
    with tempfile.TemporaryDirectory(prefix="kitchen-sol-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        models = [builders.FAMILIES[family](folder / "written") for family in families]
        say("written: " + ", ".join(f"{m.family} ({m.path.stat().st_size / 1e6:.1f} MB)" for m in models))
        results, failed = _run_models(folder / "comfyui", models, arguments)

    if results:
        say("\n" + summary(results))
    if "--cpu" in arguments:
        say("\nOn a CPU, ComfyUI holds bf16 files in fp32, and INT8 has no fast kernels: what counts here")
        say("is the difference; compare sizes and times on a GPU.")
    say(f"\n{len(results)} of {len(models)} models ran")
    return not failed


def _run_models(
    base: Path, models: Sequence[TinyModel], arguments: Sequence[str]
) -> tuple[list[Result], bool]:
    """Start ComfyUI and run every model, also after one has failed. Returns whether any has, too."""
    results: list[Result] = []
    failed = False
    say(f"starting ComfyUI {' '.join(arguments)}".rstrip())
    with ComfyServer(base, device_args=arguments) as server:
        for model in models:
            say(f"\n{model.family}")
            try:
                result = _run_model(server, model)
            except (DemoError, PromptRejected, RuntimeError) as error:
                say(f"  FAILED: {error}")
                say("  the end of ComfyUI's log:")
                say("\n".join(f"    {line}" for line in server.log().splitlines()[-_LOG_LINES:]))
                failed = True
                continue
            results.append(result)
            for problem in result.problems:
                say(f"  FAILED: {problem}")
                failed = True
    return results, failed


def _run_model(server: ComfyServer, model: TinyModel) -> Result:
    """Sample ``model`` without and with the node.

    Raises DemoError, and what ComfyServer.run and RunResult.raise_for_errors raise.
    """
    server.add_model(model)
    original, _, seconds_original = _sample(server, model, with_node=False)
    quantized, text, seconds_quantized = _sample(server, model, with_node=True)
    result = Result(
        model.family,
        Report.parse(text),
        (seconds_original, seconds_quantized),
        _relative_difference(original, quantized),
    )
    report = result.report
    say(f"  quantized {report.quantized} of {report.layers} layers")
    say(f"  weights {report.size_before} -> {report.size_after}")
    say(f"  seconds a step {seconds_original:.4f} -> {seconds_quantized:.4f}")
    say(f"  relative difference of the results {result.difference:.4f}")
    return result


def _sample(server: ComfyServer, model: TinyModel, with_node: bool) -> tuple[torch.Tensor, str, float]:
    """Returns the latent, the node's report (empty without the node) and the seconds of a step."""
    name = f"{model.family}_{'int8' if with_node else 'original'}"
    chain = [(NODE, NODE_INPUTS)] if with_node else []

    def run(seed: int) -> RunResult:
        graph = graphs.sampling_graph(model, model_nodes=chain, steps=STEPS, seed=seed, save_as=name)
        if with_node:
            graph["report"] = graphs.node("PreviewAny", source=["model_1", 1])
        return server.run(graph).raise_for_errors()

    first = run(SEED)
    latent = server.latent(name)
    # Another seed: the loader and the node come from the cache, the model is loaded, the sampler has to run.
    second = run(SEED + 1)
    if not {"sampler"} <= set(second.executed) <= {"sampler", "save"}:
        raise DemoError(f"the second run should only sample, but ran {', '.join(second.executed)}")
    return latent, _report_of(first) if with_node else "", second.seconds / STEPS


def _report_of(run: RunResult) -> str:
    """The report as the node's output, after a check that the same was shown on the node."""
    text = run.outputs["report"]["text"][0]
    shown = run.texts_of("model_1")
    headline = text.splitlines()[0] if text else ""
    if not any(line.startswith(headline) for line in shown):
        raise DemoError(f"the node's text does not begin with {headline!r}: {shown}")
    return text


def _relative_difference(original: torch.Tensor, other: torch.Tensor) -> float:
    wanted, found = original.double(), other.double()
    return ((found - wanted).norm() / wanted.norm()).item()
