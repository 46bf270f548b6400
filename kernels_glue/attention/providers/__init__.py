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

# The authors' kernels are written for these. Of the others comfy_kitchen's is the fastest in long sequences
# that was measured (docs/measured.md, SM 9.0); `builtin`, which needs only Triton, takes what it cannot.
_CUTE_SM = {(9, 0), (10, 0)}
_SPLIT_SM, _SPLIT_TOKENS, _SPLITS = (9, 0), 65536, 4


def auto_order(sm: tuple[int, int] | None) -> tuple[str, ...]:
    """The providers that `auto` tries, the fastest first; the reference is for those who ask for it.

    Args:
        sm: compute capability of an NVIDIA GPU; None for anything else, where only comfy_kitchen may have
            a kernel (AMD).
    """
    if sm is None:
        return ("kitchen",)
    first = ("nvlabs", "kitchen") if sm in _CUTE_SM else ("kitchen", "nvlabs")
    return (*first, "builtin", "triton")


def kv_splits_for(choice: str, sm: tuple[int, int] | None, tokens: int) -> int:
    """The number of key splits that the node's option `kv_splits` means for a call.

    Args:
        choice: `auto`, or a number as text. `auto` is sglang's rule: 4 on SM 9.0 from 65,536 tokens on.
    """
    if choice != "auto":
        return int(choice)
    return _SPLITS if sm == _SPLIT_SM and tokens >= _SPLIT_TOKENS else 1
