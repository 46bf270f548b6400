"""The FlashAttention packages, versions 4, 3 and 2, whose functions take q, k and v as [B, T, H, D]."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ...failures import first_line
from ..call import AttentionCall
from ..devices import sm_of
from .candidate import Candidate

_MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class FlashPackage:
    """An installed FlashAttention package, or why it is not usable.

    Attributes:
        function: its `flash_attn_func`, or None.
        keywords: the names of its parameters; None if they cannot be read, or it takes any.
        fault: why there is no function; empty if there is.
    """

    function: Callable[..., Any] | None
    keywords: frozenset[str] | None
    fault: str = ""

    def has(self, keyword: str) -> bool:
        return self.keywords is None or keyword in self.keywords


@lru_cache(maxsize=8)
def load(module: str) -> FlashPackage:
    """Imports a FlashAttention package. A broken one is a fault of the package and no error."""
    try:
        function = importlib.import_module(module).flash_attn_func
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            return FlashPackage(None, None, f"the package {module} is not installed")
        return FlashPackage(None, None, f"the package {module} is broken ({first_line(error)})")
    # A binary for another torch may fail with anything, SystemError included.
    except Exception as error:
        return FlashPackage(None, None, f"the package {module} is broken ({first_line(error)})")
    package = FlashPackage(function, _keywords(function))
    if not package.has("softmax_scale"):
        return FlashPackage(None, None, f"{module}.flash_attn_func has no softmax_scale")
    return package


def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _candidate(name: str, module: str, runs_on: Callable[[tuple[int, int]], bool], needs: str) -> Candidate:
    def missing(device: torch.device) -> str:
        sm = sm_of(device)
        if sm is None or not runs_on(sm):
            return f"needs {needs}"
        return load(module).fault

    def unfit(call: AttentionCall) -> str:
        q, k, v = call.q, call.k, call.v
        if call.mask is not None:
            return "mask"
        if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
            return f"dtype {q.dtype}"
        if q.shape[3] > _MAX_HEAD_DIM or q.shape[3] % 8 or v.shape[3] != q.shape[3]:
            return f"head_dim {q.shape[3]}"
        if q.shape[1] != k.shape[1] and not (call.enable_gqa and q.shape[1] % k.shape[1] == 0):
            return "grouped heads"
        if call.causal and (q.shape[2] != k.shape[2] or not load(module).has("causal")):
            # With unequal lengths torch aligns the diagonal at the start and FlashAttention at the end.
            return "causal"
        return ""

    def run(call: AttentionCall) -> torch.Tensor:
        package = load(module)
        assert package.function is not None
        options: dict[str, Any] = {"softmax_scale": call.scale}
        if call.causal:
            options["causal"] = True
        out = package.function(*(tensor.transpose(1, 2) for tensor in (call.q, call.k, call.v)), **options)
        # Some versions return the log-sum-exp as well.
        return (out[0] if isinstance(out, tuple | list) else out).transpose(1, 2)

    return Candidate(name, missing, unfit, run)


FLASH_ATTENTION = (
    _candidate(
        "FlashAttention 4", "flash_attn.cute", lambda sm: sm >= (9, 0), "an NVIDIA GPU from SM 9.0 on"
    ),
    _candidate("FlashAttention 3", "flash_attn_interface", lambda sm: sm[0] == 9, "an NVIDIA GPU of SM 9.x"),
    _candidate("FlashAttention 2", "flash_attn", lambda sm: sm >= (8, 0), "an NVIDIA GPU from SM 8.0 on"),
)
