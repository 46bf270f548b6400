"""Follows a sampling: which step it is, which evaluation, and what to show when it is over."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ..callbacks import set_callbacks
from ..errors import KitchenSolError
from ..report import Report, Show
from . import report
from .block_marks import marked
from .config import NODE, SolConfig
from .evaluation import OBSERVER, STEP, Evaluation, Observer
from .layers import LayerCounter, LayerSet
from .layouts import Layout, ModelInputs
from .override import SolOverride, describe
from .schedule import Schedule, Step, make_schedule
from .sinks import SinkRule
from .tally import Tally

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

KEY = "kitchen_sol_attention"
OVERRIDE = "optimized_attention_override"


@dataclass(frozen=True)
class Model:
    """What the patch knows of the model: names and numbers, no modules.

    Attributes:
        lists: its main block lists in execution order, with their lengths.
        layout: where its text rows are; None if the table has no entry or there are none.
        gives_block_index: its blocks tell their index.
        marks_blocks: they do not, and can be made to.
        dense_layers: layers that are always dense.
        rule: what is exact in its sequences.
    """

    lists: tuple[tuple[str, int], ...]
    layout: Layout | None
    gives_block_index: bool
    marks_blocks: bool
    dense_layers: LayerSet
    rule: SinkRule

    @property
    def family(self) -> str:
        """Name of its layout of text rows, or empty."""
        return "" if self.layout is None else self.layout.family


class Session:
    """The samplings of one patch, one after the other.

    Callbacks and wrappers hold this object; clones of the patcher share it, as they share the override.
    """

    def __deepcopy__(self, memo: Any) -> Session:
        return self  # of copied options: the callbacks of the patcher go on with this one

    def __init__(self, config: SolConfig, model: Model, show: Show):
        self._config = config
        self._model = model
        self._show = show
        self._schedule: tuple[Any, Schedule] | None = None
        self._tally = Tally()
        self._told = ""
        # Of this thread: core evaluates the copies of a model on several GPUs in threads.
        self._running = threading.local()

    def tally(self) -> Tally:
        """Counts of the sampling that runs, or of the last one."""
        return self._tally

    def evaluation(self) -> Evaluation | None:
        """The evaluation of the model that runs, or None outside of one."""
        return getattr(self._running, "evaluation", None)

    # --- callbacks of core: they reach every patcher, also the second one of a guider for two models ----

    def begin(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_PRE_RUN: of both models of a guider, before either is evaluated."""
        if self._told:
            self._schedule = None
            self._tally = Tally()
            self._told = ""

    def prepare(self, patcher: ModelPatcher, timestep: torch.Tensor, model_options: dict[str, Any]) -> None:
        """ON_PREPARE_STATE: once for all conditions of an evaluation, so that a GPU is waited for once."""
        self._tally.announced += 1
        options = model_options.setdefault("transformer_options", {})
        # With its owner: the two models of a guider share these options.
        options[STEP] = self, self._step(patcher.get_model_object("model_sampling"), timestep, options)

    def end(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_CLEANUP: core calls it also where ON_PRE_RUN was never reached."""
        if self._tally.announced or self._tally.calls:
            self._tell()

    # --- the model ------------------------------------------------------------------------------

    def apply_model(
        self,
        override: SolOverride,
        executor: Any,
        x: torch.Tensor,
        t: torch.Tensor,
        c_concat: Any = None,
        c_crossattn: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Wrapper of core's apply_model: one evaluation begins and ends here."""
        transformer_options = dict(transformer_options or {})
        base = executor.class_obj
        owner, step = transformer_options.get(STEP) or (None, None)
        if owner is not self:
            step = self._step(base.model_sampling, t, transformer_options)
        inputs = ModelInputs(base.diffusion_model, x, c_crossattn, kwargs)
        if self._model.marks_blocks:
            transformer_options = marked(transformer_options, self._model.lists)
        found = transformer_options.get(OVERRIDE)
        before = self._tally.calls
        self._tally.begun += 1
        if found is not override:
            self._tally.replaced_by = describe(found) if found is not None else "a patch that takes it out"
        outer, self._running.evaluation = (
            self.evaluation(),
            self._evaluation(step, inputs, transformer_options.get(OBSERVER)),
        )
        try:
            out = executor(x, t, c_concat, c_crossattn, control, transformer_options, **kwargs)
        finally:
            self._running.evaluation = outer
        self._tally.done += 1
        if found is not override and self._config.strict and self._tally.calls == before:
            raise KitchenSolError(
                NODE,
                f"strict is on, and {self._tally.replaced_by} was set after this node and takes all attention"
                " calls.",
                "Put this node behind the one that sets it, or turn strict off.",
            )
        return out

    def _evaluation(self, step: Step, inputs: ModelInputs, observer: Observer | None) -> Evaluation:
        model = self._model
        context = inputs.context
        return Evaluation(
            step,
            model.dense_layers,
            LayerCounter(model.lists, model.gives_block_index),
            model.rule,
            partial(_text_rows, model.layout, inputs),
            context.shape[1] if isinstance(context, torch.Tensor) else 0,
            observer,
        )

    def _step(self, model_sampling: Any, timestep: torch.Tensor, options: dict[str, Any]) -> Step:
        sigmas = options.get("sample_sigmas")
        if self._schedule is None or self._schedule[0] is not sigmas:
            values = [] if sigmas is None else sigmas.tolist()
            self._schedule = (sigmas, make_schedule(self._config, values, model_sampling.percent_to_sigma))
        return self._schedule[1].step(float(timestep.flatten()[0]))

    # --- what is shown --------------------------------------------------------------------------

    def _tell(self) -> None:
        tally = self._tally
        schedule = None if self._schedule is None else self._schedule[1]
        told = Report.of(
            NODE,
            report.trouble_lines(tally),
            report.counts_lines(tally),
            [report.schedule_line(schedule)] if schedule and schedule.sigmas else [],
            report.tally_lines(tally),
            report.detail_lines(tally, self._model.rule.source(self._model.family)),
        )
        if told.text == self._told:
            return
        self._told = told.text
        told.log()
        self._show(told)


def _text_rows(layout: Layout | None, inputs: ModelInputs, tokens: int) -> tuple[int, int]:
    return (0, 0) if layout is None else layout.text_rows(tokens, inputs)


def watch(patcher: ModelPatcher, session: Session, override: SolOverride) -> None:
    """Installs a session on a patcher, in place of that of an earlier application of the node."""
    callbacks = {
        CallbacksMP.ON_PRE_RUN: session.begin,
        CallbacksMP.ON_PREPARE_STATE: session.prepare,
        CallbacksMP.ON_CLEANUP: session.end,
    }
    unwatch(patcher)
    set_callbacks(patcher, KEY, callbacks)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, partial(session.apply_model, override))


def unwatch(patcher: ModelPatcher) -> None:
    """Takes a session off a patcher, if there is one."""
    set_callbacks(patcher, KEY, {})
    patcher.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
