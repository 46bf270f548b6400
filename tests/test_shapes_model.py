"""The shipped model draws what it is asked for, and an untrained one does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import shapes_model
import torch
from comfyui.testnodes.shapes import COLOURS, SHAPES, parse_caption
from shapes_detector import shows
from shapes_model import Case

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

from shapes.files import write_model
from shapes.training import Settings, make_model

SEEDS = 64
STEPS = 8
BATCH = 4
# Of the samples in which the detector finds the captioned object.
LEAST_OF_TRAINED, MOST_OF_UNTRAINED = 0.90, 0.30
# ... and in which it finds the same in another colour, or another shape.
MOST_OF_OTHERS = 0.10


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """The suite has one, which is right for tiny models; this one is larger."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _videos(patcher: Any, cases: Sequence[Case], **how: Any) -> np.ndarray:
    """[len(cases), T, H, W, 3]."""
    parts = [
        shapes_model.sample(patcher, cases[first : first + BATCH], **how)
        for first in range(0, len(cases), BATCH)
    ]
    return torch.cat(parts).numpy()


def _share(videos: np.ndarray, captions: Sequence[str]) -> float:
    """Of the videos in which the detector finds what the caption next to it says."""
    found = [shows(video, parse_caption(caption)[0]) for video, caption in zip(videos, captions, strict=True)]
    return sum(found) / len(found)


def _others(caption: str) -> tuple[str, str]:
    """The same shape in another colour, and another shape in the same colour."""
    colour, shape = caption.split()
    colours, shapes = list(COLOURS), list(SHAPES)
    next_colour = colours[(colours.index(colour) + 1) % len(colours)]
    next_shape = shapes[(shapes.index(shape) + 1) % len(shapes)]
    return f"{next_colour} {shape}", f"{colour} {next_shape}"


def test_the_shipped_model_draws_what_the_caption_says(comfy: ModuleType) -> None:
    """Takes ten minutes: 64 videos of 2,048 tokens in 8 Euler steps, each with a caption and without."""
    cases = shapes_model.cases(SEEDS)
    videos = _videos(comfy.load_unet(shapes_model.model().path), cases, steps=STEPS)
    captions = [case.caption for case in cases]
    asked = _share(videos, captions)
    # Without these, a detector that sees everything everywhere would do.
    others = [_share(videos, others) for others in zip(*map(_others, captions), strict=True)]
    print(f"found: {asked:.0%}; in another colour: {others[0]:.0%}; in another shape: {others[1]:.0%}")
    assert asked >= LEAST_OF_TRAINED
    assert max(others) <= MOST_OF_OTHERS


def test_an_untrained_model_does_not(comfy: ModuleType, tmp_path: Path) -> None:
    """One step is enough: its head is zero, so it predicts no velocity and no step changes the noise."""
    path = tmp_path / "untrained.safetensors"
    write_model(path, make_model(Settings()), {})
    patcher = comfy.load_unet(path)
    cases = shapes_model.cases(SEEDS)
    videos = _videos(patcher, cases, steps=1, cfg=1.0)
    assert np.allclose(_videos(patcher, cases[:1], steps=3), videos[:1], atol=1e-5)
    found = _share(videos, [case.caption for case in cases])
    print(f"found: {found:.0%}")
    assert found < MOST_OF_UNTRAINED
