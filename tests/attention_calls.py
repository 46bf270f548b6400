"""Records the attention calls of a real model, evaluation by evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from comfyui import inprocess
from comfyui.builders import TinyModel

layouts = inprocess.pack_module("kernels_glue.attention.layouts")
read_call = inprocess.pack_module("kernels_glue.attention.call").read_call

_KEY = "kitchen_sol_test_recorder"


@dataclass(frozen=True)
class Call:
    """One attention call.

    place: `block_index` and `block_type` of the options, as far as the model gives them.
    q_shape, k_shape: [B, H, T, D].
    rows: per position of the sequence, its values of every head [T, B * H * D].
    """

    place: Mapping[str, Any]
    q_shape: torch.Size
    k_shape: torch.Size
    rows: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.q_shape[2]


@dataclass
class Recording:
    """One evaluation of the model: what its wrapper was given, and the calls that it made.

    marked: the calls of a second run of the same evaluation, with other conditioning.
    """

    inputs: Any
    calls: list[Call] = field(default_factory=list)
    marked: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Inputs:
    """What core gives to APPLY_MODEL wrappers."""

    x: torch.Tensor
    context: torch.Tensor
    conds: dict[str, Any]


def record(
    patcher: Any,
    tiny: TinyModel,
    *,
    mark: Callable[[Inputs], Inputs] | None = None,
    parameters: tuple[str, ...] = (),
    mixing: bool = True,
    steps: int = 1,
    **sampling: Any,
) -> list[Recording]:
    """Samples `tiny` and records each evaluation.

    mark: makes the inputs of a second run of each evaluation, on the same latent and noise;
        `parameters` of the model have other values in it, too.
    mixing: without it every attention gives zeros, so that no row of a sequence learns of another one, in
        however many blocks.
    sampling: see inprocess.sample.
    """
    recordings: list[Recording] = []
    target: list[Call] = []

    def attend(core: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        call = read_call(*args, **kwargs)
        options = kwargs.get("transformer_options") or {}
        place = {name: options[name] for name in ("block_index", "block_type") if name in options}
        rows = call.v.permute(2, 0, 1, 3).flatten(1).clone()
        target.append(Call(place, call.q.shape, call.k.shape, rows))
        return core(*args, **kwargs) if mixing else call.output(torch.zeros_like(call.q))

    def evaluate(
        executor: Any, x: Any, t: Any, c_concat: Any, context: Any, control: Any, options: Any, **conds: Any
    ) -> Any:
        nonlocal target
        model = executor.class_obj.diffusion_model
        recording = Recording(layouts.ModelInputs(model, x, context, conds))
        recordings.append(recording)
        target = recording.calls
        out = executor(x, t, c_concat, context, control, options, **conds)
        if mark is not None:
            other = mark(Inputs(x, context, conds))
            target = recording.marked
            with _shifted(model, parameters):
                executor(other.x, t, c_concat, other.context, control, options, **other.conds)
        target = []
        return out

    from comfy.patcher_extension import WrappersMP

    patcher = patcher.clone()
    patcher.model_options["transformer_options"]["optimized_attention_override"] = attend
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, evaluate)
    inprocess.sample(patcher, tiny, steps=steps, **sampling)
    return recordings


def conditioning_marked(inputs: Inputs, names: tuple[str, ...] = ()) -> Inputs:
    """The inputs with other values in the text, and in the conditions of these names."""
    conds = {name: _shift(value) if name in names else value for name, value in inputs.conds.items()}
    return replace(inputs, context=inputs.context + 1, conds=conds)


def _shift(value: Any) -> Any:
    return [_shift(part) for part in value] if isinstance(value, list) else value + 1


@contextmanager
def _shifted(model: torch.nn.Module, parameters: tuple[str, ...]) -> Iterator[None]:
    originals = {name: model.get_parameter(name).clone() for name in parameters}
    for name in parameters:
        model.get_parameter(name).add_(1)
    try:
        yield
    finally:
        for name, original in originals.items():
            model.get_parameter(name).copy_(original)


def changed_rows(recording: Recording, index: int) -> list[int]:
    """Rows of the call at `index` whose values differ between the two runs."""
    plain, marked = recording.calls[index], recording.marked[index]
    return (plain.rows != marked.rows).any(dim=1).nonzero().flatten().tolist()
