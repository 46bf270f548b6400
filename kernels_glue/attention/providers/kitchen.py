"""provider=kitchen: comfy_kitchen's INT8 Sol kernels (`comfy_kitchen.sol_attn`, 0.2.32 and later)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...commands import pip
from ..sol import SolOptions, SolResult, blocks_of
from .packages import load, version_of
from .signature import Argument, accepted, refusal
from .tensors import aligned, misfit

_DTYPES = (torch.bfloat16, torch.float16)


class KitchenSol:
    """comfy_kitchen's Sol attention: views of a fused QKV go in as they are; sinks are whole blocks.

    The 32-bit offsets of comfy_kitchen's int8_attention (Comfy-Org/comfy-kitchen issue 178) do not bind it:
    with 0.2.40 on an H200, 400,000 rows of 56 x 128 were right.
    """

    name = "kitchen"
    min_tokens = 12288  # its own documentation: below some 12k tokens dense attention is as fast
    exact_queries = True

    def missing(self, device: torch.device) -> str:
        kitchen, problem = load("comfy_kitchen")
        if kitchen is None:
            command = pip("install -U comfy-kitchen")
            return f"{problem or 'comfy-kitchen is not installed'}; run: {command} and restart ComfyUI"
        parts = (getattr(kitchen, name, None) for name in ("sol_attn", "sol_attn_is_available"))
        if not all(map(callable, parts)):
            command = pip('install -U "comfy-kitchen>=0.2.32"')
            version = version_of("comfy-kitchen")
            return f"comfy-kitchen {version} has no sol_attn; run: {command} and restart ComfyUI"
        if device.type == "cpu":
            return "comfy_kitchen's compiled Sol kernels cannot run on a CPU; the provider reference can"
        try:
            available = kitchen.sol_attn_is_available(device)
        except Exception as error:
            return f"comfy-kitchen {version_of('comfy-kitchen')} does not say whether it can ({error})"
        if not available:
            return (
                f"comfy_kitchen's compiled Sol kernels cannot run on {device}: they need an NVIDIA GPU from"
                " SM 8.0 on and a torch built for CUDA 13, or an AMD GPU with matrix cores"
            )
        return ""

    def unsupported(self, options: SolOptions) -> str:
        return refusal(_function(), _arguments(options))

    def unfit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
        return misfit(q, k, v, _DTYPES)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolOptions) -> SolResult:
        function = _function()
        arguments = accepted(function, _arguments(options))
        return SolResult(function(aligned(q), aligned(k), aligned(v), **arguments))


def _function() -> Callable[..., torch.Tensor]:
    kitchen, _ = load("comfy_kitchen")
    return kitchen.sol_attn


def _arguments(options: SolOptions) -> list[Argument]:
    return [
        Argument("tau", options.tau),
        Argument("scale", options.scale),
        Argument("sink_blocks", list(blocks_of(options.sink_keys)), [0, 0], "key sinks"),
        Argument("sink_q", list(blocks_of(options.sink_queries)), [0, 0], "query sinks"),
        Argument("token_aug", options.token_aug, 0),
        Argument("thresh_type", options.thresh_type, "diag"),
        Argument("kv_splits", options.kv_splits, 1),
    ]
