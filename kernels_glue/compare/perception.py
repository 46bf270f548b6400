"""Scores of frames by packages that are loaded on first use: SSIM by scikit-image, LPIPS by lpips."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import torch

from ..failures import first_line

# More frames than this are sampled evenly: the mean over them is as good, and costs seconds, not minutes.
MAX_FRAMES = 64

# scikit-image's own window, and the smallest that its unbiased variance allows.
_WINDOW, _SMALLEST = 7, 3

Scored = tuple[float, list[str]]


def structural_similarity(model: torch.Tensor, reference: torch.Tensor, peak: float, images: bool) -> Scored:
    """SSIM (Wang et al. 2004, as scikit-image computes it), mean over channels and frames.

    Args:
        model, reference: finite tensors of one shape, images [..., H, W, C] or latents [B, C, ..., H, W].
        peak: the range that the values can have.
        images: whether the channels are last.

    Returns:
        SSIM, NaN where there are no frames or scikit-image does not work, and remarks.
    """
    if model.ndim < 4:
        return math.nan, ["no SSIM: this latent has no frames"]
    height, width = reference.shape[-3:-1] if images else reference.shape[-2:]
    side = min(height, width)
    if side < _SMALLEST:
        return math.nan, [f"no SSIM: frames of {height} x {width} are too small for it"]
    if torch.equal(model, reference):
        return 1.0, []
    if not peak:
        return math.nan, ["no SSIM: all values of the reference are the same"]
    window = min(_WINDOW, side - 1 + side % 2)  # odd
    try:
        from skimage.metrics import structural_similarity as ssim
    except Exception as error:  # whatever is wrong with it: the other scores need it not
        return math.nan, [f"no SSIM: scikit-image does not work here ({first_line(error)})"]
    first, second = (_frames(tensor, images) for tensor in (model, reference))
    chosen = sampled(len(first), MAX_FRAMES)
    values = [
        ssim(
            second[index].double().cpu().numpy(),
            first[index].double().cpu().numpy(),
            win_size=window,
            data_range=peak,
            channel_axis=-1 if images else 0,
        )
        for index in chosen
    ]
    return float(sum(values) / len(values)), _sampled_remark("SSIM", len(chosen), len(first))


def perceptual_distance(model: torch.Tensor, reference: torch.Tensor) -> tuple[float | None, list[str]]:
    """LPIPS (Zhang et al. 2018; package lpips, network alex), mean over frames.

    The package fetches the network's weights on its first use. Whatever fails becomes a remark.

    Args:
        model, reference: images [..., H, W, 3] in 0..1.

    Returns:
        The distance, None where it could not be computed, and remarks.
    """
    first, second = (_frames(tensor, True) for tensor in (model, reference))
    chosen = sampled(len(first), MAX_FRAMES)
    try:
        if importlib.util.find_spec("lpips") is None:
            return None, ["no LPIPS: the package lpips is not installed (pip install lpips)"]
        import lpips

        # The network is first filled with random numbers; other nodes' are to stay the same.
        with torch.random.fork_rng(devices=[]):
            network = lpips.LPIPS(net="alex", verbose=False).eval().requires_grad_(False)
        values = [float(network(*(_for_lpips(side[index]) for side in (first, second)))) for index in chosen]
    except Exception as error:  # no network, no room, another version: a score less
        return None, [f"no LPIPS: the package lpips does not work here ({first_line(error)})"]
    return sum(values) / len(values), _sampled_remark("LPIPS", len(chosen), len(first))


def sampled(count: int, limit: int) -> Sequence[int]:
    """Indices of at most `limit` of `count` frames, evenly spaced, the first and the last among them."""
    if count <= limit:
        return range(count)
    return [round(index * (count - 1) / (limit - 1)) for index in range(limit)]


def _frames(tensor: torch.Tensor, images: bool) -> torch.Tensor:
    """[N, H, W, C] of images, [N, C, H, W] of latents: a view where there is one."""
    if images:
        return tensor.reshape(-1, *tensor.shape[-3:])
    return tensor if tensor.ndim == 4 else tensor.movedim(1, -3).flatten(0, -4)


def _for_lpips(frame: torch.Tensor) -> torch.Tensor:
    """[H, W, 3] in 0..1 as [1, 3, H, W] in -1..1."""
    return frame[..., :3].cpu().float().movedim(-1, 0)[None] * 2 - 1


def _sampled_remark(score: str, chosen: int, count: int) -> list[str]:
    return [f"{score}: of {chosen} of {count} frames, evenly spaced"] if chosen < count else []
