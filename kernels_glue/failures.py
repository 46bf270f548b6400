"""What the exception of a kernel or a package says."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Says nothing about a kernel: with more memory it would have run."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error).lower()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
