"""The language and the latents of the shipped video model: captions as embeddings, and the fold of pixels.

Shared by the nodes that the server loads, the tests, the training and the demo.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SHAPES = ("circle", "square", "triangle")
COLOURS = {
    "red": (0.90, 0.12, 0.14),
    "green": (0.10, 0.72, 0.22),
    "blue": (0.16, 0.28, 0.95),
    "yellow": (0.96, 0.86, 0.10),
}
ROWS = 2  # of a caption: one for each object that a video can have

TEXT_WIDTH = 4096  # of Wan's text encoder, fixed where ComfyUI detects the model
LATENT_CHANNELS = 16
FOLDED_CHANNELS = 12  # 2 x 2 pixels of red, green and blue; the other four are zero
# Pixels in 0..1 become latents with a standard deviation near 1, as flow matching wants them.
_CENTRE, _SCALE = 0.5, 4.0


@dataclass(frozen=True)
class Thing:
    """One captioned object, such as a red circle."""

    shape: str
    colour: str

    def __post_init__(self) -> None:
        """Raises ValueError for a word that the model was not taught."""
        if self.shape not in SHAPES or self.colour not in COLOURS:
            raise ValueError(
                f"the model knows {', '.join(COLOURS)} and {', '.join(SHAPES)},"
                f" not {self.colour} {self.shape}"
            )

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


def parse_caption(text: str) -> tuple[Thing, ...]:
    """Reads `red circle` or `red circle, blue square`; empty text is no caption at all.

    Raises:
        ValueError: a word is unknown, or there are more than two objects.
    """
    phrases = [phrase.split() for phrase in text.split(",") if phrase.strip()]
    if len(phrases) > ROWS or any(len(words) != 2 for words in phrases):
        raise ValueError(f"a caption is one or two of `colour shape` with a comma between, not {text!r}")
    return tuple(Thing(shape, colour) for colour, shape in phrases)


def embed(things: Sequence[Thing]) -> torch.Tensor:
    """The text states of a caption, [ROWS, TEXT_WIDTH] fp32: a row an object, `nothing` for the rest."""
    named = [(thing.shape, thing.colour) for thing in things]
    named += [("nothing", "nothing")] * (ROWS - len(named))
    return torch.stack([(_word(shape) + _word(colour)) / 2 for shape, colour in named])


def caption_conditioning(text: str) -> list[list[torch.Tensor | dict[str, Any]]]:
    """CONDITIONING of a caption. Raises ValueError as parse_caption does."""
    return [[embed(parse_caption(text))[None], {}]]


def _word(word: str) -> torch.Tensor:
    """A fixed vector of length 1 for a word, at about a right angle to that of every other word.

    Longer ones would make the first text layer, with its 4096 inputs, jump at every step of a training.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(word.encode()))
    signs = torch.randint(0, 2, (TEXT_WIDTH,), generator=generator).float() * 2 - 1
    return signs / TEXT_WIDTH**0.5


def fold(frames: torch.Tensor) -> torch.Tensor:
    """Video [B, T, H, W, 3] in 0..1 to the model's latent [B, 16, T, H/2, W/2]."""
    b, t, h, w, _ = frames.shape
    blocks = frames.reshape(b, t, h // 2, 2, w // 2, 2, 3).permute(0, 3, 5, 6, 1, 2, 4)
    latent = (blocks.reshape(b, FOLDED_CHANNELS, t, h // 2, w // 2) - _CENTRE) * _SCALE
    return torch.nn.functional.pad(latent, (0, 0, 0, 0, 0, 0, 0, LATENT_CHANNELS - FOLDED_CHANNELS))


def unfold(latent: torch.Tensor) -> torch.Tensor:
    """The model's latent [B, 16, T, h, w] to video [B, T, 2h, 2w, 3], not clamped."""
    b, _, t, h, w = latent.shape
    blocks = latent[:, :FOLDED_CHANNELS].reshape(b, 2, 2, 3, t, h, w).permute(0, 4, 5, 1, 6, 2, 3)
    return blocks.reshape(b, t, 2 * h, 2 * w, 3) / _SCALE + _CENTRE


def frames_of(samples: torch.Tensor) -> torch.Tensor:
    """The samples of a LATENT [B, 16, T, h, w] as video [B, T, 2h, 2w, 3] in 0..1.

    Core hands out the latents of a Wan in the units of Wan's VAE; the model itself works in others, which
    are those of `fold`.

    Raises:
        ValueError: the shape is another one.
    """
    import comfy.latent_formats

    shape = tuple(samples.shape)
    if len(shape) != 5 or shape[1] != LATENT_CHANNELS:
        raise ValueError(
            f"a latent of the model of shapes is [batch, {LATENT_CHANNELS}, frames, height, width],"
            f" not {list(shape)}; make it with EmptyHunyuanLatentVideo"
        )
    return unfold(comfy.latent_formats.Wan21().process_in(samples.float())).clamp(0, 1)


def latent_of(frames: torch.Tensor) -> torch.Tensor:
    """The samples of a LATENT whose `frames_of` are this video [B, T, H, W, 3] in 0..1."""
    import comfy.latent_formats

    return comfy.latent_formats.Wan21().process_out(fold(frames))
