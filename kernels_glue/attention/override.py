"""The attention override that ComfyUI calls for every attention of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..errors import KitchenSolError
from ..failures import first_line, is_out_of_memory
from .call import AttentionCall, as_plain, read_call
from .config import NODE, SolConfig
from .dense import BACKENDS
from .dense.base import DenseBackend
from .devices import sm_of
from .evaluation import Evaluation, Observer
from .providers import kv_splits_for
from .providers.base import Provider
from .routing import Reason, Router, why_dense
from .sol import NO_ROWS, SolOptions
from .tally import Tally

Attention = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class _Request:
    """A call as the model made it.

    Attributes:
        func: the attention function that the model would have used.
        args, kwargs: its arguments.
        call: the same in one form.
    """

    func: Attention
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: AttentionCall

    @property
    def options(self) -> Mapping[str, Any]:
        """`transformer_options`, as the block passed them on."""
        return self.kwargs.get("transformer_options") or {}


class SolOverride:
    """`transformer_options["optimized_attention_override"]` of a patched model.

    Args:
        config: settings of the node.
        router: chooses the Sol kernel.
        earlier: the override that stood there before, which `dense_backend` current goes on using.
        tally: gives the counts of the sampling that runs.
        evaluation: gives the evaluation of the model that runs, or None.
    """

    def __init__(
        self,
        config: SolConfig,
        router: Router,
        earlier: Attention | None,
        tally: Callable[[], Tally],
        evaluation: Callable[[], Evaluation | None],
    ):
        self.config = config
        self.earlier = earlier
        self._router = router
        self._tally = tally
        self._evaluation = evaluation
        self._backend: DenseBackend | None = BACKENDS.get(config.dense_backend)

    def __deepcopy__(self, memo: Any) -> SolOverride:
        return self  # of copied options: the counters and the router are those of one patch

    # Compiled model code calls this as it is: the counters are not part of a graph.
    @torch.compiler.disable
    def __call__(self, func: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Computes one attention; arguments and result are those of core's attention functions.

        Raises:
            KitchenSolError: `strict` is on and the call is dense for an unexpected reason, or a kernel that
                the user chose failed.
        """
        tally = self._tally()
        call = read_call(*args, **kwargs)
        request = _Request(func, args, kwargs, call)
        evaluation = self._evaluation()
        clock = tally.timed(call.q.device) if self.config.profile else nullcontext({})
        with clock as timed:
            out = self._compute(request, evaluation, tally, timed)
        return out

    def _compute(
        self, request: _Request, evaluation: Evaluation | None, tally: Tally, timed: dict[str, str]
    ) -> torch.Tensor:
        call = request.call
        place = None if evaluation is None else evaluation.place(request.options, call)
        reason = why_dense(call, place)
        if reason is None:
            sparse = self._sparse(request, evaluation, tally, timed)
            if not isinstance(sparse, Reason):
                if evaluation.observer is not None:
                    evaluation.observer(place.layer, call, sparse, timed["path"])
                return call.output(sparse)
            reason = sparse
        if self.config.strict and not reason.expected:
            raise KitchenSolError(
                NODE,
                f"strict is on and an attention call would be dense because of: {reason.text}"
                f" (q {tuple(call.q.shape)}, {call.q.dtype}, {call.q.device}).",
                "Turn strict off to let such calls run dense, or change the setting that is in the way.",
            )
        out, kernel = self._dense(request, tally)
        tally.dense[kernel] += 1
        tally.reasons[reason.text] += 1
        timed["path"] = f"dense {kernel}"
        if place is not None and place.layer is not None and evaluation.observer is not None:
            self._observe_dense(evaluation.observer, place.layer, call, out, timed["path"])
        return out

    # --- sparse ---------------------------------------------------------------------------------

    def _sparse(
        self, request: _Request, evaluation: Evaluation, tally: Tally, timed: dict[str, str]
    ) -> torch.Tensor | Reason:
        """[B, H, T, D] by the first Sol kernel that can, or why there is none."""
        call = request.call
        options = partial(self._options, call=call, evaluation=evaluation)
        while not isinstance(chosen := self._router.choose(call, options), Reason):
            provider, asked = chosen
            out = self._run(provider, asked, request, tally)
            if out is not None:
                tally.saw_sparse(provider.name, call.tokens, evaluation.sinks(call.tokens))
                timed["path"] = f"sparse {provider.name}"
                if note := self._router.timing_text(call):
                    tally.remarks[note] = None
                return out
        return chosen

    def _options(self, provider: Provider, call: AttentionCall, evaluation: Evaluation) -> SolOptions:
        sinks = evaluation.sinks(call.tokens)
        splits = kv_splits_for(self.config.kv_splits, sm_of(call.q.device), call.tokens)
        options = SolOptions(
            evaluation.step.tau,
            call.head_dim**-0.5 if call.scale is None else float(call.scale),
            self.config.thresh_type,
            splits,
            self.config.token_aug,
            sinks.keys,
            sinks.queries,
        )
        if splits != 1 and self.config.kv_splits == "auto" and provider.unsupported(options):
            return replace(options, kv_splits=1)
        return options

    def _run(
        self, provider: Provider, options: SolOptions, request: _Request, tally: Tally
    ) -> torch.Tensor | None:
        """[B, H, T, D] by one Sol kernel; None if it raised and another one may be tried."""
        call = request.call
        q, k, v = (tensor.transpose(1, 2) for tensor in (call.q, call.k, call.v))
        try:
            result = provider.run(q, k, v, options)
        except KitchenSolError:
            raise
        except Exception as error:  # whatever a kernel, its compiler and its files come up with
            if is_out_of_memory(error):
                raise
            said = first_line(error)
            if self.config.provider != "auto":
                raise KitchenSolError(
                    NODE,
                    f"the Sol kernel {provider.name!r} failed: {said}.",
                    "Choose another provider, or auto.",
                ) from error
            self._router.give_up(provider, said)
            tally.remarks[f"provider {provider.name} failed and is left alone: {said}"] = None
            return None
        tally.saw_density(result.density)
        out = result.out.transpose(1, 2)
        if options.sink_queries != NO_ROWS and not provider.exact_queries:
            start, stop = options.sink_queries
            out[:, :, start:stop] = self._dense_rows(request, start, stop, tally)
        return out

    def _dense_rows(self, request: _Request, start: int, stop: int, tally: Tally) -> torch.Tensor:
        """[B, H, stop - start, D]: these query rows over all keys."""
        call = request.call
        rows = replace(call, q=call.q[:, :, start:stop], flat_output=False)
        args = (rows.q, rows.k, rows.v, call.heads)
        kwargs = {k: v for k, v in request.kwargs.items() if k not in ("q", "k", "v", "heads", "mask")}
        kwargs |= {"skip_reshape": True, "skip_output_reshape": True}
        return self._dense(_Request(request.func, args, kwargs, rows), tally)[0]

    # --- dense ----------------------------------------------------------------------------------

    def _dense(self, request: _Request, tally: Tally) -> tuple[torch.Tensor, str]:
        """The result in the model's form, and the kernel that computed it."""
        if self._backend is None:
            return self._current(request)
        backend, call = self._backend, request.call
        if unfit := backend.unfit(call):
            # A constraint of the backend and not its absence: exact attention is always right.
            tally.refused[f"{backend.name}: {unfit}"] += 1
            backend = BACKENDS["fa"]
        result = backend.run(call)
        if result.note:
            tally.remarks[result.note] = None
        return call.output(result.out), result.kernel

    def _observe_dense(
        self, observer: Observer, layer: int, call: AttentionCall, out: torch.Tensor, path: str
    ) -> None:
        backend = self._backend
        if backend is None or backend.exact or backend.unfit(call):
            return
        if call.flat_output:
            out = out.unflatten(-1, (call.heads, -1)).transpose(1, 2)
        observer(layer, call, out, path)

    def _current(self, request: _Request) -> tuple[torch.Tensor, str]:
        if self.earlier is not None:
            return self.earlier(request.func, *request.args, **request.kwargs), describe(self.earlier)
        args, kwargs = as_plain(request.args, request.kwargs)
        return request.func(*args, **kwargs), describe(request.func)


def describe(function: Any) -> str:
    """The name under which a reader finds a function or a callable object."""
    named = function if hasattr(function, "__qualname__") else type(function)
    name = named.__qualname__.replace(".<locals>", "")
    module = (named.__module__ or "").rpartition(".")[2]
    return f"{module}.{name}" if module else name
