"""Measures Kitchen INT8 on a CUDA GPU at MiniMax-H3's size: converting it, and sampling with it.

Run by `python tools/dev.py bench int8`. One run prints one table; every figure in it comes from that run.
The weights are random, the model, the loader, the node and the sampler are ComfyUI's and the pack's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

# ComfyUI chooses torch's allocator, so nothing that imports torch may be imported before it starts.
from benchkit.models import H3, load, random_weights
from comfyui import inprocess

GIB = 2**30
# H3's lengths under the names that this benchmark gives them.
LENGTHS = {"short": H3.lengths["7k"], "long": H3.lengths["33k"]}

rows: list[tuple[str, str]] = []


def row(label: str, value: str) -> None:
    rows.append((label, value))
    print(f"{label:<58} {value}", flush=True)


def main() -> None:
    options = _options()
    inprocess.start()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("bench int8 needs a CUDA GPU")
    with torch.inference_mode():
        _machine()
        _touch_host_memory(options.touch_gib)
        weights = random_weights(H3.with_blocks(options.blocks))
        source = _load(weights)
        del weights
        tiny = H3.sampling("7k")
        quantized = _conversion(source, options.repeats)
        _sampling("bf16", source, tiny, options)
        _sampling("INT8", quantized, tiny, options)
    if options.json:
        Path(options.json).write_text(json.dumps(dict(rows), indent=1), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3, help="conversions after the cold one")
    parser.add_argument("--steps", type=int, default=6, help="timed sampling steps")
    parser.add_argument("--lengths", nargs="*", default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument(
        "--touch-gib",
        type=int,
        default=0,
        help="host memory to touch first, for machines whose RAM grows on use",
    )
    parser.add_argument("--json", help="also write the table to this file")
    return parser.parse_args()


def _machine() -> None:
    import comfy.memory_management
    import comfyui_version
    import torch

    row("GPU", torch.cuda.get_device_name())
    row(
        "ComfyUI / torch / comfy-kitchen",
        f"{comfyui_version.__version__} / {torch.__version__} / {version('comfy-kitchen')}",
    )
    row("Python", platform.python_version())
    row("dynamic VRAM", "on" if comfy.memory_management.aimdo_enabled else "off")


def _touch_host_memory(gib: int) -> None:
    import torch

    if gib:
        touched = [torch.ones(GIB, dtype=torch.uint8) for _ in range(gib)]
        row("host memory touched first", f"{sum(t.nbytes for t in touched) / GIB:.0f} GiB")


def _load(weights: dict[str, Any]) -> Any:
    source = load(weights)
    block_bytes = sum(p.nbytes for p in source.model.diffusion_model.blocks.parameters())
    row("block weights in bf16", f"{block_bytes / GIB:.1f} GiB")
    return source


# --- converting ---------------------------------------------------------------------------------


def _conversion(source: Any, repeats: int) -> Any:
    import torch

    apply = inprocess.pack_module("kernels_glue.quantization.apply")
    config = inprocess.pack_module("kernels_glue.quantization.config").QuantizeConfig()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()

    def convert() -> Any:
        # A fresh memory of conversions: each run converts again.
        apply._conversions = type(apply._conversions)()
        return apply.quantize_model(source, config, lambda _: None)

    with _host_peak() as peak:
        cold, (quantized, report) = _timed(convert)
    print(report, flush=True)
    result = _bytes_of(quantized.model)
    row("convert, cold first run", f"{cold:.2f} s")
    row("peak extra host memory beyond the result, cold run", f"{(peak[0] - result) / GIB:.2f} GiB")
    row("peak extra GPU memory while converting", f"{torch.cuda.max_memory_allocated() / GIB:.2f} GiB")
    times = []
    for _ in range(repeats):
        del quantized
        gc.collect()
        seconds, (quantized, _) = _timed(convert)
        times.append(seconds)
    warm = statistics.median(times)
    row(f"convert, median of {repeats}", f"{warm:.2f} s")
    plain = _plain_copies(quantized.model, source.model, repeats)
    row("plain copies: bf16 in, INT8 out, touched pageable", f"{plain:.2f} s")
    row("convert / plain copies", f"{warm / plain:.2f} (cold: {cold / plain:.2f})")
    pinned = _pinned_copies(quantized.model, source.model)
    row("the same bytes at the pinned limit", f"{pinned:.2f} s")
    row("GPU memory left behind by converting", f"{torch.cuda.memory_allocated() / GIB:.3f} GiB")
    return quantized


def _int8_pairs(quantized: Any, source: Any) -> Iterator[tuple[Any, Any]]:
    from comfy.quant_ops import QuantizedTensor

    for name, module in quantized.diffusion_model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor):
            yield source.diffusion_model.get_submodule(name).weight, weight._qdata


def _plain_copies(quantized: Any, source: Any, repeats: int) -> float:
    """Median seconds of copying every quantized layer's bf16 weight in and as many INT8 bytes out."""
    import torch

    pairs = list(_int8_pairs(quantized, source))
    on_gpu = {w.shape: torch.empty(w.shape, dtype=torch.int8, device="cuda") for w, _ in pairs}
    # One touched target of each shape would fit into the CPU's caches' favour; a full set does not.
    targets = [torch.zeros(q.shape, dtype=torch.int8) for _, q in pairs]

    def copy() -> None:
        for (weight, _), target in zip(pairs, targets, strict=True):
            weight.to("cuda")
            target.copy_(on_gpu[weight.shape])
        torch.cuda.synchronize()

    return statistics.median(_timed(copy)[0] for _ in range(repeats))


