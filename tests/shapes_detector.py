"""Finds a captioned shape in the frames of a video, by colour, outline and movement. Nothing is learned.

An outline is told by how its distance from the centre goes around: three bumps for a triangle, four for a
square, none for a circle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from comfyui.testnodes.shapes import COLOURS, Thing
from skimage import measure

# Pixels as close to the captioned colour as this belong to the object (L2 distance of RGB in 0..1).
# Colours are 0.74 apart or more, and greys are 0.46 from each.
_NEAR = 0.30
# The smallest shape of the videos covers 3.1% of the picture.
_LEAST_AREA = 0.015
_BUMPS = {"triangle": 3, "square": 4}
# Relative height of the bumps. A triangle has 0.29 and a square 0.15; the pixels of a circle make 0.03.
_LEAST_BUMP = {"triangle": 0.16, "square": 0.075}
_ANGLES = 96
# Between the two places farthest apart, in half pictures: the slowest object of the videos covers 0.35 in
# eight frames and, where it bounces off an edge, gets no farther than 0.13. Two pixels of 64 are 0.06.
_LEAST_WAY = 0.10
_FRAMES_NEEDED = 0.75


@dataclass(frozen=True)
class Sighting:
    """What one frame shows of one colour.

    Attributes:
        shape: circle, square or triangle.
        centre: (y, x) in half pictures from the upper left corner.
    """

    shape: str
    centre: tuple[float, float]


def look(frame: np.ndarray, colour: str) -> Sighting | None:
    """The largest object of a colour in a frame [H, W, 3] in 0..1, or None."""
    distance = np.linalg.norm(frame - np.array(COLOURS[colour]), axis=-1)
    labels = measure.label(distance < _NEAR)
    regions = measure.regionprops(labels)
    if not regions:
        return None
    region = max(regions, key=lambda found: found.area)
    if region.area < _LEAST_AREA * distance.size:
        return None
    outlines = measure.find_contours(np.pad(labels == region.label, 1).astype(float), 0.5)
    outline = max(outlines, key=len) - 1
    centre = np.array(region.centroid)
    half = frame.shape[0] / 2
    return Sighting(_shape_of(outline - centre), (centre[0] / half, centre[1] / half))


def _shape_of(outline: np.ndarray) -> str:
    angles = np.arctan2(outline[:, 0], outline[:, 1])
    order = np.argsort(angles)
    radii = np.hypot(outline[:, 0], outline[:, 1])[order]
    even = np.linspace(-np.pi, np.pi, _ANGLES, endpoint=False)
    around = np.interp(even, angles[order], radii, period=2 * np.pi)
    heights = np.abs(np.fft.rfft(around)) * 2 / _ANGLES / around.mean()
    bumps = {shape: heights[count] / _LEAST_BUMP[shape] for shape, count in _BUMPS.items()}
    best = max(bumps, key=bumps.__getitem__)
    return best if bumps[best] >= 1 else "circle"


def shows(video: np.ndarray, thing: Thing) -> bool:
    """Whether a video [T, H, W, 3] in 0..1 has the object in three quarters of its frames, and it moves."""
    seen = [look(np.clip(frame, 0, 1), thing.colour) for frame in video]
    right = [sighting for sighting in seen if sighting is not None and sighting.shape == thing.shape]
    if len(right) < _FRAMES_NEEDED * len(video):
        return False
    centres = np.array([sighting.centre for sighting in right])
    ways = np.linalg.norm(centres[:, None] - centres[None], axis=-1)
    return bool(ways.max() >= _LEAST_WAY)
