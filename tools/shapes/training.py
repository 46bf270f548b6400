"""Trains the small video DiT: flow matching on procedural videos, with the Wan model class of ComfyUI.

Deterministic by seed: step k draws from generators that are seeded by (seed, k) alone, so a training that
is resumed goes on as if it had not stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from comfyui.testnodes.shapes import fold

from .graphs import Recorded
from .muon import StackedMuon
from .videos import contexts, draw_scenes, render

# What ComfyUI's detection makes of the file (comfy/model_detection.py); the four sizes are free.
WAN = dict(model_type="t2v", in_dim=16, out_dim=16, patch_size=(1, 2, 2), text_dim=4096, freq_dim=256)


@dataclass(frozen=True)
class Bucket:
    """A size of video and how many of them make a batch.

    Attributes:
        frames: of a video.
        size: height and width in pixels; a token is 4 x 4 pixels of one frame.
        batch: videos a step.
        share: part of the phase's steps that use this size.
    """

    frames: int
    size: int
    batch: int
    share: float

    @property
    def tokens(self) -> int:
        return self.frames * (self.size // 4) ** 2


@dataclass(frozen=True)
class Phase:
    """A part of the training.

    Attributes:
        until: where it ends, as a part of all steps.
        buckets: the sizes that its steps choose from.
    """

    until: float
    buckets: tuple[Bucket, ...]


# About 49,000 tokens a step each. First what shapes look like, on many pictures; then how they move.
PHASES = (
    Phase(0.35, (Bucket(1, 64, 192, 0.85), Bucket(1, 128, 48, 0.15))),
    Phase(
        1.0,
        (Bucket(8, 64, 24, 0.75), Bucket(8, 96, 11, 0.10), Bucket(8, 128, 6, 0.10), Bucket(16, 128, 3, 0.05)),
    ),
)
# Steps whose videos are made at once: making them takes many small operations.
_CHUNK = 16


@dataclass(frozen=True)
class Settings:
    """All that decides the result besides the machine.

    Attributes:
        seed: of the weights at the start, the videos and the noise.
        steps: optimizer steps.
        learning_rate: its peak; it rises over `warmup` steps, stays, and falls to 0 over the second half.
        shift: noise levels are drawn uniformly and shifted towards 1 by this (as ComfyUI's sampling does).
        dim, ffn_dim, layers: of the model.
        phases: the sizes of videos over the training.
    """

    seed: int = 0
    steps: int = 16_000
    learning_rate: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.01
    shift: float = 3.0
    dim: int = 256
    ffn_dim: int = 1024
    layers: int = 4
    phases: tuple[Phase, ...] = PHASES

    def buckets_at(self, step: int) -> tuple[Bucket, ...]:
        """The sizes that step 0, 1, ... chooses from."""
        return next(phase.buckets for phase in self.phases if step < phase.until * self.steps)

    def rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ..."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        return self.learning_rate * min(1.0, 2 * (1 - step / self.steps))


def make_model(settings: Settings) -> torch.nn.Module:
    """The Wan model with fresh fp32 weights, on the CPU."""
    from comfy.ldm.wan.model import WanModel

    model = WanModel(
        **WAN,
        dim=settings.dim,
        ffn_dim=settings.ffn_dim,
        num_heads=settings.dim // 128,
        num_layers=settings.layers,
        operations=torch.nn,
        dtype=torch.float32,
    )
    _initialize(model, torch.Generator().manual_seed(settings.seed))
    return model


@torch.no_grad()
def _initialize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Xavier matrices, a small time embedding, a head of zeros, as Wan's authors begin."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        elif name.endswith("modulation"):
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        elif name.startswith("head."):
            parameter.zero_()
        elif name == "text_embedding.0.weight":
            parameter.normal_(0, 1, generator=generator)  # its inputs are vectors of length 1
        elif name.startswith("time_embedding"):
            parameter.normal_(0, 0.02, generator=generator)
        else:
            matrix = parameter.flatten(1)
            bound = math.sqrt(6 / (matrix.shape[0] + matrix.shape[1]))
            parameter.uniform_(-bound, bound, generator=generator)


class Trainer:
    """A model, its optimizer, and the steps taken so far."""

    def __init__(self, settings: Settings, device: torch.device):
        self.settings = settings
        self.device = device
        self.model = make_model(settings).to(device).train()
        # The optimizers work on fp32 copies; the model computes in the dtype that it will be used in.
        self._working = list(self.model.parameters())
        self._masters = [parameter.detach().clone().requires_grad_() for parameter in self._working]
        for parameter in self._masters:
            parameter.grad = torch.zeros_like(parameter)
        # A CPU has no fast bf16.
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        _cast(self.model, self._dtype)
        names = [name for name, _ in self.model.named_parameters()]
        # A tensor, so that a recorded step reads the rate of the day.
        self._rate = torch.zeros((), device=device)
        self.optimizers = _optimizers(dict(zip(names, self._masters, strict=True)), settings, self._rate)
        self._update = Recorded(self._step) if device.type == "cuda" else self._step
        self._chunk: tuple[int, list[tuple[torch.Tensor, ...]]] | None = None
        self.step = 0
        self.losses: list[torch.Tensor] = []

    def run(self, until: int, told: Callable[[int, float], None] | None = None, every: int = 50) -> None:
        """Trains up to step `until` of the settings' schedule; `told` hears the mean of the last losses."""
        while self.step < until:
            self.losses.append(self._one())
            self.step += 1
            if told is not None and (self.step % every == 0 or self.step == until):
                told(self.step, float(torch.stack(self.losses[-every:]).mean()))

    def _one(self) -> torch.Tensor:
        clean, text, sigma = self._examples()
        generator = torch.Generator(self.device).manual_seed(_seed_of(self.settings.seed, self.step))
        noise = torch.randn(clean.shape, generator=generator, device=self.device)
        noisy = clean + (noise - clean) * sigma[:, None, None, None, None]
        self._rate.fill_(self.settings.rate_at(self.step))
        return self._update(noisy, noise - clean, sigma * 1000, text)

    def _step(
        self, noisy: torch.Tensor, wanted: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        """One update of the weights towards predicting the velocity `wanted`; the loss before it."""
        self.model.zero_grad(set_to_none=True)
        # The device is the default one: core's model makes a small tensor on the default device, and copying
        # it from the CPU cannot be recorded.
        with self.device, _core_in_training():
            velocity = self.model(noisy.to(self._dtype), timestep, text.to(self._dtype))
        loss = torch.nn.functional.mse_loss(velocity.float(), wanted)
        loss.backward()
        torch._foreach_copy_([p.grad for p in self._masters], [p.grad for p in self._working])
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._working, self._masters)
        return loss.detach()

    def _examples(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Latents [B, 16, T, h, w], captions [B, ROWS, TEXT_WIDTH] and noise levels [B] of this step."""
        chunk, place = divmod(self.step, _CHUNK)
        if self._chunk is None or self._chunk[0] != chunk:
            self._chunk = chunk, self._make_chunk(chunk)
        return tuple(part[place] for part in self._chunk[1])

    def _make_chunk(self, chunk: int) -> list[tuple[torch.Tensor, ...]]:
        generator = torch.Generator().manual_seed(_seed_of(self.settings.seed, -1 - chunk))
        bucket = _choose(self.settings.buckets_at(chunk * _CHUNK), float(torch.rand((), generator=generator)))
        scenes = draw_scenes(bucket.batch * _CHUNK, generator)
        shift = self.settings.shift
        level = torch.rand(bucket.batch * _CHUNK, generator=generator)
        latents = fold(render(scenes, bucket.frames, bucket.size, self.device))
        sigma = (shift * level / (1 + (shift - 1) * level)).to(self.device)
        return [part.split(bucket.batch) for part in (latents, contexts(scenes, self.device), sigma)]

    @torch.no_grad()
    def velocity(self, latent: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """The model's velocity of latents [B, 16, T, h, w] at noise levels [B]."""
        with self.device, _core_in_training():
            return self.model(latent.to(self._dtype), sigma * 1000, text.to(self._dtype))

    def state(self) -> dict[str, Any]:
        """All that a training needs to go on."""
        return {
            "settings": asdict(self.settings),
            "step": self.step,
            "losses": torch.stack(self.losses).cpu() if self.losses else torch.zeros(0),
            "weights": [parameter.detach() for parameter in self._masters],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state`. Raises ValueError if it belongs to a training with other settings."""
        wanted = asdict(self.settings)
        different = [name for name in wanted if state["settings"].get(name) != wanted[name]]
        if different:
            raise ValueError(f"the checkpoint was made with other settings: {', '.join(different)}")
        with torch.no_grad():
            for parameters in (self._masters, self._working):
                for parameter, saved in zip(parameters, state["weights"], strict=True):
                    parameter.copy_(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
            for group in optimizer.param_groups:
                group["lr"] = self._rate  # in place of the saved one
        self.step = state["step"]
        self.losses = list(state["losses"].to(self.device))


@contextmanager
def _core_in_training() -> Iterator[None]:
    """Core's model code uses operations that have a gradient."""
    import comfy.model_management

    before, comfy.model_management.in_training = comfy.model_management.in_training, True
    try:
        yield
    finally:
        comfy.model_management.in_training = before


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """All but the patch embedding, which core keeps in fp32."""
    for name, child in model.named_children():
        if name != "patch_embedding":
            child.to(dtype)


def _optimizers(
    parameters: dict[str, torch.Tensor], settings: Settings, rate: torch.Tensor
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of the blocks, AdamW for everything else."""
    inner = [p for name, p in parameters.items() if name.startswith("blocks.") and p.ndim == 2]
    chosen = set(map(id, inner))
    others = [p for p in parameters.values() if id(p) not in chosen]
    return (
        StackedMuon(inner, rate, weight_decay=settings.weight_decay),
        torch.optim.AdamW(
            others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True, capturable=rate.is_cuda
        ),
    )


def _seed_of(seed: int, number: int) -> int:
    """A seed of its own for each step (from 0) and each chunk (below 0)."""
    return (seed + 1) * 1_000_003 + number


def _choose(buckets: tuple[Bucket, ...], drawn: float) -> Bucket:
    for bucket in buckets:
        drawn -= bucket.share
        if drawn < 0:
            return bucket
    return buckets[-1]
