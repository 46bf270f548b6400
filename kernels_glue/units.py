"""Numbers in words. Pure."""

from __future__ import annotations

_MIB = 2**20
_GIB = 2**30


def size(count: float) -> str:
    """Bytes in GiB, which is what inputs are given in, or in MiB where that would say little."""
    return f"{count / _GIB:.2f} GiB" if count >= _GIB / 10 else f"{count / _MIB:.2f} MiB"


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
