"""`torch.nn.functional.scaled_dot_product_attention`: as ComfyUI calls it, and forced to one kernel."""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..call import AttentionCall
from ..devices import sm_of
from ..strides import within_int32
from .candidate import Candidate

# The kernels put batch and heads into grid dimensions that end at 65535; ComfyUI cuts at the same length.
BATCH_LIMIT = 2**15


def broadcastable(mask: torch.Tensor) -> torch.Tensor:
    """A mask [Tq, Tk], [B, Tq, Tk] or [B, H, Tq, Tk] as one that broadcasts to [B, H, Tq, Tk]."""
    if mask.ndim == 2:
        mask = mask.unsqueeze(0)
    return mask.unsqueeze(1) if mask.ndim == 3 else mask


def plain(call: AttentionCall) -> torch.Tensor:
    """Attention [B, H, T, D] by the kernel of torch's choice: what ComfyUI computes with no option set.

    Bit-equal to `attention_pytorch` of the ComfyUI that runs, which orders torch's kernels in its own way.
    """
    q, k, v = call.q, call.k, call.v
    mask = None if call.mask is None else broadcastable(call.mask)
    if q.device.type == "cuda":
        # torch may choose the memory-efficient kernel, whose offsets have 32 bits.
        q, k, v = (within_int32(tensor) for tensor in (q, k, v))
    step = BATCH_LIMIT if sm_of(q.device) else q.shape[0]
    if q.shape[0] <= step:
        return _attend(call, q, k, v, mask)
    parts = []
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        part = mask[rows] if mask is not None and mask.shape[0] > 1 else mask
        parts.append(_attend(call, q[rows], k[rows], v[rows], part))
    return torch.cat(parts)


def _attend(
    call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    causal = call.causal
    if causal and mask is not None:
        # torch takes one or the other.
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
        causal = False
    # Looked up at each call, so that what another pack puts there is used as in the rest of ComfyUI.
    return comfy.ops.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=causal, **_options(call)
    )


def _options(call: AttentionCall) -> dict[str, Any]:
    options: dict[str, Any] = {} if call.scale is None else {"scale": call.scale}
    return options | {"enable_gqa": True} if call.enable_gqa else options


def _forced(name: str, backend: SDPBackend, asks: str) -> Candidate:
    """SDPA by one kernel; `asks` is torch's own question whether that kernel takes a call."""

    def missing(device: torch.device) -> str:
        if device.type != "cuda":
            return f"needs a GPU, not {device.type}"
        return "" if hasattr(torch.backends.cuda, asks) else f"torch {torch.__version__} does not offer it"

    def unfit(call: AttentionCall) -> str:
        if call.mask is not None:
            return "mask"
        if call.q.shape[0] > BATCH_LIMIT:
            return f"batch over {BATCH_LIMIT}"
        if call.causal and call.q.shape[2] != call.k.shape[2]:
            return "causal with q and k of different lengths"
        params = torch.backends.cuda.SDPAParams(
            call.q, call.k, call.v, None, 0.0, call.causal, call.enable_gqa
        )
        return "" if getattr(torch.backends.cuda, asks)(params, False) else "torch refuses it"

    def run(call: AttentionCall) -> torch.Tensor:
        with sdpa_kernel([backend]):
            return torch.nn.functional.scaled_dot_product_attention(
                call.q, call.k, call.v, is_causal=call.causal, **_options(call)
            )

    return Candidate(name, missing, unfit, run)


CUDNN = _forced("cuDNN SDPA", SDPBackend.CUDNN_ATTENTION, "can_use_cudnn_attention")
FLASH = _forced("flash SDPA", SDPBackend.FLASH_ATTENTION, "can_use_flash_attention")
PLAIN = Candidate("SDPA", lambda device: "", lambda call: "", plain)
