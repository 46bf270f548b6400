"""Doubles of Sol packages that no registry has: the same signatures, the same checks of their inputs but
for the device, and the row-wise reference for the numbers.

NVlabs/Sana techniques/sparse_backends/sol_attn (interface.py) and deepbeepmeep/Wan2GP shared/sol_attn
(interface.py).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfyui import inprocess

reference = inprocess.pack_module("kernels_glue.attention.reference")
sol = inprocess.pack_module("kernels_glue.attention.sol")
_ASK_FOR_SM = [
    inprocess.pack_module(f"kernels_glue.attention.providers.{name}")
    for name in ("devices", "nvlabs", "triton_port")
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SCALE = 0.07  # neither 128 ** -0.5 nor 1


def options(tau: float = 1.0, **others: Any) -> Any:
    return sol.SolOptions(tau, SCALE, **others)


def of_fused(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same values as [B, T, H, D] views of one [B, T, 3, H, D] projection."""
    return list(torch.stack(tensors, dim=2).unbind(2))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of any size, without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def far(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory of the same shape, whose rows are further apart than Triton's kernels count."""
    batch, tokens, heads, head_dim = tensor.shape
    strides = (tokens * 2**25, 2**25, head_dim, 1)
    return torch.empty_strided((batch, tokens, heads, head_dim), strides, dtype=tensor.dtype, device="meta")


def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills what torch.empty gives with NaN, and with numbers that point nowhere."""
    made = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = made(*shape, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max // 2)

    monkeypatch.setattr(torch, "empty", poisoned)


def pretend_sm(monkeypatch: pytest.MonkeyPatch, *sm: int) -> None:
    """Makes every device an NVIDIA GPU of this compute capability, for the adapters."""
    for module in _ASK_FOR_SM:
        monkeypatch.setattr(module, "sm_of", lambda device: sm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def official(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    tau: float = 1.0,
    thresh_type: str = "diag",
    kv_splits: int = 1,
    sink_tokens: int = 0,
    sink_start: int | None = None,
) -> torch.Tensor:
    """`sol_attn.sol_attn` on a device that has every feature (SM 9.0 with CuTe)."""
    _check(q, k, v, thresh_type, sink_tokens, sink_start)
    _check_contiguous(q, k, v)
    if kv_splits not in (1, 2, 4):
        raise ValueError("kv_splits must be 1, 2, or 4")
    if kv_splits > -(-q.shape[1] // 4096):
        raise ValueError("a KV split without a group of 64 blocks")
    return _rowwise(q, k, v, scale, tau, thresh_type, sink_tokens, sink_start)


def official_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    tau: float = 1.0,
    thresh_type: str = "diag",
    sink_tokens: int = 0,
    sink_start: int | None = None,
) -> torch.Tensor:
    """`sol_attn.triton_ref.sol_attn`: contiguous tensors as well."""
    _check(q, k, v, thresh_type, sink_tokens, sink_start)
    _check_contiguous(q, k, v)
    return _rowwise(q, k, v, scale, tau, thresh_type, sink_tokens, sink_start)


def wan2gp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    tau: float = 1.0,
    thresh_type: str = "diag",
    sink_tokens: int = 0,
    sink_start: int | None = None,
    query_start: int = 0,
    recycle_q: bool = False,
    int8_qk: bool = False,
    int8_pv: bool = False,
) -> torch.Tensor:
    """`shared.sol_attn.sol_attn`: any strides with a contiguous last dimension."""
    if int8_pv and not int8_qk:
        raise ValueError("int8_pv requires int8_qk")
    _check(q, k, v, thresh_type, sink_tokens, sink_start)
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        raise ValueError("q, k and v must have a contiguous head dimension")
    if not 0 <= query_start < q.shape[1]:
        raise ValueError("query_start must be in [0, T)")
    if int8_qk and query_start:
        raise ValueError("int8_qk requires query_start=0")
    out = _rowwise(q, k, v, scale, tau, thresh_type, sink_tokens, sink_start)
    out[:, : query_start // 64 * 64] = torch.nan  # the real one leaves them uninitialised
    return out


class Spy:
    """Stands in front of a function: same signature, remembers the tensors and keywords of each call."""

    def __init__(self, function: Callable[..., torch.Tensor]):
        self.calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = []
        self._function = function
        self.__wrapped__ = function  # what inspect.signature looks at

    def __call__(self, *tensors: torch.Tensor, **keywords: Any) -> torch.Tensor:
        self.calls.append((tensors, keywords))
        return self._function(*tensors, **keywords)

    @property
    def keywords(self) -> dict[str, Any]:
        return self.calls[-1][1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.calls[-1][0]


def install(
    monkeypatch: pytest.MonkeyPatch, module: str, function: Callable[..., torch.Tensor], **others: Any
) -> Spy:
    """Makes `import <module>` find a module whose `sol_attn` is a spy on the function."""
    made = types.ModuleType(module)
    spy = Spy(function)
    vars(made).update(sol_attn=spy, **others)
    monkeypatch.setitem(sys.modules, module, made)
    return spy


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    thresh_type: str,
    sink_tokens: int,
    sink_start: int | None,
) -> None:
    if q.ndim != 4 or not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must share the shape [B, T, H, 128]")
    tokens = q.shape[1]
    if tokens == 0 or q.shape[3] != 128:
        raise ValueError("T > 0 and head dimension 128")
    if any(t.dtype != torch.bfloat16 for t in (q, k, v)):
        raise TypeError("q, k and v must be bfloat16")
    if thresh_type not in ("diag", "exact"):
        raise ValueError("thresh_type must be diag or exact")
    if not isinstance(sink_tokens, int) or not isinstance(sink_start, int | None):
        raise TypeError("sink_tokens and sink_start must be integers")
    if not 0 <= sink_tokens <= tokens or not 0 <= (sink_start or 0) <= tokens:
        raise ValueError("sinks outside of the sequence")
    if sink_start is not None and sink_start + sink_tokens > tokens:
        raise ValueError("sinks outside of the sequence")


def _check_contiguous(*tensors: torch.Tensor) -> None:
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError("q, k and v must be contiguous [B, T, H, D] tensors")


def _rowwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    tau: float,
    thresh_type: str,
    sink_tokens: int,
    sink_start: int | None,
) -> torch.Tensor:
    start = q.shape[1] - sink_tokens if sink_start is None else sink_start
    sinks = (start, start + sink_tokens) if sink_tokens else (0, 0)
    return reference.sol_rowwise(q, k, v, scale=scale, tau=tau, thresh_type=thresh_type, sink_keys=sinks).out
