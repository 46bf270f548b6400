"""Samples the settings that could be proposed, and proposes those that keep a limit."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..applied import Settings
from ..errors import KitchenSolError
from . import recommend, wording
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
        now = recommend.choice_of(self.settings)
        if now == recommend.NOTHING:
            why = "the model has neither INT8 nor Sol of this pack"
            return Recommendation(self.limit, (), None, (why,))
        best, alone = self._took(now, self.first), {}
        try:
            searches_tau = best.tau is not None and sparse
            # Layers that are left alone take time and memory: not where nothing is gained by it.
            if searches_tau or not best.psnr >= self.limit:
                best = self._without_layers(best, recommend.standing_out(layers))
            if searches_tau:
                best = self._with_tau(best)
            elif best.tau is not None:
                self.remarks.append("no attention was sparse, so tau changed nothing and was not searched")
            if not best.psnr >= self.limit:
                alone = self._blame()
        finally:
            self._forget()
        chosen = best if best.psnr >= self.limit else None
        self.remarks.append(recommend.ONE_SEED)
        return Recommendation(self.limit, tuple(self._trials), chosen, tuple(self.remarks), alone)

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
        if recommend.worth(tried.psnr) > recommend.worth(best.psnr):
            return tried
        self.remarks.append("leaving the layers that stand out alone gained nothing")
        return best

    def _with_tau(self, best: Trial) -> Trial:
        """The trial with the largest tau that keeps the limit."""
        kept = best.psnr >= self.limit
        values = recommend.taus_to_try(best.tau, kept)
        found: dict[float, Trial] = {}

        def tried(tau: float) -> Trial:
            if tau not in found:
                found[tau] = self._try(replace(_choice(best), tau=tau))
            return found[tau]

        # Where the far end is no different, nothing in between is.
        ends = (recommend.first_tried(values), values[-1 if kept else 0]) if values else ()
        if ends and all(recommend.equal(tried(tau).psnr, best.psnr) for tau in ends):
            self.remarks.append(recommend.IDLE_TAU)
            return best
        largest = recommend.largest_kept(values, lambda tau: tried(tau).psnr >= self.limit)
        if found:
            self.remarks.append(recommend.MONOTONE)
        if largest == recommend.TAU_HIGHEST:
            self.remarks.append(f"tau above {recommend.TAU_HIGHEST:g} was not tried")
        return best if largest is None else found[largest]

    def _blame(self) -> dict[str, float]:
        """Says how close the best trial came, and what each of its nodes costs alone."""
        highest = max(self._trials, key=lambda trial: recommend.worth(trial.psnr))
        if recommend.worth(highest.psnr) == -math.inf:
            self.remarks.append("no setting that was tried gives a result with a PSNR")
        else:
            best = wording.decibels(highest.psnr)
            self.remarks.append(f"no setting that was tried keeps it; the best has {best}")
        try:
            alone = {
                node: self._measured(choice, f"{node} alone")
                for node, choice in recommend.single_nodes(_choice(highest)).items()
            }
        except KitchenSolError as error:
            self.remarks.append(f"what each node costs alone is not known: {error.problem}")
            return {}
        if alone:
            listed = ", ".join(f"{node} alone {wording.decibels(psnr)}" for node, psnr in alone.items())
            self.remarks.append(f"with the settings of the best, {listed}")
        return alone

    def _try(self, choice: Choice) -> Trial:
        return self._took(choice, self._measured(choice, _name(choice)))

    def _measured(self, choice: Choice, name: str) -> float:
        settings = recommend.with_choice(self.settings, choice)
        after = replace(settings, int8=None, int8_before=(), baked=())
        return self.measure(apply_settings(self._int8(settings), after), name)

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
