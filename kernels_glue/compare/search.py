"""Samples the settings that could be proposed, and proposes those that keep a limit."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..applied import Settings
from ..errors import KitchenSolError
from . import recommend
from .recommend import Choice
from .results import LayerError, Recommendation, Trial
from .settings import apply_settings

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# Samples a patcher as the comparison did, and gives the PSNR of its result: (patcher, what to call it).
Measure = Callable[["ModelPatcher", str], float]


@dataclass
class Search:
    """The trials for one recommendation.

    Attributes:
        base: the model without the pack's nodes.
        settings: of the nodes on the model that was compared.
        limit: dB to keep.
        measure: samples one.
        first: PSNR of the comparison itself, with the settings as they are.
        remarks: what is known already.
    """

    base: ModelPatcher
    settings: Settings
    limit: float
    measure: Measure
    first: float
    remarks: list[str] = field(default_factory=list)
    _trials: list[Trial] = field(default_factory=list)
    _quantized: tuple[Settings, ModelPatcher] | None = None

    def run(self, layers: Sequence[LayerError], sparse: bool) -> Recommendation:
        """The recommendation.

        Args:
            layers: the error of each layer that was looked at; none proposes no layers.
            sparse: whether any attention of the comparison was sparse, so that tau does something.

        Raises:
            KitchenSolError: a node refuses the settings that it had.
        """
        best = self._took(recommend.choice_of(self.settings), self.first)
        try:
            searches_tau = best.tau is not None and sparse
            # Layers that are left alone take time and memory: not where nothing is gained by it.
            if searches_tau or not best.psnr >= self.limit:
                best = self._without_layers(best, recommend.standing_out(layers))
            if searches_tau:
                best = self._with_tau(best)
            elif best.tau is not None:
                self.remarks.append("no attention was sparse, so tau changed nothing and was not searched")
        finally:
            self._forget()
        if best.ignored_layers is None and best.tau is None:
            self.remarks.append("the model has neither INT8 nor Sol of this pack, so there is nothing to set")
        chosen = best if best.psnr >= self.limit else None
        if chosen is None:
            # NaN compares with nothing.
            found = [trial.psnr for trial in self._trials if not math.isnan(trial.psnr)]
            highest = max(found, default=math.nan)
            self.remarks.append(f"no setting that was tried keeps it; the best has {highest:.2f} dB")
        self.remarks.append(recommend.ONE_SEED)
        return Recommendation(self.limit, tuple(self._trials), chosen, tuple(self.remarks))

    def _without_layers(self, best: Trial, layers: Sequence[LayerError]) -> Trial:
        """The better one of a trial and the same with the layers that stand out left alone."""
        now = _choice(best)
        choice = recommend.leaving(now, layers)
        if choice == now:
            return best
        try:
            tried = self._try(choice)
        except KitchenSolError as error:
            self.remarks.append(f"the layers that stand out cannot be left alone: {error.problem}")
            return best
        if tried.psnr > best.psnr:
            return tried
        self.remarks.append("leaving the layers that stand out alone gained nothing")
        return best

    def _with_tau(self, best: Trial) -> Trial:
        """The trial with the largest tau that keeps the limit."""
        values = recommend.taus_to_try(best.tau, best.psnr >= self.limit)
        found: dict[float, Trial] = {}

        def keeps(tau: float) -> bool:
            found[tau] = self._try(replace(_choice(best), tau=tau))
            return found[tau].psnr >= self.limit

        largest = recommend.largest_kept(values, keeps)
        if found:
            self.remarks.append(recommend.MONOTONE)
        if largest == recommend.TAU_HIGHEST:
            self.remarks.append(f"tau above {recommend.TAU_HIGHEST:g} was not tried")
        return best if largest is None else found[largest]

    def _try(self, choice: Choice) -> Trial:
        settings = recommend.with_choice(self.settings, choice)
        after = replace(settings, int8=None, int8_before=(), baked=())
        patcher = apply_settings(self._int8(settings), after)
        return self._took(choice, self.measure(patcher, _name(choice)))

    def _took(self, choice: Choice, psnr: float) -> Trial:
        trial = Trial(choice.tau, choice.ignored_layers, choice.dense_layers, psnr)
        self._trials.append(trial)
        return trial

    def _int8(self, settings: Settings) -> ModelPatcher:
        """The model with INT8 alone, which trials of the same layers share."""
        int8 = replace(settings, sol=None, offload=None)
        if self._quantized is None or self._quantized[0] != int8:
            self._forget()  # before there is another one
            self._quantized = (int8, apply_settings(self.base, int8))
        return self._quantized[1]

    def _forget(self) -> None:
        if self._quantized is not None:
            self._quantized = None
            gc.collect()


def _choice(trial: Trial) -> Choice:
    return Choice(trial.tau, trial.ignored_layers, trial.dense_layers)


def _name(choice: Choice) -> str:
    return "trial" if choice.tau is None else f"trial, tau {choice.tau:g}"
