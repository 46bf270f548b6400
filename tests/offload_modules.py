"""Small blocks with every form of weight that DiTs have, for tests that need no model."""

from __future__ import annotations

from typing import Any

import torch
from comfyui import inprocess

leaves = inprocess.pack_module("kernels_glue.offload.leaves").leaves

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    """A parameter as core makes it; of a quantized tensor it shares the data and has its own scales."""
    return torch.nn.Parameter(tensor, requires_grad=False)


def int8_weight(rows: int, columns: int) -> Any:
    """A quantized weight, as comfy_kitchen makes it for the INT8 node: int8 [N, K] and a scale a row."""
    from comfy_kitchen.tensor import QuantizedTensor

    return QuantizedTensor.from_float(
        torch.randn(rows, columns, dtype=torch.bfloat16),
        "TensorWiseINT8Layout",
        per_channel=True,
        convrot=True,
        convrot_groupsize=16,
    )


class Inner(torch.nn.Module):
    """A layer whose parameters are of all dtypes and forms."""

    def __init__(self) -> None:
        super().__init__()
        for index, dtype in enumerate(DTYPES):
            self.register_parameter(f"p{index}", frozen(torch.randn(3, 5 + index).to(dtype)))
        self.scalar = frozen(torch.randn(()))
        self.empty = frozen(torch.empty(0, 4))
        self.transposed = frozen(torch.randn(6, 4).t())
        self.channels_last = frozen(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.part = frozen(torch.randn(8, 8)[:, ::2])
        self.expanded = frozen(torch.randn(4, 1).expand(4, 3))
        self.register_parameter("nothing", None)
        self.register_buffer("counts", torch.arange(7))
        self.register_buffer("hidden", torch.randn(3).to(torch.bfloat16), persistent=False)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("absent", None)
        # The last of the layout may be empty too.
        self.register_buffer("tail", torch.empty(0))


class Plain(torch.nn.Module):
    """A block with a bare parameter, a layer of all forms and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = frozen(torch.randn(1, 6, 8))
        self.inner = Inner()
        self.tied = torch.nn.Linear(4, 4)
        self.tied_too = torch.nn.Linear(4, 4)
        self.tied_too.weight = self.tied.weight


class Quantized(Plain):
    """And with an INT8 weight."""

    def __init__(self) -> None:
        super().__init__()
        self.int8 = torch.nn.Linear(32, 16, bias=False)
        self.int8.weight = frozen(int8_weight(16, 32))


class Scale(torch.nn.Module):
    """A block that computes x * weight + bias, and keeps what its weights were when it ran."""

    def __init__(self, number: int, size: int = 300) -> None:
        super().__init__()
        self.weight = frozen(torch.full((size,), 1.0 + number))
        self.register_buffer("bias", torch.full((size,), 0.5 * number))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.weight.detach().clone())
        return x * self.weight + self.bias


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name, also where one has two names."""
    found = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for table in (child._parameters, child._buffers):
            found |= {f"{path}.{name}": tensor for name, tensor in table.items() if tensor is not None}
    return found


def bits_of(module: torch.nn.Module) -> dict[str, list[tuple[Any, ...]]]:
    """What a module's tensors are: type, dtype, shape and the bytes of each leaf."""
    return {
        name: [
            (
                type(tensor.data),
                isinstance(tensor, torch.nn.Parameter),
                tensor.dtype,
                tuple(tensor.shape),
                leaf.dtype,
                tuple(leaf.shape),
                leaf.contiguous().reshape(-1).view(torch.uint8).tolist(),
            )
            for leaf in leaves(tensor)
        ]
        for name, tensor in tensors(module).items()
    }


def ranges(module: torch.nn.Module) -> list[tuple[int, int]]:
    """(first byte, byte behind the last) of each leaf that has any, by address."""
    found = []
    for tensor in tensors(module).values():
        for leaf in leaves(tensor):
            if leaf.numel():
                reach = sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))
                found.append((leaf.data_ptr(), leaf.data_ptr() + (reach + 1) * leaf.itemsize))
    return sorted(found)


def pointers(module: torch.nn.Module) -> dict[str, list[int]]:
    """Where each leaf lies."""
    return {name: [leaf.data_ptr() for leaf in leaves(t)] for name, t in tensors(module).items()}
