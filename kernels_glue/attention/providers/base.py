"""What a Sol kernel is to the rest of the pack."""

from __future__ import annotations

from typing import Protocol

import torch

from ..sol import SolOptions, SolResult


class Provider(Protocol):
    """A Sol kernel. All tensors are [B, T, H, D].

    Attributes:
        name: as the node's `provider` option spells it.
        min_tokens: sequences from this length on are worth it.
        exact_queries: whether `run` honours `sink_queries`; if not, the caller computes these rows.
    """

    name: str
    min_tokens: int
    exact_queries: bool

    def missing(self, device: torch.device) -> str:
        """Why it cannot run on this device at all, with the way out; empty if it can."""

    def unsupported(self, options: SolOptions) -> str:
        """Which option it does not have, as a clause about it; empty if it has all."""

    def unfit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
        """Why it cannot take these tensors, for example "head_dim 64, not 128"; empty if it can."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolOptions) -> SolResult:
        """Computes the attention. Called only if the three questions above were answered with nothing."""
