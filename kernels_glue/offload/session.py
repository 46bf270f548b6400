"""Follows a sampling, and shows what was streamed when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from comfy.patcher_extension import CallbacksMP

from . import report
from .config import NODE, OffloadConfig
from .handle import install, placed_on

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

Show = Callable[[str], None]


class Session:
    """The samplings of one application of the node, one after the other. Clones of the patcher share it.

    Args:
        why: the chosen strategy and the reason.
    """

    def __init__(self, config: OffloadConfig, why: str, show: Show):
        self._config = config
        self._why = why
        self._show = show
        self._steps = 0
        self._began = 0.0
        self._before = (0, 0.0)

    def begin(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_PRE_RUN: the model is loaded, and nothing has been evaluated."""
        self._steps = 0
        self._began = time.perf_counter()
        self._before = _counters(patcher)

    def step(self, *_: Any) -> None:
        """ON_PREPARE_STATE: once an evaluation, for all its conditions."""
        self._steps += 1

    def end(self, patcher: ModelPatcher, *_: Any) -> None:
        """ON_CLEANUP: core calls it also where ON_PRE_RUN was never reached."""
        placed = placed_on(patcher.model)
        if placed is not None:
            placed.streaming.settle()
        if not self._steps or placed is None or placed.streaming.plan is None:
            return
        copied, waited = (now - then for now, then in zip(_counters(patcher), self._before, strict=True))
        plan = placed.streaming.plan
        sampled = report.Sampled(
            self._steps,
            time.perf_counter() - self._began,
            copied,
            waited,
            patcher.loaded_size(),
            placed.streaming.pins.bytes,
        )
        self._steps = 0
        lines = [*report.plan_lines(plan, self._config.budget), *report.sampled_lines(sampled, plan)]
        for line in lines:
            logging.info("%s: %s", NODE, line)
        for line in placed.remarks:
            logging.warning("%s: %s", NODE, line)
        self._show(report.assemble(lines, [self._why], placed.remarks))


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


def _counters(patcher: ModelPatcher) -> tuple[int, float]:
    placed = placed_on(patcher.model)
    if placed is None:
        return 0, 0.0
    streaming = placed.streaming
    return streaming.traffic.bytes, streaming.lane.waited_ms() / 1000
