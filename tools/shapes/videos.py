"""Videos made procedurally: one or two shapes that move, turn and bounce over a grey gradient.

Positions are in units where the picture is [-1, 1] in both directions; a frame is one unit of time.
Everything random comes from one CPU generator, so a video is the same on every device.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from comfyui.testnodes.shapes import COLOURS, ROWS, SHAPES, Thing, embed

# So large that a corner is more than the 4 x 4 pixels of a token.
RADIUS = (0.42, 0.56)  # of an object alone
RADIUS_OF_TWO = (0.28, 0.36)
SPEED = (0.05, 0.16)
# They begin nearly upright and turn by up to 40 degrees in eight frames. Over all angles a triangle is a disc
# on average, and discs are what a small model draws then.
ANGLE = 0.35
TURN = (0.03, 0.10)
# The circumscribed circle of each shape in radii, so that their areas are more alike.
_REACH = (0.80, 1.00, 1.10)
_SIDES = (0, 4, 3)
_SUBSTEPS = 4
_UNCAPTIONED = 0.1  # part of the videos whose caption is left out, for classifier-free guidance
_TWO = 0.25  # part of the videos with two objects
_CANDIDATES = 16


@dataclass(frozen=True)
class Scenes:
    """What happens in B videos, with N = 2 objects each of which the second may be absent.

    Attributes:
        shape, colour: [B, N] indices into SHAPES and COLOURS.
        present: [B, N], 0 or 1.
        captioned: [B], whether the caption is given.
        radius, turn, angle: [B, N].
        position, velocity: [B, N, 2].
        background: [B, 2, 3], the colours at both ends of the gradient; `direction` [B, 2].
    """

    shape: torch.Tensor
    colour: torch.Tensor
    present: torch.Tensor
    captioned: torch.Tensor
    radius: torch.Tensor
    turn: torch.Tensor
    angle: torch.Tensor
    position: torch.Tensor
    velocity: torch.Tensor
    background: torch.Tensor
    direction: torch.Tensor

    @property
    def reach(self) -> torch.Tensor:
        """[B, N]: radius of each object's circumscribed circle."""
        return self.radius * torch.tensor(_REACH)[self.shape]

    def caption(self, index: int) -> tuple[Thing, ...]:
        """The objects of one video in the order of its caption, whether that is given or not."""
        names = tuple(COLOURS)
        return tuple(
            Thing(SHAPES[int(self.shape[index, n])], names[int(self.colour[index, n])])
            for n in range(ROWS)
            if self.present[index, n]
        )


def draw_scenes(count: int, generator: torch.Generator) -> Scenes:
    """`count` random scenes; the two objects of one differ in colour and do not overlap at the start."""

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    def sign(*shape: int) -> torch.Tensor:
        return torch.randint(0, 2, (count, *shape), generator=generator) * 2.0 - 1.0

    shape = torch.randint(0, len(SHAPES), (count, ROWS), generator=generator)
    first = torch.randint(0, len(COLOURS), (count, 1), generator=generator)
    further = torch.randint(1, len(COLOURS), (count, 1), generator=generator)
    present = torch.ones(count, ROWS)
    present[:, 1] = torch.rand(count, generator=generator) < _TWO
    alone = present[:, 1:] == 0
    radius = torch.where(alone, uniform(*RADIUS, ROWS), uniform(*RADIUS_OF_TWO, ROWS))
    heading = uniform(0, 2 * math.pi, ROWS)
    speed = uniform(*SPEED, ROWS)
    grey, tint = uniform(0.15, 0.85, 2, 1), uniform(-0.07, 0.07, 2, 3)
    slope = uniform(0, 2 * math.pi)
    reach = radius * torch.tensor(_REACH)[shape]
    return Scenes(
        shape=shape,
        colour=torch.cat([first, (first + further) % len(COLOURS)], dim=1),
        present=present,
        captioned=torch.rand(count, generator=generator) >= _UNCAPTIONED,
        radius=radius,
        turn=uniform(*TURN, ROWS) * sign(ROWS),
        angle=uniform(-ANGLE, ANGLE, ROWS),
        position=_apart(uniform(-1, 1, _CANDIDATES, ROWS, 2), reach),
        velocity=torch.stack([heading.cos(), heading.sin()], dim=-1) * speed[..., None],
        background=(grey + tint).clamp(0, 1),
        direction=torch.stack([slope.cos(), slope.sin()], dim=-1),
    )


