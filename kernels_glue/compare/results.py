"""What a comparison finds, as plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Score:
    """How close a tensor is to the reference's.

    Attributes:
        psnr: dB; the peak is the range (largest less smallest value) of the reference tensor, for images 1.
            Infinite for equal tensors.
        cosine: of the two tensors as vectors, 1 for the same direction.
        relative_l2: ||model - reference|| / ||reference||.
    """

    psnr: float
    cosine: float
    relative_l2: float


@dataclass(frozen=True)
class StepScore:
    """One step of the sampler, as both models went through it from the same noise.

    Attributes:
        step: from 0.
        sigma: at which the model was last evaluated before the sampler told of the step. Of samplers that
            keep to the schedule it is that of the step's beginning; NaN if it was not evaluated.
        denoised: of the prediction of the clean latent.
        latent: of the noisy latent that the step starts from.
    """

    step: int
    sigma: float
    denoised: Score
    latent: Score


@dataclass(frozen=True)
class FinalScore:
    """The two results.

    Attributes:
        psnr: dB, peak as in Score.
        ssim: structural similarity (scikit-image), mean over frames.
        lpips: perceptual distance (package lpips), mean over frames; None where it was not computed.
        images: whether decoded images were compared, else latents.
        remarks: what could not be computed and why, and what was sampled.
    """

    psnr: float
    ssim: float
    lpips: float | None
    images: bool
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Usage:
    """What one model took.

    Attributes:
        seconds_per_step: median over the steps after the first, without those at which layers were looked at
            where there are others; of the only step where there is one.
        first_step_seconds: of the first step.
        peak_device_bytes: largest use of the device while it was sampled; None on a CPU.
        host_bytes: growth of the process' resident memory from before it was loaded to its largest while
            it was sampled.
        weight_bytes: of all its weights.
    """

    seconds_per_step: float
    first_step_seconds: float
    peak_device_bytes: int | None
    host_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class LayerError:
    """How far one layer is from the reference on the same inputs.

    Attributes:
        name: dotted name below the diffusion model as `ignored_layers` takes it, or for attention the number
            of the layer as `dense_layers` takes it.
        kind: "int8"; "attention" for sparse attention; "dense attention" for a quantized dense backend, which
            stays quantized in a layer of `dense_layers`.
        error: relative L2 error of its output, mean over what was looked at.
        calls: how many calls were looked at.
    """

    name: str
    kind: str
    error: float
    calls: int


@dataclass(frozen=True)
class Trial:
    """One sampling with other settings, made for a recommendation.

    Attributes:
        tau: of Sol, None where the model has no Sol.
        ignored_layers: the complete text for that input, None where the model is not quantized.
        dense_layers: the complete text for that input, None where the model has no Sol.
        psnr: of its result, as FinalScore.psnr.
    """

    tau: float | None
    ignored_layers: str | None
    dense_layers: str | None
    psnr: float


@dataclass(frozen=True)
class Recommendation:
    """Settings to paste into the nodes, and what was measured with them.

    Attributes:
        limit: dB that the user asked to keep.
        trials: every sampling made for it, in order; none where there is nothing to set.
        chosen: the trial to take over; None where no setting that was tried keeps the limit.
        remarks: what limits its meaning.
        alone: PSNR with one of the model's nodes alone, by the node's name; where no trial keeps the limit
            and there are both INT8 and Sol.
    """

    limit: float
    trials: tuple[Trial, ...]
    chosen: Trial | None
    remarks: tuple[str, ...] = ()
    alone: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """All that one run of the node finds.

    Attributes:
        remarks: what was not looked at and why.
        warnings: what makes the scores mean nothing.
    """

    steps: tuple[StepScore, ...]
    final: FinalScore
    model: Usage
    reference: Usage
    layers: tuple[LayerError, ...] = ()
    recommendation: Recommendation | None = None
    remarks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
