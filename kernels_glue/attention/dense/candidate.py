"""A kernel among which the backend `fa` chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..call import AttentionCall


@dataclass(frozen=True)
class Candidate:
    """An exact attention kernel.

    Attributes:
        name: as it is stored and shown.
        missing: why it cannot run on a device at all; empty if it can.
        unfit: why it cannot take a call; empty if it can. Asked only where it is not missing.
        run: the attention, [B, H, T, D]; leaves q, k and v as they are.
    """

    name: str
    missing: Callable[[torch.device], str]
    unfit: Callable[[AttentionCall], str]
    run: Callable[[AttentionCall], torch.Tensor]
