"""Stand-ins for the package sageattention, which needs a GPU: same signatures, same traps.

They compute in fp64 what the kernels compute in INT8, and keep what matters to a caller: which tensors are
changed, what is cast to fp16, and what fails.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from dense_checks import exact

_KEY_BLOCK = 64


def version_1() -> ModuleType:
    """sageattention 1.0.6."""

    def sageattn(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: float | None = None,
        smooth_k: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        _check(q, k, v, tensor_layout)
        if smooth_k:
            k -= k.mean(dim=2, keepdim=True)
        module.smoothed.append(bool(k.float().mean(dim=2).abs().max() < 0.05))
        return _fp16_kernel(q, k, v, is_causal, sm_scale, phantoms=-k.shape[2] % _KEY_BLOCK)

    module = _module(sageattn)
    module.smoothed = []
    return module


def version_2(sm: tuple[int, int], *, pads: bool = False) -> ModuleType:
    """sageattention 2.x on a card; `pads`: the releases that pad V to 128 rows themselves."""

    def sageattn(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: float | None = None,
        return_lse: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        _check(q, k, v, tensor_layout)
        if sm[0] in (10, 11):
            raise ValueError(f"Unsupported CUDA architecture: sm{sm[0]}{sm[1]}")
        if sm < (8, 9):
            return _fp16_kernel(q, k, v, is_causal, sm_scale)
        rows = k.shape[2]
        if pads:
            v = torch.nn.functional.pad(v, (0, 0, 0, -rows % 128))
        if sm[0] == 9 and rows % 128 > 64 and v.shape[2] < rows + -rows % 128:
            raise SystemError("the process would be aborted here")
        return exact(q, k, v[:, :, :rows], scale=sm_scale, causal=is_causal).to(q.dtype)

    module = _module(sageattn)
    module.sageattn_qk_int8_pv_fp16_cuda = None
    return module


def _module(sageattn: Any) -> ModuleType:
    module = ModuleType("sageattention")
    module.sageattn = sageattn
    return module


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str) -> None:
    assert tensor_layout == "HND"
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype, "All tensors must have the same dtype."
    assert q.shape[3] in (64, 96, 128), "headdim should be in [64, 96, 128]."
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Last dim of qkv must be contiguous."


def _fp16_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, phantoms: int = 0
) -> torch.Tensor:
    """V in fp16, and the sum over each block of 64 keys as well; between blocks in fp32.

    1.0.6 reads zeros for the keys that are missing in the last block, and counts them unless it is causal.
    """
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, phantoms)) for t in (k, v))
    scores = q.double() @ k.double().mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    blocks = zip(weights.split(_KEY_BLOCK, -1), v.half().split(_KEY_BLOCK, 2), strict=True)
    total = sum((w @ rows.double()).half().float() for w, rows in blocks)
    return (total / weights.sum(-1, keepdim=True)).to(q.dtype)
