"""The backend `sage_attn`: the package sageattention, 1.x and 2.x behind one adapter."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...commands import pip
from ...errors import KitchenSolError
from ...failures import first_line, is_out_of_memory
from ..call import AttentionCall
from ..config import NODE
from ..devices import sm_of
from ..strides import INT32_REACH, within_int32
from .base import DenseResult

_HEAD_DIMS = (64, 96, 128)
_TOO_NOISY_FROM = 160_000  # tokens, on SM 12.0
_V_ROWS = 128  # rows of V that the SM90 kernel reads at a time
# 1.x does not mask the keys that are missing in the last block of 64: each counts as a key of score 0 and
# value 0. With K smoothed a row's mean score is 0 too, so that n of them take at most n / (keys + n) of the
# weight (Jensen); up to this share of them is let pass.
_KEY_BLOCK = 64
_MISCOUNTED = 0.01
# The kernels that multiply V in fp16 also add up a block of 64 keys in fp16, so that a block in which every
# key counts fully has to stay below fp16's 65504; 60000 leaves room for rounding.
_LARGEST_V = 60_000 / 64


@dataclass(frozen=True)
class SagePackage:
    """The package sageattention, or why it is not usable.

    Attributes:
        function: its `sageattn`, or None.
        generation: 1, which is Triton only, or 2, which has kernels of its own for each SM.
        takes_smooth_k: its `sageattn` has a switch for smoothing K. 1.x has one, and changes the caller's K
            if it is on; 2.x has none there, always smooths, and leaves K as it is.
        fault: why there is no function, with the way out.
    """

    function: Callable[..., torch.Tensor] | None
    generation: int = 0
    takes_smooth_k: bool = False
    fault: str = ""


@lru_cache(maxsize=1)
def load() -> SagePackage:
    """Imports sageattention. A broken one is a fault of the package and no error."""
    try:
        module = importlib.import_module("sageattention")
        function = module.sageattn
    except ModuleNotFoundError as error:
        if error.name == "sageattention":
            return SagePackage(
                None, fault=f"sageattention is not installed; run: {pip('install sageattention')}"
            )
        needed = (error.name or "").partition(".")[0]
        fault = f"sageattention needs {needed}, which is not installed; run: {pip(f'install {needed}')}"
        return SagePackage(None, fault=fault)
    except Exception as error:
        command = pip("install --force-reinstall sageattention")
        fault = f"sageattention is broken ({first_line(error)}); run: {command}"
        return SagePackage(None, fault=fault)
    generation = 2 if hasattr(module, "sageattn_qk_int8_pv_fp16_cuda") else 1
    return SagePackage(function, generation, "smooth_k" in inspect.signature(function).parameters)


class SageBackend:
    """8-bit attention by sageattention, with K smoothed (its mean over the keys taken off)."""

    name = "sage_attn"
    exact = False

    def missing(self, device: torch.device) -> str:
        if device.type != "cuda":
            return f"sageattention needs a CUDA GPU, not {device.type}"
        package = load()
        if package.fault:
            return package.fault
        sm = sm_of(device)
        if package.generation == 2 and sm is not None and (sm < (8, 0) or sm[0] in (10, 11)):
            return f"sageattention 2 has no kernel for SM {sm[0]}.{sm[1]}"
        return ""

    def unfit(self, call: AttentionCall) -> str:
        q, k, v = call.q, call.k, call.v
        if call.mask is not None:
            return "mask"  # 1.x would leave it out without a word
        if call.exact:
            return "the model asks for full precision"
        if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
            return f"dtype {str(q.dtype).removeprefix('torch.')}"
        if q.shape[3] not in _HEAD_DIMS or v.shape[3] != q.shape[3]:
            return f"head_dim {q.shape[3]}"
        if q.shape[1] != k.shape[1]:
            return "grouped heads"
        if call.causal and q.shape[2] != k.shape[2]:
            return "causal with q and k of different lengths"
        if load().generation == 1 and not call.causal and -k.shape[2] % _KEY_BLOCK > _MISCOUNTED * k.shape[2]:
            return f"{k.shape[2]} keys, few and no multiple of {_KEY_BLOCK}"
        if sm_of(q.device) == (12, 0) and max(q.shape[2], k.shape[2]) > _TOO_NOISY_FROM:
            return f"over {_TOO_NOISY_FROM} tokens on SM 12.0"
        if max(q.numel(), k.numel()) >= INT32_REACH:
            return "2**31 elements or more"  # its offsets have 32 bits
        return ""

    def run(self, call: AttentionCall) -> DenseResult:
        """Computes the attention.

        Raises:
            KitchenSolError: the package failed.
        """
        package = load()
        assert package.function is not None
        sm = sm_of(call.q.device)
        q, k, v = (_unit_stride(within_int32(tensor)) for tensor in (call.q, call.k, call.v))
        options = {"smooth_k": False} if package.takes_smooth_k else {}
        factor = None
        try:
            if package.takes_smooth_k:
                # In the package's own way it would change the caller's K.
                k = k - k.mean(dim=2, keepdim=True)
            if _multiplies_v_in_fp16(package.generation, sm):
                v, factor = _scaled(v)
            if package.generation == 2 and sm is not None and sm[0] == 9:
                v = _padded(v)
            with torch.cuda.device(q.device) if q.device.type == "cuda" else nullcontext():
                out = package.function(
                    q, k, v, tensor_layout="HND", is_causal=call.causal, sm_scale=call.scale, **options
                )
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise KitchenSolError(
                NODE,
                f"sageattention failed on q {tuple(q.shape)}, k {tuple(k.shape)} in {q.dtype}"
                f" ({first_line(error)}).",
                f"Choose fa as dense_backend, or update the package ({pip('install -U sageattention')}).",
            ) from error
        return DenseResult(
            out if factor is None else out.mul_(factor), f"sageattention {package.generation}.x"
        )


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _multiplies_v_in_fp16(generation: int, sm: tuple[int, int] | None) -> bool:
    """From SM 8.9 on, 2.x holds V in fp8 with scales of its own."""
    return generation == 1 or sm is None or sm < (8, 9)


def _scaled(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """V [B, H, T, D] so small that it does not overflow fp16, and the factors [B, H, 1, 1] taken out of it.

    They are powers of two, so nothing is rounded, and 1 for every head that is small enough. Nobody waits
    for the device: the multiplication is done whether it changes V or not.
    """
    largest = torch.linalg.vector_norm(v, ord=float("inf"), dim=(2, 3), keepdim=True).float()
    factor = torch.exp2(torch.ceil(torch.log2(largest / _LARGEST_V))).clamp_(min=1)
    return v * (1 / factor).to(v.dtype), factor.to(v.dtype)


def _padded(v: torch.Tensor) -> torch.Tensor:
    """V with zero rows up to a multiple of 128; no key has the index of such a row, so none counts."""
    rows = -v.shape[2] % _V_ROWS
    return torch.nn.functional.pad(v, (0, 0, 0, rows)) if rows else v
