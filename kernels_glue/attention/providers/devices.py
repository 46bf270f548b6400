"""Whether a device is anything for the paper's kernels."""

from __future__ import annotations

import torch

from ..devices import sm_of

OLDEST_SM = (8, 0)


def too_old(device: torch.device) -> str:
    """Why a device is nothing for the CUDA kernels of the paper; empty if it is."""
    sm = sm_of(device)
    if sm is None:
        return f"needs an NVIDIA GPU, not {device.type}"
    if sm < OLDEST_SM:
        return f"needs an NVIDIA GPU from SM 8.0 on, not SM {sm[0]}.{sm[1]}"
    return ""
