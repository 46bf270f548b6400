"""What is asked of Sol attention and what it gives, in the paper's terms (arXiv 2607.24027)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 64
HEAD_DIMS = (64, 128)
NO_ROWS = (0, 0)


@dataclass(frozen=True)
class SolOptions:
    """What is asked of a Sol kernel, in the paper's terms (arXiv 2607.24027).

    Attributes:
        tau: threshold in standard deviations of a query block's scores; higher is sparser.
        scale: factor of the scores.
        thresh_type: `diag` or `exact`, how that deviation is computed.
        kv_splits: parts into which the keys are split (SM90 only).
        token_aug: single keys that are routed besides blocks: 0, or a multiple of 64 up to 256.
        sink_keys: rows [start, stop) that are exact as keys for every query.
        sink_queries: rows [start, stop) that attend to everything exactly.
    """

    tau: float
    scale: float
    thresh_type: str = "diag"
    kv_splits: int = 1
    token_aug: int = 0
    sink_keys: tuple[int, int] = NO_ROWS
    sink_queries: tuple[int, int] = NO_ROWS


@dataclass(frozen=True)
class SolResult:
    """Output of a Sol kernel.

    Attributes:
        out: [B, T, H, D].
        density: share of (query block, key block) pairs that were computed exactly, a scalar on the device
            that nobody has waited for; None if the kernel does not tell.
    """

    out: torch.Tensor
    density: torch.Tensor | None = None


def blocks_of(rows: tuple[int, int]) -> tuple[int, int]:
    """The blocks [start, stop) that a range of rows touches: widened, never cut."""
    start, stop = rows
    return (start // BLOCK, -(-stop // BLOCK)) if stop > start else NO_ROWS
