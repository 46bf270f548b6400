"""How close a tensor is to the reference's: sums in float64, and the scores that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import KitchenSolError
from .config import NODE
from .perception import perceptual_distance, structural_similarity
from .results import FinalScore, Score

# Elements that are in float64 at a time: 8 MB of each tensor.
_CHUNK = 2**20

# The range of an image's values, which ComfyUI keeps in 0..1.
_IMAGE_PEAK = 1.0


@dataclass(frozen=True)
class _Sums:
    """Over all elements, in float64.

    Attributes:
        model, reference, difference: sums of squares; product: sum of products.
        low, high: range of the reference.
    """

    count: int
    model: float
    reference: float
    product: float
    difference: float
    low: float
    high: float

    @property
    def peak(self) -> float:
        """Of the PSNR of latents, which have no range of their own."""
        return self.high - self.low


def streams(samples: Any) -> list[torch.Tensor]:
    """The tensors of a nested one, which core makes for models of sound and video; itself otherwise."""
    return list(samples.unbind()) if getattr(samples, "is_nested", False) else [samples]


def score(model: Any, reference: Any) -> Score:
    """Scores a latent, or anything of its shape.

    Args:
        model, reference: tensors of one shape, or nested ones of several streams, which count as one long
            vector. Any floating dtype and device; both are read in pieces and stay as they are.

    Returns:
        See `Score`. Equal tensors: infinite PSNR, cosine 1, error 0. NaN stands for what is not defined: all
        three where either tensor has a NaN or an infinite value; the cosine where exactly one is zero; PSNR
        where the reference is constant, so that it has no peak. A zero reference makes the relative error
        infinite.

    Raises:
        KitchenSolError: the shapes differ.
    """
    sums = _sums(streams(model), streams(reference))
    return _score(sums, sums.peak)


def final_psnr(model: Any, reference: Any, images: bool) -> float:
    """The PSNR of `final` alone, in dB; arguments and errors are the same."""
    sums = _sums(streams(model), streams(reference))
    return _score(sums, _IMAGE_PEAK if images else sums.peak).psnr


def final(model: Any, reference: Any, images: bool, lpips: bool) -> FinalScore:
    """Scores the results of two samplings.

    Args:
        model, reference: latents [B, C, H, W] or [B, C, T, H, W], nested ones of several streams, or images
            [..., H, W, 3] in 0..1.
        images: whether they are images.
        lpips: whether LPIPS is wanted, of images, where its package works.

    Returns:
        See `FinalScore`; what could not be computed is NaN (None for LPIPS), with a remark that says why.

    Raises:
        KitchenSolError: the shapes differ.
    """
    pairs = streams(model), streams(reference)
    sums = _sums(*pairs)
    peak = _IMAGE_PEAK if images else sums.peak
    scored = _score(sums, peak)
    frames, others = _picture(pairs[0]), _picture(pairs[1])
    remarks: list[str] = []
    if math.isnan(scored.relative_l2):
        return FinalScore(scored.psnr, math.nan, None, images)
    ssim, remark = structural_similarity(frames, others, peak, images)
    remarks += remark
    distance = None
    if lpips and images:
        distance, remark = perceptual_distance(frames, others)
        remarks += remark
    return FinalScore(scored.psnr, ssim, distance, images, tuple(remarks))


def _picture(streams: Sequence[torch.Tensor]) -> torch.Tensor:
    """The stream with frames: the video of sound and video, which has the most dimensions."""
    return max(streams, key=lambda stream: stream.ndim)


def _sums(model: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> _Sums:
    shapes = [[tuple(tensor.shape) for tensor in side] for side in (model, reference)]
    if shapes[0] != shapes[1]:
        raise KitchenSolError(
            NODE,
            f"the model's result has the shape {_listed(shapes[0])}, the reference's {_listed(shapes[1])}.",
            "Compare two models of the same family.",
        )
    count, low, high = 0, math.inf, -math.inf
    totals = torch.zeros(4, dtype=torch.float64)
    for pair in zip(model, reference, strict=True):
        for a, b in _pieces(*pair):
            d = a - b
            totals += torch.stack([a.dot(a), b.dot(b), a.dot(b), d.dot(d)])
            count += a.numel()
            low, high = min(low, float(b.min())), max(high, float(b.max()))
    return _Sums(count, *totals.tolist(), low, high)


def _pieces(model: torch.Tensor, reference: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors in equal pieces, as float64 vectors on the CPU; halves, whatever their strides."""
    if model.numel() > _CHUNK:
        longest = max(range(model.ndim), key=lambda dim: model.shape[dim])
        for halves in zip(model.chunk(2, longest), reference.chunk(2, longest), strict=True):
            yield from _pieces(*halves)
    elif model.numel():
        # MPS has no float64, so the CPU comes first.
        a, b = (tensor.cpu().double().reshape(-1) for tensor in (model, reference))
        yield a, b


def _score(sums: _Sums, peak: float) -> Score:
    if not (math.isfinite(sums.model) and math.isfinite(sums.reference)) or not sums.count:
        return Score(math.nan, math.nan, math.nan)
    if not sums.difference:
        return Score(math.inf, 1.0, 0.0)
    psnr = 10 * math.log10(peak**2 * sums.count / sums.difference) if peak else math.nan
    lengths = math.sqrt(sums.model) * math.sqrt(sums.reference)
    # Rounding can make it a little more than 1.
    cosine = max(-1.0, min(1.0, sums.product / lengths)) if lengths else math.nan
    error = math.sqrt(sums.difference / sums.reference) if sums.reference else math.inf
    return Score(psnr, cosine, error)


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)
