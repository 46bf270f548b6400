"""Which GPU a device is."""

from __future__ import annotations

import torch


def sm_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None for any other device.

    ROCm calls its devices `cuda`, too, and its numbers mean other things. torch keeps the answer, so asking
    costs nothing.
    """
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def described(device: torch.device) -> str:
    """A device by name and compute capability, for a key or a text."""
    if device.type != "cuda":
        return device.type
    sm = sm_of(device)
    name = torch.cuda.get_device_name(device)
    return name if sm is None else f"{name} SM {sm[0]}.{sm[1]}"
