"""provider=reference: plain PyTorch, for any device and dtype; slow."""

from __future__ import annotations

import torch

from .. import reference as sol
from ..sol import HEAD_DIMS, SolOptions, SolResult
from .signature import Argument, accepted, refusal
from .tensors import misfit


class ReferenceSol:
    """The row-wise reference as a provider."""

    name = "reference"
    min_tokens = 0
    exact_queries = True

    def missing(self, device: torch.device) -> str:
        return ""

    def unsupported(self, options: SolOptions) -> str:
        return refusal(sol.sol_rowwise, _arguments(options))

    def unfit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
        # The formulas hold for any head_dim; the node's promise is that of the kernels.
        return misfit(q, k, v, (torch.bfloat16, torch.float16, torch.float32, torch.float64), HEAD_DIMS)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolOptions) -> SolResult:
        compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        arguments = accepted(sol.sol_rowwise, _arguments(options))
        return sol.sol_rowwise(q, k, v, compute_dtype=compute_dtype, **arguments)


def _arguments(options: SolOptions) -> list[Argument]:
    return [
        Argument("tau", options.tau),
        Argument("scale", options.scale),
        Argument("thresh_type", options.thresh_type, "diag"),
        Argument("sink_keys", options.sink_keys),
        Argument("sink_queries", options.sink_queries),
        Argument("kv_splits", options.kv_splits, 1),
        Argument("token_aug", options.token_aug, 0),
    ]
