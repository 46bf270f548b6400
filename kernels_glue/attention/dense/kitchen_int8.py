"""The backend `kitchen_int8`: `comfy_kitchen.int8_attention`, by capability (0.2.26 does not have it)."""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType

import torch

from ...commands import pip
from ...errors import KitchenSolError
from ...failures import first_line, is_out_of_memory
from ..call import AttentionCall
from ..config import NODE
from ..strides import INT32_REACH, within_int32
from .base import DenseResult
from .sdpa import broadcastable

_UPDATE = pip("install -U comfy-kitchen")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MASK_DTYPES = (torch.bool, *_DTYPES)
_KERNEL_HEAD_DIMS = (64, 128, 256)
_ROWS = 128


@lru_cache(maxsize=1)
def _load() -> tuple[ModuleType | None, str]:
    """comfy_kitchen if it has int8_attention, else why not."""
    try:
        kitchen = importlib.import_module("comfy_kitchen")
    except Exception as error:
        return None, f"comfy_kitchen cannot be imported ({first_line(error)}); run: {_UPDATE}"
    if not hasattr(kitchen, "int8_attention"):
        version = getattr(kitchen, "__version__", "of unknown version")
        return None, f"comfy-kitchen {version} has no int8_attention; run: {_UPDATE}"
    return kitchen, ""


class KitchenInt8Backend:
    """Attention with INT8 q, k, v and probabilities, q and k rotated before."""

    name = "kitchen_int8"
    exact = False

    def missing(self, device: torch.device) -> str:
        if device.type != "cuda":
            return f"comfy_kitchen's int8_attention needs a GPU, not {device.type}"
        kitchen, fault = _load()
        if kitchen is None:
            return fault
        is_available = getattr(kitchen, "int8_attention_is_available", None)
        if is_available is None or is_available(device):
            return ""
        return (
            "comfy_kitchen's int8_attention does not run on this GPU (it needs SM 7.5 and a torch built for"
            " CUDA 13, or a matrix-core AMD GPU)"
        )

    def unfit(self, call: AttentionCall) -> str:
        q, k, v = call.q, call.k, call.v
        if call.causal:
            return "causal"
        if call.exact:
            return "the model asks for full precision"
        if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
            return f"dtype {str(q.dtype).removeprefix('torch.')}"
        if call.mask is not None and call.mask.dtype not in _MASK_DTYPES:
            return f"mask of {str(call.mask.dtype).removeprefix('torch.')}"
        if q.shape[3] > _KERNEL_HEAD_DIMS[-1] or v.shape[3] != q.shape[3]:
            return f"head_dim {q.shape[3]}"
        if q.shape[1] != k.shape[1] and not (call.enable_gqa and q.shape[1] % k.shape[1] == 0):
            return "numbers of heads that do not divide"
        if any(tensor.stride(3) != 1 for tensor in (q, k, v)):
            return "strided head_dim"
        if max(_padded_elements(q), _padded_elements(k)) >= INT32_REACH:
            # 299,520 rows of 56 x 128 work and 299,521 do not: Comfy-Org/comfy-kitchen#178.
            return "2**31 elements or more"
        return ""

    def run(self, call: AttentionCall) -> DenseResult:
        """Computes the attention.

        Raises:
            KitchenSolError: comfy_kitchen failed.
        """
        kitchen, _ = _load()
        assert kitchen is not None
        mask = None if call.mask is None else broadcastable(call.mask)
        q, k, v = (within_int32(tensor) for tensor in (call.q, call.k, call.v))
        try:
            out = kitchen.int8_attention(q, k, v, scale=call.scale, attn_mask=mask)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise KitchenSolError(
                NODE,
                f"comfy_kitchen's int8_attention failed on q {tuple(call.q.shape)}, k {tuple(call.k.shape)}"
                f" in {call.q.dtype} ({first_line(error)}).",
                f"Choose fa as dense_backend, or update the package ({_UPDATE}).",
            ) from error
        return DenseResult(out, "comfy_kitchen int8_attention")


def _padded_elements(tensor: torch.Tensor) -> int:
    """Elements of a [B, H, T, D] tensor in the kernel's buffers, where rows and head_dim are padded."""
    batch, heads, rows, head_dim = tensor.shape
    kernel_head_dim = next(size for size in _KERNEL_HEAD_DIMS if head_dim <= size)
    return batch * heads * kernel_head_dim * (-(-rows // _ROWS) * _ROWS)
