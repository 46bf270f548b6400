"""What a dense attention backend is to the rest of the pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..call import AttentionCall


@dataclass(frozen=True)
class DenseResult:
    """Output of a dense backend.

    Attributes:
        out: [B, H, T, D].
        kernel: which kernel computed it.
        note: what there is to say about that choice; the same text for the same kind of call.
    """

    out: torch.Tensor
    kernel: str
    note: str = ""


class DenseBackend(Protocol):
    """An exact or quantized attention over all keys.

    Attributes:
        name: as the node's `dense_backend` option spells it.
        exact: it computes nothing in fewer bits than q, k and v have.
    """

    name: str
    exact: bool

    def missing(self, device: torch.device) -> str:
        """Why it cannot run on this device at all, with the way out; empty if it can."""

    def unfit(self, call: AttentionCall) -> str:
        """Why it cannot take this call (`mask`, `head_dim 160`); empty if it can."""

    def run(self, call: AttentionCall) -> DenseResult:
        """Computes the attention. q, k and v are left as they are."""
