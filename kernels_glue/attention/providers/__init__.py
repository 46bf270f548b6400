"""The Sol kernels: the table of them, the order in which `auto` tries them, and its kv_splits."""

from __future__ import annotations

from .base import Provider
from .builtin import BuiltinSol
from .kitchen import KitchenSol
from .nvlabs import NvlabsSol
from .reference import ReferenceSol
from .triton_port import TritonSol

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (KitchenSol(), NvlabsSol(), TritonSol(), ReferenceSol(), BuiltinSol())
}

# The authors' kernels are written for these.
_CUTE_SM = {(9, 0), (10, 0)}
_SPLIT_SM, _SPLIT_TOKENS, _SPLITS = (9, 0), 65536, 4


def auto_order(sm: tuple[int, int] | None) -> tuple[str, ...]:
    """The providers that `auto` looks at; where several can run a call, a timing on the device decides.

    The first is taken where nothing can be timed. The reference is for those who ask for it.

    Args:
        sm: compute capability of an NVIDIA GPU; None for anything else, where only comfy_kitchen may have
            a kernel (AMD).
    """
    if sm is None:
        return ("kitchen",)
    if sm in _CUTE_SM:
        return ("builtin", "nvlabs", "triton", "kitchen")
    return ("kitchen", "builtin", "nvlabs", "triton")


def kv_splits_for(choice: str, sm: tuple[int, int] | None, tokens: int) -> int:
    """The number of key splits that the node's option `kv_splits` means for a call.

    Args:
        choice: `auto`, or a number as text. `auto` is sglang's rule: 4 on SM 9.0 from 65,536 tokens on.
    """
    if choice != "auto":
        return int(choice)
    return _SPLITS if sm == _SPLIT_SM and tokens >= _SPLIT_TOKENS else 1
