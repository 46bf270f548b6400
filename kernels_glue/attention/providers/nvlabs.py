"""provider=nvlabs: the paper authors' kernels (`sol_attn`, from NVlabs/Sana): CuTe, and Triton where CuTe
is not for the device or not installed."""

from __future__ import annotations

from types import ModuleType

import torch

from ...commands import pip
from ..devices import sm_of
from ..sol import BLOCK, SolOptions, SolResult
from .devices import too_old
from .packages import load, triton_problem
from .signature import Argument, accepted, refusal
from .tensors import misfit, packed, sink_tokens

_SOURCE = "sol_attn @ git+https://github.com/NVlabs/Sana#subdirectory=techniques/sparse_backends/sol_attn"
_SPLIT_SM = (9, 0)
_SPLIT_BACKEND = "cute_sm90"


class NvlabsSol:
    """The official Sol attention: contiguous [B, T, H, 128] bf16, so views of a fused QKV are copied."""

    name = "nvlabs"
    min_tokens = 8192  # where Wan2GP switches its Sol attention on
    exact_queries = False

    def missing(self, device: torch.device) -> str:
        if problem := too_old(device):
            return problem
        package, problem = load("sol_attn")
        if package is None or not callable(getattr(package, "sol_attn", None)):
            what = problem or (
                "sol_attn is not installed" if package is None else "sol_attn has no sol_attn()"
            )
            command = pip(f'install "{_SOURCE}"')
            return f"{what}; run: {command} and restart ComfyUI"
        # Every backend of the package, CuTe's too, prepares its thresholds with Triton.
        return triton_problem()

    def unsupported(self, options: SolOptions) -> str:
        package = _package()
        if problem := refusal(package.sol_attn, _arguments(options)):
            return problem
        if options.kv_splits != 1 and not _can_split(package):
            return f"has kv_splits on SM 9.0 with CuTe only ({options.kv_splits} asked)"
        return ""

    def unfit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
        return misfit(q, k, v, (torch.bfloat16,))

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolOptions) -> SolResult:
        function = _package().sol_attn
        arguments = accepted(function, _arguments(options, q.shape[1]))
        return SolResult(function(packed(q), packed(k), packed(v), **arguments))


def _package() -> ModuleType:
    package, _ = load("sol_attn")
    return package


def _can_split(package: ModuleType) -> bool:
    """Whether the current device's backend takes kv_splits; options are asked about before a call is seen."""
    if not torch.cuda.is_available():
        return False
    device = torch.device("cuda", torch.cuda.current_device())
    backend = getattr(package, "get_sol_attn_backend", None)
    return sm_of(device) == _SPLIT_SM and (backend is None or backend(device) == _SPLIT_BACKEND)


def _arguments(options: SolOptions, tokens: int | None = None) -> list[Argument]:
    count, start = sink_tokens(options)
    splits = options.kv_splits if tokens is None else _fitting_splits(options.kv_splits, tokens)
    return [
        Argument("tau", options.tau),
        Argument("scale", options.scale),
        Argument("thresh_type", options.thresh_type, "diag"),
        Argument("kv_splits", splits, 1),
        Argument("sink_tokens", count, 0),
        Argument("sink_start", start),
        Argument("token_aug", options.token_aug, 0),
    ]


def _fitting_splits(kv_splits: int, tokens: int) -> int:
    """Fewer splits for a short sequence: the kernel refuses a split without 64 key blocks to route.

    Splitting is about speed and not about the result, so this is no other choice than the user's.
    """
    groups = -(-tokens // (BLOCK * 64))
    while kv_splits > groups:
        kv_splits //= 2
    return kv_splits
