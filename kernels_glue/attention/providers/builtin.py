"""provider=builtin: the pack's own Triton kernels, for every NVIDIA GPU from SM 8.0 on."""

from __future__ import annotations

import math

import torch

from ..sol import HEAD_DIMS, SolOptions, SolResult
from ..sol_tiles import Tile, TileChooser
from ..sol_triton import DTYPES, far_apart, revision, sol_triton
from .devices import too_old
from .packages import triton_problem
from .signature import Argument, accepted, refusal
from .tensors import aligned, misfit, packed

# The oldest that compiles the kernels for SM 8.0 to 12.0.
_TRITON_FLOOR = (3, 4)


class BuiltinSol:
    """Row-wise Sol attention, bf16 and fp16, head_dim 64 and 128; views of a fused QKV go in as they are."""

    name = "builtin"
    min_tokens = 8192
    exact_queries = True

    def __init__(self, tiles: TileChooser | None = None):
        self._tiles = tiles or TileChooser()

    def missing(self, device: torch.device) -> str:
        return too_old(device) or triton_problem(_TRITON_FLOOR)

    def unsupported(self, options: SolOptions) -> str:
        if not 0 < options.scale < math.inf:
            return f"needs a finite scale above 0 ({options.scale} asked)"
        return refusal(sol_triton, _arguments(options))

    def unfit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
        return misfit(q, k, v, DTYPES, HEAD_DIMS)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolOptions) -> SolResult:
        import triton

        arguments = accepted(sol_triton, _arguments(options))
        q, k, v = map(_near, (q, k, v))

        def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile) -> SolResult:
            return sol_triton(q, k, v, tile=tile, **arguments)

        versions = f"{torch.__version__} triton {triton.__version__} kernels {revision()}"
        return compute(q, k, v, self._tiles.choose(q, k, v, compute, versions))


def _near(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where the kernels would be slow on it, or could not count its rows."""
    return packed(tensor) if far_apart(tensor) else aligned(tensor)


def _arguments(options: SolOptions) -> list[Argument]:
    return [
        Argument("tau", options.tau),
        Argument("scale", options.scale),
        Argument("thresh_type", options.thresh_type),
        Argument("sink_keys", options.sink_keys),
        Argument("sink_queries", options.sink_queries),
        Argument("kv_splits", options.kv_splits, 1),
        Argument("token_aug", options.token_aug, 0),
    ]
