"""What several test files need to look into INT8 layers: fp64 references and a spy on the kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch


def load(comfy: ModuleType, path: Any, **options: Any) -> Any:
    """load_unet as the UNETLoader node runs it: core's quantized layers need inference mode."""
    with torch.inference_mode():
        return comfy.load_unet(path, **options)


def int8_modules(model: Any) -> dict[str, torch.nn.Module]:
    """Name below the diffusion model -> each linear layer of a patcher whose weight is INT8."""
    found = {}
    for name, module in model.model.diffusion_model.named_modules():
        layout = getattr(getattr(module, "weight", None), "_layout_cls", None)
        if layout == "TensorWiseINT8Layout":
            found[name] = module
    return found


def quant_key(**conf: Any) -> torch.Tensor:
    """The `comfy_quant` entry of one layer: JSON as bytes (comfy/ops.py)."""
    return torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8)


# --- fp64 references, written from the paper and not from comfy_kitchen ----------------------------


def hadamard(size: int) -> torch.Tensor:
    """The orthogonal regular Hadamard matrix of ConvRot: H4 kron H4 kron ..., in fp64.

    Regular: its rows all have the same sum, so no row is constant (as in Sylvester's matrix) and no
    coefficient of a group collects what all of its inputs have in common.
    """
    base = 1.0 - 2.0 * torch.eye(4, dtype=torch.float64).flip(0)
    matrix = base
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, base)
    return matrix / math.sqrt(size)


def rotated(rows: torch.Tensor, group_size: int) -> torch.Tensor:
    """Multiplies every group of inputs of [N, K] by the Hadamard matrix, in fp64."""
    groups = rows.double().reshape(rows.shape[0], -1, group_size)
    return (groups @ hadamard(group_size).T).reshape(rows.shape)


def int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric INT8 of [N, K], one scale a row: fp64 codes before rounding, and fp64 scales [N, 1]."""
    scales = rows.double().abs().amax(dim=1, keepdim=True) / 127
    return rows.double() / scales, scales


def check_int8(module: torch.nn.Module, weight: torch.Tensor, group_size: int) -> None:
    """Asserts that a layer holds the INT8 ConvRot form of `weight`, to half an INT8 step."""
    tensor = module.weight
    codes, scales = tensor._qdata.double().cpu(), tensor._params.scale.double().cpu()
    assert tensor._params.convrot and tensor._params.convrot_groupsize == group_size
    exact, exact_scales = int8_rows(rotated(weight.cpu(), group_size))
    # amax in fp32 after a rotation in fp32: a few units in the last place.
    torch.testing.assert_close(scales, exact_scales, rtol=2e-6, atol=0)
    assert (codes - exact).abs().max() < 0.501
    # What core sees of it, with the rotation undone: a uniform rounding error has 1/sqrt(12) steps.
    seen = tensor.to(dtype=torch.float32).dequantize().double().cpu()
    error = ((seen - weight.double().cpu()) / exact_scales).square().mean().sqrt()
    assert 0.27 < error < 0.31


# --- what runs while a model is sampled ----------------------------------------------------------


@dataclasses.dataclass
class Kernels:
    """Calls of comfy_kitchen's implementations and of plain linear layers, while they are watched.

    int8_linear: name of the layer -> calls. dequantized: implementation -> calls.
    plain: calls of F.linear with an ordinary weight. evaluations: runs of the diffusion model.
    """

    int8_linear: Counter[str] = dataclasses.field(default_factory=Counter)
    dequantized: Counter[str] = dataclasses.field(default_factory=Counter)
    plain: int = 0
    evaluations: int = 0


@contextlib.contextmanager
def watched(model: Any, *, plain: bool = True) -> Iterator[Kernels]:
    """Counts what the resident INT8 layers of `model` run; everything still runs as it is.

    plain: also count evaluations and plain linear layers, which torch.compile would trip over.

    The implementations are wrapped where comfy_kitchen's registry finds them, which is where
    `torch.ops.comfy_kitchen.int8_linear` and `comfy_kitchen.int8_linear` both end.
    """
    from comfy_kitchen.registry import registry

    seen = Kernels()
    layers = {m.weight._qdata.data_ptr(): name for name, m in int8_modules(model).items()}

    def wrap(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "int8_linear":
                weight = kwargs["weight"] if "weight" in kwargs else args[1]
                seen.int8_linear[layers.get(weight.data_ptr(), "unknown")] += 1
            else:
                seen.dequantized[name] += 1
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as undo:
        for backend in registry._backends.values():
            for name in dir(backend):
                if name == "int8_linear" or name.startswith("dequantize_int8"):
                    original = getattr(backend, name)
                    undo.callback(setattr, backend, name, original)
                    setattr(backend, name, wrap(name, original))
        if plain:
            hook = model.model.diffusion_model.register_forward_pre_hook(lambda *_: _count_evaluation(seen))
            undo.callback(hook.remove)
            undo.enter_context(_PlainLinear(seen))
        yield seen


def _count_evaluation(seen: Kernels) -> None:
    seen.evaluations += 1


class _PlainLinear(torch.overrides.TorchFunctionMode):
    def __init__(self, seen: Kernels) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not hasattr(args[1], "_qdata"):
            self._seen.plain += 1
        return func(*args, **(kwargs or {}))