def _apart(candidates: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """[B, N, 2] of candidates [B, C, N, 2]: in the picture, and the pair with the most room between."""
    inside = candidates * (1 - reach)[:, None, :, None]
    distance = (inside[:, :, 0] - inside[:, :, 1]).norm(dim=-1)
    best = distance.argmax(dim=1)
    return inside[torch.arange(len(best)), best]


def move(scenes: Scenes, frames: int) -> torch.Tensor:
    """Positions [B, T, N, 2]: straight on, reflected by the edges, elastic between equal masses."""
    position, velocity = scenes.position.clone(), scenes.velocity.clone()
    reach, both = scenes.reach, scenes.present[:, 1] > 0
    limit = (1 - reach)[..., None]
    path = []
    for _ in range(frames):
        path.append(position.clone())
        for _ in range(_SUBSTEPS):
            position = position + velocity / _SUBSTEPS
            outside = (position.abs() > limit) & (position * velocity > 0)
            velocity = torch.where(outside, -velocity, velocity)
            gap = position[:, 0] - position[:, 1]
            normal = gap / gap.norm(dim=-1, keepdim=True).clamp(min=1e-6)
            closing = ((velocity[:, 0] - velocity[:, 1]) * normal).sum(-1)
            hit = both & (gap.norm(dim=-1) < reach.sum(-1)) & (closing < 0)
            exchange = torch.where(hit, closing, torch.zeros_like(closing))[:, None] * normal
            velocity = velocity + torch.stack([-exchange, exchange], dim=1)
    return torch.stack(path, dim=1)


def render(scenes: Scenes, frames: int, size: int, device: torch.device) -> torch.Tensor:
    """The videos, [B, T, size, size, 3] in 0..1, with edges smoothed over one pixel."""
    path = move(scenes, frames).to(device)
    axis = (torch.arange(size, device=device) + 0.5) * (2 / size) - 1
    y, x = axis[:, None], axis[None, :]
    direction, ends = scenes.direction.to(device), scenes.background.to(device)
    along = direction[:, 0, None, None] * x + direction[:, 1, None, None] * y
    share = (along / math.sqrt(2) / 2 + 0.5)[:, None, :, :, None]
    video = ends[:, 0, None, None, None] * (1 - share) + ends[:, 1, None, None, None] * share
    video = video.expand(-1, frames, -1, -1, -1)
    time = torch.arange(frames, device=device)
    palette = torch.tensor(list(COLOURS.values()), device=device)
    for n in range(ROWS):
        centre = path[:, :, n]
        angle = scenes.angle[:, n, None].to(device) + scenes.turn[:, n, None].to(device) * time
        dx, dy = x - centre[..., 0, None, None], y - centre[..., 1, None, None]
        distance = _distance(dx, dy, angle, scenes.shape[:, n].to(device), scenes.reach[:, n].to(device))
        cover = (0.5 - distance * (size / 2)).clamp(0, 1) * scenes.present[:, n, None, None, None].to(device)
        colour = palette[scenes.colour[:, n].to(device)][:, None, None, None]
        video = video + (colour - video) * cover[..., None]
    return video


def _distance(
    dx: torch.Tensor, dy: torch.Tensor, angle: torch.Tensor, shape: torch.Tensor, reach: torch.Tensor
) -> torch.Tensor:
    """How far each pixel [B, T, H, W] is outside of a shape, negative inside."""
    radius, phi = (dx * dx + dy * dy).sqrt(), torch.atan2(dy, dx) - angle[..., None, None]
    reach = reach[:, None, None, None]
    result = radius - reach
    for index, sides in enumerate(_SIDES):
        if sides:
            half = math.pi / sides
            folded = torch.remainder(phi + half, 2 * half) - half
            polygon = radius * folded.cos() - reach * math.cos(half)
            result = torch.where((shape == index)[:, None, None, None], polygon, result)
    return result


def contexts(scenes: Scenes, device: torch.device) -> torch.Tensor:
    """The text states of all captions, [B, ROWS, TEXT_WIDTH]."""
    table, nothing = _phrases(device)
    told = (scenes.present > 0) & scenes.captioned[:, None]
    rows = scenes.shape * len(COLOURS) + scenes.colour
    return torch.where(told[..., None].to(device), table[rows.to(device)], nothing)


@functools.cache
def _phrases(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all objects, shape by shape, and the row of none."""
    things = [Thing(shape, colour) for shape in SHAPES for colour in COLOURS]
    table = torch.stack([embed((thing,))[0] for thing in things])
    return table.to(device), embed(())[0].to(device)