def _pinned_copies(quantized: Any, source: Any) -> float:
    import torch

    pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(GIB, dtype=torch.uint8, device="cuda")

    def rate(target: Any, origin: Any) -> float:
        target.copy_(origin, non_blocking=True)
        torch.cuda.synchronize()
        seconds, _ = _timed(lambda: [target.copy_(origin, non_blocking=True) for _ in range(8)])
        return 8 * GIB / seconds

    into, out = rate(on_gpu, pinned), rate(pinned, on_gpu)
    row("pinned host to device / device to host", f"{into / 1e9:.1f} / {out / 1e9:.1f} GB/s")
    pairs = list(_int8_pairs(quantized, source))
    return sum(w.nbytes for w, _ in pairs) / into + sum(q.nbytes for _, q in pairs) / out


def _bytes_of(model: Any) -> int:
    import comfy.model_management

    return comfy.model_management.module_size(model)


@contextmanager
def _host_peak() -> Iterator[list[int]]:
    """Samples this process's resident set; the list's only item becomes its growth in bytes."""
    import psutil

    process, done, peak = psutil.Process(), threading.Event(), [0]
    start = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], process.memory_info().rss - start)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


# --- sampling -----------------------------------------------------------------------------------


def _sampling(label: str, model: Any, tiny: Any, options: argparse.Namespace) -> None:
    import torch

    for length in options.lengths:
        inprocess.unload_all()
        torch.cuda.reset_peak_memory_stats()
        free_before = torch.cuda.mem_get_info()[0]
        seconds, tokens = _seconds_a_step(model, tiny, LENGTHS[length], options.steps)
        used = (free_before - torch.cuda.mem_get_info()[0]) / GIB
        row(f"{label}, T = {tokens}", f"{seconds:.3f} s a step, {used:.1f} GiB held on the device after it")
    inprocess.unload_all()


def _seconds_a_step(model: Any, tiny: Any, latent: dict[str, int], steps: int) -> tuple[float, int]:
    """Median seconds between two evaluations of the model, the first one left out."""
    import torch
    from comfy.patcher_extension import WrappersMP

    stamps: list[float] = []
    tokens = [0]

    def stamp(executor: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        stamps.append(time.perf_counter())
        tokens[0] = H3.tokens([part.shape for part in x])
        return executor(x, *args, **kwargs)

    timed = model.clone()
    timed.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "kitchen_sol_bench", stamp)
    inprocess.sample(timed, tiny, steps=steps + 2, **latent)
    gaps = [b - a for a, b in pairwise(stamps[1:])]
    return statistics.median(gaps), tokens[0]


if __name__ == "__main__":
    main()
