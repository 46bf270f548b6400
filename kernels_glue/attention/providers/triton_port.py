"""provider=triton: a Triton version of the paper's kernels, from whichever package has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..devices import sm_of
from ..sol import SolOptions, SolResult
from .devices import too_old
from .packages import load, triton_problem
from .signature import Argument, accepted, refusal
from .tensors import dense_last_dim, misfit, packed, past_32_bits, sink_tokens


@dataclass(frozen=True)
class _Source:
    """A module with a `sol_attn`, and whether it reads strides or wants contiguous tensors."""

    module: str
    strided: bool


# In order of preference. The official package's reference addresses its inputs as contiguous tensors.
_SOURCES = (
    _Source("sol_attn_triton", strided=True),
    _Source("shared.sol_attn", strided=True),
    _Source("sol_attn.triton_ref", strided=False),
)
# Where INT8 scores exist and pay: Wan2GP's list from SM 8.9 on, but for SM 9.0, where they took 20.9 ms and
# bf16 14.5 (H200, 32,868 tokens of 56 x 128, tau 1).
_INT8_QK = {(8, 9), (10, 0), (12, 0), (12, 1)}


class TritonSol:
    """Triton Sol attention on [B, T, H, 128] bf16; the port reads the strides of a fused QKV as they are.

    Its INT8 path addresses a whole batch with 32 bits: past 2**31 elements it reads outside of its tensors,
    which ends the CUDA context (seen on an H200). Larger batches go through one sample at a time.
    """

    name = "triton"
    min_tokens = 8192  # where Wan2GP switches its Sol attention on
    exact_queries = False

    def missing(self, device: torch.device) -> str:
        if problem := too_old(device) or triton_problem():
            return problem
        if _find() is None:
            problems = [problem for source in _SOURCES if (problem := load(source.module)[1])]
            names = ", ".join(source.module for source in _SOURCES)
            found = "; ".join(problems) or "no Triton version of sol_attn is installed"
            return f"{found} ({names}); put one of them on the Python path"
        return ""

    def unsupported(self, options: SolOptions) -> str:
        return refusal(_require()[0], _arguments(options))

    def unfit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
        return misfit(q, k, v, (torch.bfloat16,)) or past_32_bits(q)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolOptions) -> SolResult:
        function, strided = _require()
        int8_qk = sm_of(q.device) in _INT8_QK
        arguments = accepted(function, [*_arguments(options), Argument("int8_qk", int8_qk)])
        fit = dense_last_dim if strided else packed
        if not past_32_bits(q, q.shape[0]):
            return SolResult(function(fit(q), fit(k), fit(v), **arguments))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for sample in zip(out.split(1), q.split(1), k.split(1), v.split(1), strict=True):
            sample[0].copy_(function(*(fit(tensor) for tensor in sample[1:]), **arguments))
        return SolResult(out)


def _find() -> tuple[Callable[..., torch.Tensor], bool] | None:
    """(function, whether it reads strides) of the first source that can be imported."""
    for source in _SOURCES:
        module, _ = load(source.module)
        if callable(function := getattr(module, "sol_attn", None)):
            return function, source.strided
    return None


def _require() -> tuple[Callable[..., torch.Tensor], bool]:
    found = _find()
    if found is None:
        raise ModuleNotFoundError("no Triton version of sol_attn is installed")
    return found


def _arguments(options: SolOptions) -> list[Argument]:
    count, start = sink_tokens(options)
    return [
        Argument("tau", options.tau),
        Argument("scale", options.scale),
        Argument("thresh_type", options.thresh_type, "diag"),
        Argument("kv_splits", options.kv_splits, 1),
        Argument("token_aug", options.token_aug, 0),
        Argument("sink_tokens", count, 0),
        Argument("sink_start", start),
    ]
