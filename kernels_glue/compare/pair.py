"""The two samplings of a comparison, with everything that is looked at on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..attention.evaluation import OBSERVER
from ..names import compress
from ..units import counted
from .layers import AttentionErrors, Int8Errors, ReferenceRows, SparseCalls, looked_at
from .metrics import score, streams
from .recommend import ranked
from .results import LayerError, StepScore
from .sampling import EachStep, Inputs, Sampled, sample

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# Two sigmas that differ by no more than this share, as rounding makes them, are one.
_SAME_SIGMA = 1e-4

# Told what is going on, such as "reference: 3 of 20 steps"; plain text to show on the node.
Progress = Callable[[str], None]


@dataclass
class Pair:
    """Samples the reference and then the model, once.

    Attributes:
        names: of the INT8 layers whose error is wanted.
        attention: whether that of attention is.
        scores: of the steps that both took; their sigma is the model's.
    """

    inputs: Inputs
    progress: Progress
    names: Collection[str]
    attention: bool
    scores: list[StepScore] = field(default_factory=list)

    def __post_init__(self) -> None:
        steps = looked_at(self.inputs.steps)
        self._disturbed = steps if self.names or self.attention else frozenset()
        self._path: list[tuple[Any, Any]] = []
        self._sigmas: list[float] = []
        self._apart: int | None = None
        self._rows = ReferenceRows(self.names, steps)
        self._int8: tuple[LayerError, ...] = ()
        self._attention = AttentionErrors(steps=steps) if self.attention else SparseCalls()
        self._steps = [0, 0]

    def sample_reference(self, reference: ModelPatcher) -> Sampled:
        """The first sampling."""

        def keep(step: int, sigma: float, denoised: Any, latent: Any) -> None:
            self._path.append((_copy(denoised), _copy(latent)))
            self._sigmas.append(sigma)
            self._rows.advance()

        with ExitStack() as watching:
            if self.names:
                watching.enter_context(self._rows.watching(reference.model.diffusion_model))
            each_step = self._telling("reference", keep)
            sampled = sample(reference, self.inputs, each_step, disturbed=self._disturbed)
        self._steps[0] = sampled.steps
        finished(self.progress, "reference", self.inputs.steps, sampled.steps)
        # What is kept for the comparison is none of the model's.
        host = sampled.usage.host_bytes - sum(map(_bytes, self._kept()))
        return replace(sampled, usage=replace(sampled.usage, host_bytes=max(0, host)))

    def sample_model(self, model: ModelPatcher) -> Sampled:
        """The second sampling, which is compared with the first one step by step."""
        int8 = Int8Errors(self._rows.found, model.load_device)
        with ExitStack() as watching:
            if self._rows.found:
                watching.enter_context(int8.watching(model.model.diffusion_model))
            each_step = self._telling("model", self._compare)
            options = {OBSERVER: self._attention}
            sampled = sample(model, self.inputs, each_step, options, self._disturbed)
        self._steps[1] = sampled.steps
        finished(self.progress, "model", self.inputs.steps, sampled.steps)
        self._int8 = int8.errors()
        self._path.clear()
        self._rows.found.clear()
        return sampled

    @property
    def sparse(self) -> bool:
        """Whether any attention of the model was sparse."""
        return self._attention.sparse > 0

    def layers(self) -> tuple[LayerError, ...]:
        """The errors of all layers that were looked at, those that stand out most among their kind first."""
        return ranked((*self._int8, *self._attention.errors()))

    def remarks(self) -> Iterator[str]:
        """What was not compared."""
        first, second = self._steps
        if first != second:
            least = min(first, second)
            yield (
                f"the sampler took {counted(second, 'step')} for the model and {first} for the reference; the"
                f" first {least} of each are compared"
            )
        elif not first:
            yield "the sampler tells nothing of its steps, so only the results are compared"
        if self._apart is not None:
            yield (
                f"the sampler took the two models through different sigmas from step {self._apart + 1} on, so"
                " the scores of those steps are of different moments"
            )
        yield from self._looks()
        missed = set(self.names) - {layer.name for layer in self._int8}
        if missed:
            count = counted(len(missed), "INT8 layer")
            names = ", ".join(compress([name for name in self.names if name in missed]))
            yield (
                f"{count} could not be looked at (quantized in the reference too, not called by it, or"
                f" compiled): {names}"
            )

    def _looks(self) -> Iterator[str]:
        """Where steps were looked at that are not the first, the middle and the last one."""
        planned, taken = self.inputs.steps, min(self._steps)
        if self._disturbed and taken not in (0, planned):
            looks = [str(step + 1) for step in sorted(self._disturbed) if step < taken]
            where = f"step{'s' if len(looks) > 1 else ''} {', '.join(looks)}"
            yield (
                f"the schedule has {counted(planned, 'step')} and the sampler took {taken}; layers were"
                f" looked at in {where} alone"
            )

    def _kept(self) -> Iterator[Any]:
        for pair in self._path:
            yield from pair
        for rows in self._rows.found.values():
            yield from (*rows.inputs, *rows.outputs)

    def _compare(self, step: int, sigma: float, denoised: Any, latent: Any) -> None:
        self._attention.advance()
        if step < len(self._path):
            expected, start = self._path[step]
            self._path[step] = (None, None)  # it is not needed again
            if self._apart is None and abs(sigma - self._sigmas[step]) > _SAME_SIGMA * abs(sigma):
                self._apart = step
            self.scores.append(StepScore(step, sigma, score(denoised, expected), score(latent, start)))

    def _telling(self, who: str, each_step: EachStep) -> EachStep:
        return telling(self.progress, who, self.inputs.steps, each_step)


def _copy(samples: Any) -> Any:
    return samples.to("cpu", copy=True)


def _bytes(samples: Any) -> int:
    return sum(part.nbytes for part in streams(samples))


def telling(progress: Progress, who: str, steps: int, each_step: EachStep | None = None) -> EachStep:
    """Says how far a sampling has come."""
    progress(f"{who}: 0 of {counted(steps, 'step')}")

    def told(step: int, *values: Any) -> None:
        if each_step is not None:
            each_step(step, *values)
        # A sampler that chooses its own steps may take more than the schedule has.
        progress(
            f"{who}: {step + 1} of {counted(steps, 'step')}" if step < steps else f"{who}: step {step + 1}"
        )

    return told


def finished(progress: Progress, who: str, steps: int, taken: int) -> None:
    """Says that a sampling is over where the count of its steps did not, as it is not the schedule's."""
    if taken != steps:
        progress(f"{who}: done in {counted(taken, 'step')}")
