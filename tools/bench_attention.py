"""Measures attention on a CUDA GPU at MiniMax-H3's shape: dense backends, Sol kernels, and the glue.

Run by `python tools/dev.py bench attention`. One run prints one table; every figure in it comes from that
run. Times are medians over the repeats, by CUDA events, of calls that the host launched ahead of time, as it
does within a model; those of the glue begin at the call on the host. Errors are of two heads against fp32.

q, k and v are correlated as a video model's are. For each head a field z of 128 channels is drawn on a grid
of (frames / 2, 24 / 4, 42 / 4), blown up trilinearly to frames of 24 x 42 tokens, and brought to a standard
deviation of 1; then q = 0.75 z + 0.75 n, k = 0.75 z + 0.75 n', v = z' + 0.5 n'', with white noise n and
another field z'. Softmax then prefers keys of the same place and time, as in a trained model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

# ComfyUI chooses torch's allocator, so nothing that imports torch may be imported before it starts.
from comfyui import inprocess

HEAD_DIM = 128
FRAME = (24, 42)
SINK = (0, 356)  # text and audio rows of a short clip
MIB = 2**20

rows: list[dict[str, Any]] = []


def main() -> None:
    options = _options()
    inprocess.start()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("bench attention needs a CUDA GPU")
    with torch.inference_mode():
        _machine(options)
        for tokens in options.lengths:
            Bench(options, tokens).run()
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[16384, 32868, 75000])
    parser.add_argument("--heads", type=int, default=56)
    parser.add_argument("--taus", type=float, nargs="*", default=[0.5, 1.0, 1.5, 2.0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", help="also write the table to this file")
    return parser.parse_args()


def _machine(options: argparse.Namespace) -> None:
    import comfyui_version
    import torch

    for label, value in (
        ("GPU", torch.cuda.get_device_name()),
        (
            "ComfyUI / torch / comfy-kitchen",
            f"{comfyui_version.__version__} / {torch.__version__} / {version('comfy-kitchen')}",
        ),
        ("shape", f"{options.heads} heads x {HEAD_DIM}, batch 1, bf16, median of {options.repeats}"),
    ):
        print(f"{label:<34} {value}", flush=True)


class Bench:
    """All measurements of one sequence length."""

    def __init__(self, options: argparse.Namespace, tokens: int):
        import torch

        self.options = options
        self.tokens = tokens
        self.device = torch.device("cuda")
        # Views of one fused buffer, as H3's qkv projection leaves them: [B, T, H, D].
        self.q, self.k, self.v = _correlated(tokens, options.heads, self.device)
        self.base = inprocess.pack_module("kernels_glue.attention.sol")
        self.dense_module = inprocess.pack_module("kernels_glue.attention.dense")
        self.providers = inprocess.pack_module("kernels_glue.attention.providers")
        self.reference = inprocess.pack_module("kernels_glue.attention.reference")
        self.call = inprocess.pack_module("kernels_glue.attention.call").read_call(
            *(t.transpose(1, 2) for t in (self.q, self.k, self.v)), options.heads, skip_reshape=True
        )

    def run(self) -> None:
        print(f"\n--- {self.tokens} tokens", flush=True)
        # Two heads say what all do, and fp32 scores of all would take minutes.
        self.few = tuple(t[:, :, :2] for t in (self.q, self.k, self.v))
        self.exact = _attend_fp32(*self.few)
        self._dense()
        for provider in self.providers.PROVIDERS.values():
            if provider.name != "reference":
                self._provider(provider)

    def row(self, name: str, **figures: Any) -> None:
        rows.append({"tokens": self.tokens, "name": name, **figures})
        shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        print(f"{name:<44} {shown}", flush=True)

    # --- dense ----------------------------------------------------------------------------------

    def _dense(self) -> None:
        fa = self.dense_module.BACKENDS["fa"]
        for name, run in self._dense_kernels(fa):
            try:
                out = run(self.call)
            except Exception as error:
                self.row(f"dense {name}", failed=str(error).splitlines()[0])
                continue
            error = _difference(out.transpose(1, 2)[:, :, :2], self.exact)
            del out
            ms = self._time(lambda run=run: run(self.call))
            self.row(
                f"dense {name}", ms=ms, error=error, extra_MiB=self._extra(lambda run=run: run(self.call))
            )
        print(f"  fa chooses {fa.choose(self.call).name}: {fa.timing_text(self.call)}", flush=True)

    def _dense_kernels(self, fa: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        for candidate in fa._candidates:
            if why := candidate.missing(self.device) or candidate.unfit(self.call):
                self.row(f"dense fa: {candidate.name}", missing=why)
            else:
                yield f"fa: {candidate.name}", candidate.run
        for name, backend in self.dense_module.BACKENDS.items():
            if name == "fa":
                continue
            if why := backend.missing(self.device) or backend.unfit(self.call):
                self.row(f"dense {name}", missing=why)
            else:
                yield name, lambda call, backend=backend: backend.run(call).out

    # --- sparse ---------------------------------------------------------------------------------

    def _provider(self, provider: Any) -> None:
        if why := provider.missing(self.device):
            self.row(f"sol {provider.name}", missing=why)
            return
        scale = HEAD_DIM**-0.5
        for tau in self.options.taus:
            for sinks in (self.base.NO_ROWS, SINK):
                queries = sinks if provider.exact_queries else self.base.NO_ROWS
                asked = self.base.SolOptions(tau, scale, sink_keys=sinks, sink_queries=queries)
                self._sparse(f"sol {provider.name} tau {tau:g}", provider, asked)
        if provider.name == "kitchen":
            asked = self.base.SolOptions(1.0, scale, token_aug=256)
            if not provider.unsupported(asked):
                self._sparse("sol kitchen tau 1 token_aug 256", provider, asked)
        if provider.name == "builtin":
            self._builtin()
        self._glue(provider)

    def _builtin(self) -> None:
        """Parts of the pack's own kernel: what it prepares, its scratch, and each way to cut it."""
        kernel = inprocess.pack_module("kernels_glue.attention.sol_triton")
        cuts = inprocess.pack_module("kernels_glue.attention.sol_tiles")
        sm = inprocess.pack_module("kernels_glue.attention.devices").sm_of(self.device)
        everything = sum(t.nbytes for t in (self.q, self.k, self.v)) / MIB

        def run(tile: Any, tau: float = 1.0) -> Any:
            return kernel.sol_triton(self.q, self.k, self.v, tau=tau, tile=tile)

        works = []
        for tau, tile in itertools.product(self.options.taus, cuts.tiles_for(sm)):
            name = f"builtin tau {tau:g}, cut {tile}"
            try:
                self.row(name, ms=self._time(lambda tile=tile, tau=tau: run(tile, tau)))
                works.append(tile)
            except Exception as error:
                self.row(name, failed=str(error).splitlines()[0])
        if not works:
            return
        result = run(works[0])
        scratch = self._extra(lambda: run(works[0]).out)
        self.row(
            "builtin: preparation, scratch, its own count",
            ms=self._time(lambda: kernel.prepare(self.k, self.v)),
            scratch_MiB=scratch,
            of_qkv=f"{scratch / everything:.2%}",
            exact_blocks=float(result.density),
        )

    def _sparse(self, name: str, provider: Any, asked: Any) -> None:
        import torch

        def run() -> torch.Tensor:
            return provider.run(self.q, self.k, self.v, asked).out

        out = run()[:, :, :2].clone()
        of = self.reference.sol_centroid if provider.name == "kitchen" else self.reference.sol_rowwise
        sinks = {"sink_keys": asked.sink_keys, "sink_queries": asked.sink_queries}
        same = of(*self.few, scale=asked.scale, tau=asked.tau, compute_dtype=torch.float64, **sinks)
        ms = self._time(run)
        self.row(
            name + (" sinks" if asked.sink_keys != self.base.NO_ROWS else ""),
            ms=ms,
            TFLOP_s=self._operations(float(same.density)) / ms / 1e9,
            error=_difference(out, self.exact),
            # The references know no single keys.
            **({} if asked.token_aug else {"of_reference": _difference(out, same.out)}),
            exact_blocks=float(same.density),
            extra_MiB=self._extra(run),
        )

    def _operations(self, density: float) -> float:
        """Multiplications and additions of the exact blocks and of the pooled terms; query sinks left out."""
        keys = self.tokens * density + self.tokens / self.base.BLOCK
        return 4.0 * self.options.heads * HEAD_DIM * self.tokens * keys

    def _glue(self, provider: Any) -> None:
        """The override as ComfyUI calls it, against the kernel alone: time, and memory beyond its own."""
        import torch

        override, asked = _override(self, provider)

        def direct() -> torch.Tensor:
            return provider.run(self.q, self.k, self.v, asked).out

        def through() -> torch.Tensor:
            return override(
                torch.nn.functional.scaled_dot_product_attention,
                *(t.transpose(1, 2) for t in (self.q, self.k, self.v)),
                self.options.heads,
                mask=None,
                skip_reshape=True,
                transformer_options={},
            )

        # In turns, so that a clock that drifts is the same for both.
        times: dict[str, list[float]] = {"direct": [], "through": []}
        for _ in range(3):
            times["direct"].append(self._time(direct, alone=True))
            times["through"].append(self._time(through, alone=True))
        ms = {name: statistics.median(values) for name, values in times.items()}
        copied = self._extra(through) - self._extra(direct)
        self.row(
            f"glue around {provider.name}",
            ms=ms["through"],
            direct_ms=ms["direct"],
            overhead=f"{ms['through'] / ms['direct'] - 1:.2%}",
            beyond_kernel_MiB=copied,
        )

    # --- measuring ------------------------------------------------------------------------------

    def _time(self, function: Callable[[], Any], alone: bool = False) -> float:
        """Median milliseconds by the pack's own clock; `alone`: with what the host needs to launch."""
        timings = inprocess.pack_module("kernels_glue.attention.timings")
        for _ in range(2):
            function()
        return timings.cuda_milliseconds(function, self.device, self.options.repeats, alone)

    def _extra(self, function: Callable[[], Any]) -> float:
        """Peak device memory of a call beyond its inputs and its output, in MiB."""
        import torch

        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before - out.nbytes) / MIB


