"""One attention call in one form, whatever form the model made it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Names under which callers say that a query sees only earlier keys.
_CAUSAL = ("is_causal", "causal")


@dataclass(frozen=True)
class AttentionCall:
    """An attention call of a model.

    Attributes:
        q, k, v: [B, H, T, D] views of what the model passed; k and v may have fewer heads (grouped heads)
            and another length (cross-attention).
        mask: as the model passed it, or None.
        scale: factor of the scores; None means D ** -0.5.
        enable_gqa: k and v have fewer heads than q.
        causal: a query sees only earlier keys.
        exact: the model asks not to approximate (LTX: `low_precision_attention=False`).
        heads: number of query heads.
        flat_output: the model wants [B, T, H * D] back, else [B, H, T, D].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scale: float | None
    enable_gqa: bool
    causal: bool
    exact: bool
    heads: int
    flat_output: bool

    @property
    def tokens(self) -> int:
        return self.q.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def is_self_attention(self) -> bool:
        """q and k have the same shape; a cross-attention of equal lengths cannot be told apart by it."""
        return self.q.shape == self.k.shape

    def output(self, out: torch.Tensor) -> torch.Tensor:
        """Brings a result [B, H, T, D] into the form that the model asked for."""
        if not self.flat_output:
            return out
        batch, heads, tokens, head_dim = out.shape
        return out.transpose(1, 2).reshape(batch, tokens, heads * head_dim)


def read_call(
    q: Any,
    k: Any,
    v: Any,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **options: Any,
) -> AttentionCall:
    """Reads the arguments of core's attention functions (`comfy.ldm.modules.attention`), without copies.

    Args:
        q, k, v: [B, T, H * D], or [B, H, T, D] with skip_reshape; tensors, one-item lists of tensors, or
            core's tensor containers, which are looked into and left as they are.
        heads: number of query heads.
        mask: added to the scores or, if boolean, keys to see; [Tq, Tk], [B, Tq, Tk] or [B, H, Tq, Tk].
        attn_precision: core's wish to compute in fp32 on some cards; only `current` follows it.
        skip_reshape, skip_output_reshape: the form of q, k and v, and of the result.
        options: core's other keywords; `scale`, `enable_gqa` and the like are read.
    """
    q, k, v = (peek(tensor) for tensor in (q, k, v))
    enable_gqa = bool(options.get("enable_gqa", False))
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (t.unflatten(-1, (-1, head_dim)).transpose(1, 2) for t in (q, k, v))
    return AttentionCall(
        q,
        k,
        v,
        mask,
        options.get("scale"),
        enable_gqa,
        any(options.get(name, False) for name in _CAUSAL),
        options.get("low_precision_attention", True) is False,
        heads,
        not skip_output_reshape,
    )


def peek(tensor: Any) -> torch.Tensor:
    """The tensor in a one-item list or in a container of core; a tensor itself is returned as it is."""
    if isinstance(tensor, torch.Tensor):
        return tensor
    if isinstance(tensor, list | tuple) and len(tensor) == 1:
        return tensor[0]
    return tensor.peek()


def as_plain(
    arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with q, k and v as tensors, for an attention function that takes nothing else."""
    plain = tuple(peek(value) for value in arguments[:3]) + arguments[3:]
    return plain, {name: peek(value) if name in ("q", "k", "v") else value for name, value in options.items()}
