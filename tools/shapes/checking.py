"""Whether a model in training draws what it is asked for yet: it samples, and the tests' detector looks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from comfyui.testnodes.shapes import LATENT_CHANNELS, Thing, embed, parse_caption, unfold
from shapes_detector import look, shows
from shapes_model import FRAMES, SIZE, cases

Velocity = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def sample(
    velocity: Velocity,
    text: torch.Tensor,
    *,
    steps: int,
    shift: float,
    size: int = SIZE,
    frames: int = FRAMES,
    seed: int = 0,
) -> torch.Tensor:
    """Videos by Euler steps, [B, frames, size, size, 3], not clamped.

    Args:
        velocity: velocity(latent, noise levels [B], text) of the model.
        text: captions [B, ROWS, TEXT_WIDTH], on the device to use.
        shift: of the noise levels, as ComfyUI's ModelSampling nodes have it.
    """
    shape = (len(text), LATENT_CHANNELS, frames, size // 2, size // 2)
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(shape, generator=generator).to(text.device)
    level = torch.linspace(1, 0, steps + 1)
    sigmas = (shift * level / (1 + (shift - 1) * level)).tolist()
    for sigma, next_sigma in itertools.pairwise(sigmas):
        levels = torch.full((len(text),), sigma, device=text.device)
        latent = latent + (next_sigma - sigma) * velocity(latent, levels, text).float()
    return unfold(latent)


def found(
    velocity: Velocity, device: torch.device, count: int, *, steps: int, shift: float, frames: int = FRAMES
) -> dict[str, float]:
    """The share of samples that show what was asked for: of each shape, and of `all`.

    Args:
        count: samples, of the captions that the tests use.
        frames: of a sample; in a single picture nothing has to move.
    """
    captions = [case.caption for case in cases(count)]
    text = torch.stack([embed(parse_caption(caption)) for caption in captions]).to(device)
    videos = sample(velocity, text, steps=steps, shift=shift, frames=frames).cpu().numpy()
    right, asked = Counter(), Counter()
    for caption, video in zip(captions, videos, strict=True):
        (thing,) = parse_caption(caption)
        for name in (thing.shape, "all"):
            asked[name] += 1
            right[name] += shows(video, thing) if frames > 1 else _pictured(video[0], thing)
    return {name: right[name] / asked[name] for name in sorted(asked)}


def _pictured(picture: np.ndarray, thing: Thing) -> bool:
    seen = look(np.clip(picture, 0, 1), thing.colour)
    return seen is not None and seen.shape == thing.shape
