"""Samples one model through core, as its node SamplerCustom does, and looks at every step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import comfy.nested_tensor
import comfy.patcher_extension
import comfy.sample
import comfy.utils
import latent_preview
import torch

from .meter import Meter
from .metrics import streams
from .results import Usage

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# Told of each step when its prediction is known: (step, sigma as in StepScore, denoised, latent). The tensors
# are the ones of the sampler, which may write into them afterwards; those of audio-video models are core's
# NestedTensor.
EachStep = Callable[[int, float, Any, Any], None]


@dataclass(frozen=True)
class Inputs:
    """What both models are sampled with, as core's SamplerCustom takes it.

    Attributes:
        noise_seed: of the noise that both start from.
        latent_image: core's LATENT dict.
        add_noise: False: the latent is the start as it is, with the noise that an earlier stage left in it.
    """

    noise_seed: int
    cfg: float
    positive: Any
    negative: Any
    sampler: Any
    sigmas: torch.Tensor
    latent_image: dict[str, Any]
    add_noise: bool = True

    @property
    def steps(self) -> int:
        """Steps of the schedule."""
        return max(0, self.sigmas.shape[-1] - 1)


@dataclass(frozen=True)
class Sampled:
    """One sampling.

    Attributes:
        latent: core's LATENT dict, as SamplerCustom returns it.
        steps: how often the sampler told of a step.
    """

    latent: dict[str, Any]
    usage: Usage
    steps: int


def start_of(model: ModelPatcher, inputs: Inputs) -> Any:
    """The latent that a model starts from: an empty one gets the number of channels that it wants."""
    latent = inputs.latent_image
    return comfy.sample.fix_empty_latent_channels(
        model,
        latent["samples"],
        latent.get("downscale_ratio_spacial"),
        latent.get("downscale_ratio_temporal"),
    )


def sample(
    model: ModelPatcher,
    inputs: Inputs,
    each_step: EachStep | None = None,
    options: dict[str, Any] | None = None,
    disturbed: Collection[int] = (),
) -> Sampled:
    """Samples a model with the bits that core's node gives.

    Args:
        each_step: is told of each step; its own time is not counted.
        options: go into `transformer_options` of this sampling alone.
        disturbed: see Meter.
    """
    latent = dict(inputs.latent_image)
    start = latent["samples"] = start_of(model, inputs)
    preview = latent_preview.prepare_callback(model, inputs.steps)
    meter = Meter(model, disturbed)
    sigmas = _Sigmas()
    seen = 0

    def callback(step: int, denoised: Any, x: Any, total: int) -> None:
        nonlocal seen
        meter.step()
        if each_step is not None:
            each_step(seen, sigmas.last(), denoised, x)
        seen += 1
        preview(step, denoised, x, total)
        meter.resume()

    samples = comfy.sample.sample_custom(
        model,
        _noise(start, inputs, latent.get("batch_index")),
        inputs.cfg,
        _beginning(inputs.sampler, meter.begin, options or {}, sigmas),
        inputs.sigmas,
        inputs.positive,
        inputs.negative,
        start,
        noise_mask=latent.get("noise_mask"),
        callback=callback,
        disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
        seed=inputs.noise_seed,
    )
    for name in ("downscale_ratio_spacial", "downscale_ratio_temporal"):
        latent.pop(name, None)
    latent["samples"] = samples
    return Sampled(latent, meter.usage(), seen)


def _noise(start: Any, inputs: Inputs, batch_index: Any) -> Any:
    """As core's SamplerCustom makes it."""
    if inputs.add_noise:
        return comfy.sample.prepare_noise(start, inputs.noise_seed, batch_index)
    zeros = [torch.zeros(part.shape, dtype=part.dtype, device="cpu") for part in streams(start)]
    return comfy.nested_tensor.NestedTensor(zeros) if getattr(start, "is_nested", False) else zeros[0]


class _Sigmas:
    """Knows the sigma that the model was evaluated at last.

    The schedule does not tell: some samplers choose steps of their own. The device is waited for when asked.
    """

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def last(self) -> float:
        """NaN before the first evaluation."""
        return math.nan if self._last is None else float(self._last)

    def watch(self, transformer_options: dict[str, Any]) -> None:
        """Looks at the evaluations that get these options."""

        def look(executor: Any, x: Any, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # Of a batch, all have the same. Samplers write into their tensors.
            self._last = t.reshape(-1)[0].clone()
            return executor(x, t, *args, **kwargs)

        kind = comfy.patcher_extension.WrappersMP.APPLY_MODEL
        comfy.patcher_extension.add_wrapper(kind, look, transformer_options)


def _beginning(sampler: Any, begin: Callable[[], None], options: dict[str, Any], seen: _Sigmas) -> Any:
    """A copy of a sampler object that says when it begins, which is after the model was loaded."""
    telling = copy.copy(sampler)

    def begun(model_wrap: Any, sigmas: Any, extra_args: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # Core makes these options anew for each sampling.
        transformer_options = extra_args["model_options"].setdefault("transformer_options", {})
        transformer_options.update(options)
        seen.watch(transformer_options)
        begin()
        return sampler.sample(model_wrap, sigmas, extra_args, *args, **kwargs)

    telling.sample = begun
    return telling
