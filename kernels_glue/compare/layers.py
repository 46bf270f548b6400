"""How far single layers are from exact ones on the same inputs: INT8 layers, and attention.

Rows of the inputs and outputs of the reference's linear layers are kept at a few steps; while the model is
sampled, its own layers compute the same rows. Attention is compared with the exact one of some query rows at
the call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from comfy.quant_ops import QuantizedTensor

from ..attention.call import AttentionCall
from ..attention.dense.sdpa import plain
from ..blocks import find_block_lists, uncompiled
from ..core_models import linear_modules
from ..quantization.plan import INT8_FORMAT
from .results import LayerError

# Rows of a linear layer that are looked at in a step, at most and at least.
MOST_ROWS, LEAST_ROWS = 64, 8
# Host memory for them, over all layers and steps.
ROWS_BYTES = 2**30
# Query rows of an attention call, over all keys: in a sequence of 32,768 tokens less than 1% of the work.
QUERY_ROWS = 256


def looked_at(steps: int) -> frozenset[int]:
    """The steps at which layers are looked at: the first, the middle and the last one."""
    return frozenset({0, steps // 2, max(0, steps - 1)})


def rows_for(widths: Sequence[int], looks: int) -> int:
    """Rows to keep of each layer.

    Args:
        widths: inputs and outputs of each layer, in numbers.
        looks: how often each is looked at.
    """
    each = sum(widths) * looks * 4  # bytes of fp32, the widest that a model computes in
    return max(LEAST_ROWS, min(MOST_ROWS, ROWS_BYTES // max(1, each)))


def int8_names(diffusion_model: torch.nn.Module) -> tuple[str, ...]:
    """Dotted names of the INT8 layers of a model."""
    model = uncompiled(diffusion_model)
    return tuple(name for name, module in linear_modules(model) if _is_int8(module))


def evenly_spaced(count: int, rows: int, device: torch.device) -> torch.Tensor:
    """Indices of up to `rows` of `count` rows, the first and the last among them."""
    if count <= rows:
        return torch.arange(count, device=device)
    return torch.linspace(0, count - 1, rows, device=device).round().long()


@dataclass
class Rows:
    """Rows [R, K] of what went into a layer, and [R, N] of what came out, one pair a look."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


