"""Follows a sampling, and shows what was streamed when it is over."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comfy.patcher_extension import CallbacksMP

from ..report import Report, Show
from . import report
from .config import NODE, OffloadConfig
from .handle import install, placed_on
from .strategy import Strategy
from .streaming import Streaming

if TYPE_CHECKING:
    from comfy.model_base import BaseModel
    from comfy.model_patcher import ModelPatcher


@dataclass
class _Run:
    """One sampling of one model; several GPUs have a copy of it each.

    Attributes:
        streaming: what its blocks were placed by when it began.
        before: bytes copied and seconds waited until then.
        evaluations: of the model, each with all its conditions.
        planned: steps of the sampler's schedule.
    """

    streaming: Streaming
    began: float
    before: tuple[int, float]
    evaluations: int = 0
    planned: int = 0

    @property
    def steps(self) -> int:
        """Steps of the sampler, some of which take several evaluations; fewer if it was cancelled."""
        return min(self.evaluations, self.planned or self.evaluations)


class Session:
    """The samplings of one application of the node, one after the other. Clones of the patcher share it.

    Args:
        strategy: the chosen one.
    """

    def __init__(self, config: OffloadConfig, strategy: Strategy, show: Show):
        self._config = config
        self._strategy = strategy
        self._show = show
        self._runs: weakref.WeakKeyDictionary[BaseModel, _Run] = weakref.WeakKeyDictionary()

    def begin(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_PRE_RUN: the model is loaded, and nothing has been evaluated."""
        placed = placed_on(patcher.model)
        if placed is not None:
            streaming = placed.streaming
            self._runs[patcher.model] = _Run(streaming, time.perf_counter(), _counters(streaming))

    def step(self, patcher: ModelPatcher, timestep: Any = None, model_options: Any = None, *_: Any) -> None:
        """ON_PREPARE_STATE: once an evaluation, for all its conditions."""
        if (run := self._runs.get(patcher.model)) is not None:
            sigmas = ((model_options or {}).get("transformer_options") or {}).get("sample_sigmas")
            run.evaluations += 1
            run.planned = 0 if sigmas is None else len(sigmas) - 1

    def end(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_CLEANUP: core calls it also where ON_PRE_RUN was never reached."""
        placed, run = placed_on(patcher.model), self._runs.pop(patcher.model, None)
        if placed is None:
            return
        placed.streaming.settle()
        plan = placed.streaming.plan
        # Where core has loaded the model anew in the middle, there is nothing to compare with.
        if run is None or not run.steps or plan is None or run.streaming is not placed.streaming:
            return
        copied, waited = (now - then for now, then in zip(_counters(run.streaming), run.before, strict=True))
        sampled = report.Sampled(
            run.steps,
            time.perf_counter() - run.began,
            copied,
            waited,
            patcher.loaded_size(),
            run.streaming.pins.bytes,
        )
        told = Report.of(
            NODE,
            [report.plan_line(plan, self._config.budget)],
            report.sampled_lines(sampled, plan),
            [report.strategy_line(self._strategy)],
            placed.remarks,
        )
        told.log()
        self._show(told)


def watch(patcher: ModelPatcher, session: Session) -> None:
    """Installs a session on a patcher, in place of an earlier application of the node."""
    install(
        patcher,
        {
            CallbacksMP.ON_PRE_RUN: session.begin,
            CallbacksMP.ON_PREPARE_STATE: session.step,
            CallbacksMP.ON_CLEANUP: session.end,
        },
    )


def _counters(streaming: Streaming) -> tuple[int, float]:
    return streaming.traffic.bytes, streaming.lane.waited_ms() / 1000
