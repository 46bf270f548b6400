"""Test conditioning, shared by the in-process harness and the nodes that the server loads."""

from __future__ import annotations

from typing import Any

import torch


def make_conditioning(
    tokens: int, width: int, pooled_width: int, seed: int, attention_mask: bool = False
) -> list[list[torch.Tensor | dict[str, Any]]]:
    """Random CONDITIONING: text states [1, tokens, width] and, if pooled_width is not 0,
    `pooled_output` [1, pooled_width]. Standard normal fp32 on the CPU, deterministic for a seed.

    attention_mask: add an `attention_mask` [1, tokens] that masks nothing, which LTX cannot do without.
    """
    generator = torch.Generator().manual_seed(seed)
    extra: dict[str, Any] = {}
    context = torch.randn(1, tokens, width, generator=generator)
    if pooled_width:
        extra["pooled_output"] = torch.randn(1, pooled_width, generator=generator)
    if attention_mask:
        extra["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
    return [[context, extra]]