def _override(bench: Bench, provider: Any) -> tuple[Any, Any]:
    """The pack's override around one kernel, inside of an evaluation, and what it asks the kernel."""
    module = inprocess.pack_module
    config = module("kernels_glue.attention.config").SolConfig(
        provider=provider.name, dense_layers="", kv_splits="1"
    )
    tally = module("kernels_glue.attention.tally").Tally()
    router = module("kernels_glue.attention.routing").Router([provider], 0)
    layers = module("kernels_glue.attention.layers")
    evaluation = module("kernels_glue.attention.evaluation")
    current = evaluation.Evaluation(
        module("kernels_glue.attention.schedule").Step(0, False, 1.0),
        layers.parse_layers("", 1),
        layers.LayerCounter((("blocks", 1),), False),
        module("kernels_glue.attention.sinks").SinkRule(None, False, False),
        lambda tokens: (0, 0),
        0,
    )
    override = module("kernels_glue.attention.override").SolOverride(
        config, router, None, lambda: tally, lambda: current
    )
    return override, bench.base.SolOptions(1.0, HEAD_DIM**-0.5)


def _correlated(tokens: int, heads: int, device: Any) -> tuple[Any, Any, Any]:
    import torch

    generator = torch.Generator(device).manual_seed(0)
    frames = -(-tokens // (FRAME[0] * FRAME[1]))
    qkv = torch.empty(1, tokens, 3, heads, HEAD_DIM, device=device, dtype=torch.bfloat16)

    def noise() -> torch.Tensor:
        return torch.randn(tokens, HEAD_DIM, generator=generator, device=device)

    def field() -> torch.Tensor:
        coarse = (1, HEAD_DIM, max(frames // 2, 2), FRAME[0] // 4, FRAME[1] // 4)
        drawn = torch.randn(coarse, generator=generator, device=device)
        fine = torch.nn.functional.interpolate(drawn, size=(frames, *FRAME), mode="trilinear")
        return (fine / fine.std()).flatten(2)[0].T[:tokens]

    for head in range(heads):
        place = field()
        qkv[0, :, 0, head] = 0.75 * place + 0.75 * noise()
        qkv[0, :, 1, head] = 0.75 * place + 0.75 * noise()
        qkv[0, :, 2, head] = field() + 0.5 * noise()
    return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]


def _attend_fp32(q: Any, k: Any, v: Any) -> Any:
    """Dense attention of [B, T, H, D] in fp32, a few rows at a time."""
    import torch

    out = torch.empty(q.shape, device=q.device)
    for head in range(q.shape[2]):
        q_h, k_h, v_h = (t[0, :, head].float() for t in (q, k, v))
        for start in range(0, q.shape[1], 4096):
            scores = q_h[start : start + 4096] @ k_h.T * HEAD_DIM**-0.5
            out[0, start : start + 4096, head] = scores.softmax(-1) @ v_h
    return out


def _difference(out: Any, exact: Any) -> float:
    return float((out.float() - exact.float()).norm() / exact.float().norm())


if __name__ == "__main__":
    main()