@dataclass
class ReferenceRows:
    """Keeps rows of the reference's layers while it is sampled.

    Attributes:
        names: of the layers; those that the reference has quantized too never show theirs.
        steps: at which steps.
        found: what was kept, by name.
    """

    names: Collection[str]
    steps: Collection[int]
    found: dict[str, Rows] = field(default_factory=dict)
    _step: int = 0

    def advance(self) -> None:
        """The next step begins."""
        self._step += 1

    @contextmanager
    def watching(self, diffusion_model: torch.nn.Module) -> Iterator[None]:
        """Hooks are on the layers within."""
        modules = dict(linear_modules(uncompiled(diffusion_model)))
        layers = {name: modules[name] for name in self.names if name in modules}
        widths = [layer.in_features + layer.out_features for layer in layers.values()]
        rows = rows_for(widths, len(self.steps))
        handles = [
            layer.register_forward_hook(self._hook(name, rows))
            for name, layer in layers.items()
            if not isinstance(getattr(layer, "weight", None), QuantizedTensor)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, rows: int) -> Callable[..., None]:
        last: int | None = None

        @torch.compiler.disable
        def keep(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            # The first evaluation of a step: with several conditions the others have other inputs.
            nonlocal last
            if self._step == last or self._step not in self.steps or not args:
                return
            last = self._step
            kept = self.found.setdefault(name, Rows())
            for tensors, tensor in ((kept.inputs, args[0]), (kept.outputs, output)):
                flat = tensor.reshape(-1, tensor.shape[-1])
                index = evenly_spaced(flat.shape[0], rows, flat.device)
                tensors.append(flat.index_select(0, index).to("cpu"))

        return keep


@dataclass
class Int8Errors:
    """Lets the layers of a model compute the rows of the reference while the model is sampled.

    A block's layers are computed when the block has run, while its weights are where it needed them: the
    hook comes before that of Layerwise Offload, which puts them away. A hook on the layer itself would not
    do, because core reads some quantized weights past `forward` (comfy.ops.linear_input_act).

    Attributes:
        rows: of the reference, by name.
        device: on which the model computes.
    """

    rows: Mapping[str, Rows]
    device: torch.device
    _errors: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @contextmanager
    def watching(self, diffusion_model: torch.nn.Module) -> Iterator[None]:
        """Hooks are on the blocks within."""
        model = uncompiled(diffusion_model)
        handles = [
            model.get_submodule(owner).register_forward_hook(self._hook(model, names), prepend=True)
            for owner, names in owners(self.rows, _block_names(model)).items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def errors(self) -> tuple[LayerError, ...]:
        """Of each layer that was looked at; waits for the device."""
        return tuple(_layer_error(name, "int8", errors) for name, errors in self._errors.items())

    def _hook(self, model: torch.nn.Module, names: Sequence[str]) -> Callable[..., None]:
        @torch.compiler.disable
        def compute(*_: Any) -> None:
            for name in names:
                if name not in self._errors:
                    self._errors[name] = list(self._compute(model.get_submodule(name), self.rows[name]))

        return compute

    def _compute(self, layer: torch.nn.Module, rows: Rows) -> Iterator[torch.Tensor]:
        for inputs, outputs in zip(rows.inputs, rows.outputs, strict=True):
            yield _relative(layer(inputs.to(self.device)), outputs.to(self.device))


def owners(names: Collection[str], blocks: Sequence[str]) -> dict[str, list[str]]:
    """The block of each layer, by name; the whole model ("") for layers outside of the blocks. Pure."""
    found: dict[str, list[str]] = {}
    for name in names:
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        found.setdefault(block, []).append(name)
    return found


@dataclass
class SparseCalls:
    """An observer of Sol Attention Patch that counts.

    Attributes:
        sparse: sparse calls that were made.
    """

    sparse: int = 0

    def __deepcopy__(self, memo: Any) -> SparseCalls:
        return self  # of copied options: all calls of a sampling count together

    def __call__(self, layer: int, call: AttentionCall, out: torch.Tensor, path: str) -> None:
        """See attention.evaluation.Observer."""
        self.sparse += path.startswith("sparse")

    def advance(self) -> None:
        """The next step begins."""

    def errors(self) -> tuple[LayerError, ...]:
        """Of each layer that was looked at."""
        return ()


@dataclass
class AttentionErrors(SparseCalls):
    """Also compares calls with exact attention of some query rows.

    Attributes:
        steps: at which steps; a layer's first call is looked at whenever it comes.
    """

    steps: Collection[int] = ()
    _step: int = 0
    _last: dict[tuple[str, int], int] = field(default_factory=dict)
    _errors: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    _exact: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)

    def advance(self) -> None:
        self._step += 1

    def __call__(self, layer: int, call: AttentionCall, out: torch.Tensor, path: str) -> None:
        super().__call__(layer, call, out, path)
        key = ("attention" if path.startswith("sparse") else "dense attention", layer)
        last = self._last.get(key)
        if last == self._step or not (last is None or self._step in self.steps):
            return
        if call.mask is not None or call.causal:
            return
        self._last[key] = self._step
        index = evenly_spaced(call.tokens, QUERY_ROWS, out.device)
        exact = plain(replace(call, q=call.q[:, :, index], flat_output=False))
        self._errors.setdefault(key, []).append(_relative(out[:, :, index], exact))
        self._exact.setdefault(key, []).append(exact.isfinite().all())

    def errors(self) -> tuple[LayerError, ...]:
        """Of each layer that was looked at; waits for the device.

        A call whose exact attention is not finite got what a layer before it broke, so it does not count.
        """
        found = []
        for (kind, layer), errors in self._errors.items():
            exact = torch.stack(self._exact[kind, layer]).tolist()
            if sound := [error for error, finite in zip(errors, exact, strict=True) if finite]:
                found.append(_layer_error(str(layer), kind, sound))
        return tuple(found)


def _block_names(model: torch.nn.Module) -> list[str]:
    lists = find_block_lists(model)
    return [f"{name}.{child}" for name in lists for child, _ in model.get_submodule(name).named_children()]


def _is_int8(module: torch.nn.Module) -> bool:
    quantized = isinstance(getattr(module, "weight", None), QuantizedTensor)
    return quantized and getattr(module, "quant_format", None) == INT8_FORMAT


def _relative(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """||found - exact|| / ||exact|| as a tensor on the device, which is not waited for."""
    exact = exact.float()
    error = (found.float() - exact).norm()
    return torch.where(error == 0, error, error / exact.norm())  # nothing against nothing is no error


def _layer_error(name: str, kind: str, errors: Sequence[torch.Tensor]) -> LayerError:
    return LayerError(name, kind, torch.stack(list(errors)).mean().item(), len(errors))
