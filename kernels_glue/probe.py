"""Which kernels are here, on which device they run, and whether their numbers are right."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

from .commands import pip
from .errors import KitchenSolError

if TYPE_CHECKING:
    import torch

KITCHEN_FLOOR = "0.2.26"
_INSTALL = f'install -U "comfy-kitchen>={KITCHEN_FLOOR}"'

# INT8 activations and weights of one random layer stay within 1.5% of the exact product; a wrong group
# size, a wrong scale or the tiled noise of a broken kernel is far above this.
_WRONG_NUMBERS = 0.1
# Row counts around the tile sizes of the kernels; 97 to 127 fail on some Turing cards.
_PROBED_ROWS = (1, 5, 97, 127, 128, 300)


@dataclass(frozen=True)
class Int8Backend:
    """The comfy_kitchen backend that computes `int8_linear` on a device.

    Attributes:
        name: `cuda`, `triton`, `hip` or `eager`.
        remark: empty, or why this is not the fast one.
    """

    name: str
    remark: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.remark})" if self.remark else self.name


def require_kitchen(node: str) -> ModuleType:
    """Imports comfy_kitchen with INT8 ConvRot, or refuses with the command that mends it."""
    try:
        kitchen = importlib.import_module("comfy_kitchen")
        tensor = importlib.import_module("comfy_kitchen.tensor")
    except Exception as error:
        raise _kitchen_refusal(node, error) from error
    layout = getattr(tensor, "TensorWiseINT8Layout", None)
    if layout is None or "convrot_groupsize" not in inspect.signature(layout.quantize).parameters:
        raise KitchenSolError(
            node,
            f"comfy-kitchen {_kitchen_version()} has no INT8 ConvRot.",
            f"Run: {pip(_INSTALL)} and restart ComfyUI.",
        )
    return kitchen


def int8_backend(device: torch.device) -> Int8Backend:
    """Names the backend that comfy_kitchen picks for an INT8 ConvRot layer on a device."""
    import torch
    from comfy_kitchen.registry import registry

    weight = torch.zeros((256, 256), dtype=torch.int8, device=device)
    call = {
        "x": torch.zeros((256, 256), dtype=torch.bfloat16, device=device),
        "weight": weight,
        "weight_scale": torch.ones((256, 1), device=device),
        "bias": None,
        "out_dtype": torch.bfloat16,
        "convrot": True,
        "convrot_groupsize": 256,
    }
    name = registry.get_capable_backend("int8_linear", call)
    cuda = torch.version.cuda
    return Int8Backend(name, _eager_remark(device.type, cuda) if name == "eager" else "")


def _eager_remark(device_type: str, cuda: str | None) -> str:
    """Why only the slow backend runs on this kind of device."""
    if device_type == "cpu":
        return "reference kernels, slow: there is no GPU"
    if device_type == "cuda" and cuda is not None and int(cuda.split(".")[0]) < 13:
        return f"slow: comfy_kitchen's CUDA kernels need a torch built for CUDA 13, this one is for {cuda}"
    return "slow: comfy_kitchen has no INT8 kernel for this device"


@lru_cache(maxsize=64)
def int8_fault(device: torch.device, dtype: torch.dtype, group_size: int) -> str:
    """Runs `int8_linear` on a small layer and says what is wrong with it; empty if nothing is.

    Kernels have failed on single cards (Turing: an error for some row counts, tiled noise for others),
    which a capability number does not tell, so the numbers are looked at, once a process.
    """
    import torch
    from comfy_kitchen.tensor import QuantizedTensor

    try:
        generator = torch.Generator().manual_seed(0)
        k = 2 * max(group_size, 64)
        weight = torch.randn((256, k), generator=generator).to(device, dtype)
        quantized = QuantizedTensor.from_float(
            weight, "TensorWiseINT8Layout", per_channel=True, convrot=True, convrot_groupsize=group_size
        )
        for rows in _PROBED_ROWS:
            x = torch.randn((rows, k), generator=generator).to(device, dtype)
            result = torch.nn.functional.linear(x, quantized).double()
            exact = x.double() @ weight.double().T
            error = float((result - exact).norm() / exact.norm())
            if not error < _WRONG_NUMBERS:
                return f"wrong numbers with {rows} rows (relative error {error:.2g})"
    except torch.cuda.OutOfMemoryError:
        raise  # says nothing about the kernels, and must not be remembered
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def require_int8(node: str, device: torch.device, dtype: torch.dtype, group_sizes: Iterable[int]) -> None:
    """Refuses a device on which the INT8 kernels fail or compute something else."""
    for group_size in sorted(set(group_sizes)):
        if fault := int8_fault(device, dtype, group_size):
            raise KitchenSolError(
                node,
                f"comfy_kitchen's INT8 kernels do not work on {_device_name(device)} in {dtype}"
                f" with group size {group_size}: {fault}.",
                f"Update comfy-kitchen ({pip('install -U comfy-kitchen')}), or remove this node.",
            )


def _device_name(device: torch.device) -> str:
    import torch

    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (SM {major}.{minor})"


def _kitchen_version() -> str:
    try:
        return importlib.metadata.version("comfy-kitchen")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _kitchen_refusal(node: str, error: Exception) -> KitchenSolError:
    missing = getattr(error, "name", None) if isinstance(error, ImportError) else None
    if missing == "comfy_kitchen":
        problem, command = "comfy-kitchen is not installed.", _INSTALL
    elif missing and not missing.startswith("comfy_kitchen"):
        problem = f"comfy-kitchen is installed, but needs the package {missing!r}, which is not."
        command = f"install {missing}"
    else:
        problem = f"comfy-kitchen is installed, but broken ({type(error).__name__}: {error})."
        command = "install --force-reinstall --no-deps comfy-kitchen"
    return KitchenSolError(node, problem, f"Run: {pip(command)} and restart ComfyUI.")
