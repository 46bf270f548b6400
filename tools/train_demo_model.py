#!/usr/bin/env python3
"""Trains the small video model that the tests and the demo use, and writes it as ComfyUI loads it.

    python tools/dev.py train --out shapes_wan.safetensors

One command, under 9 minutes on one data-centre GPU; on a CPU it works and takes weeks. The same seed gives
the same losses: docs/training.md says how closely. They stand beside the model, in shapes_wan.loss.csv.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from comfyui import inprocess
from devkit import cuda
from devkit.environment import COMFYUI_ARGS
from devkit.files import require_writable
from train_options import TrainOptions, as_typed, read_options

if TYPE_CHECKING:
    from shapes.training import Settings, Trainer

# Frames, steps and shift of the samples that --check looks at: single pictures, which come first in the
# training, then videos with ComfyUI's default for Wan and finer.
_CHECKED = ((1, 20, 3.0), (8, 8, 8.0), (8, 20, 3.0))


def main(argv: Sequence[str], settings: Settings | None = None) -> int:
    """Trains and writes. `settings`: where the arguments say nothing."""
    options = read_options(argv, __doc__.splitlines()[0])
    inprocess.start()
    import torch
    from shapes.files import write_checkpoint, write_losses, write_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # a CPU is deterministic by itself
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        trainer, until = _prepared(options, settings, device)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    started = time.monotonic()

    def told(step: int, loss: float) -> None:
        print(f"step {step} loss {loss:.5f} {time.monotonic() - started:.1f} s", flush=True)

    while trainer.step < until:
        trainer.run(min(until, trainer.step + options.checkpoint_every), told)
        if options.checkpoint:
            write_checkpoint(options.checkpoint, trainer.state())
        if options.check:
            _check(trainer, options.check)
    losses = torch.stack(trainer.losses).cpu()
    metadata = {
        "command": as_typed(argv),
        "seed": str(trainer.settings.seed),
        "steps": str(trainer.step),
        "loss": f"{losses[-100:].mean():.6f}",
        "license": "Apache-2.0",
    }
    write_model(options.out, trainer.model, metadata)
    write_losses(options.out.with_suffix(".loss.csv"), losses)
    seconds = time.monotonic() - started
    print(f"{trainer.step} steps in {seconds:.1f} s, loss {metadata['loss']}: {options.out}")
    return 0


def _prepared(options: TrainOptions, settings: Settings | None, device: Any) -> tuple[Trainer, int]:
    """The trainer, and the step to stop after. Raises ValueError or OSError for what cannot work."""
    from shapes.files import read_checkpoint
    from shapes.training import Settings, Trainer

    given = {field.name: getattr(options, field.name, None) for field in fields(Settings)}
    settings = replace(
        settings or Settings(), **{name: value for name, value in given.items() if value is not None}
    )
    until = options.stop_at or settings.steps
    if until > settings.steps:
        raise ValueError(f"--stop-at {until} is behind the last step, {settings.steps}")
    for path in filter(None, (options.out, options.checkpoint)):
        require_writable(path)
    trainer = Trainer(settings, device)
    if options.resume:
        trainer.load_state(read_checkpoint(options.resume))
        if trainer.step >= until:
            raise ValueError(
                f"{options.resume} is at step {trainer.step} already, and {until} is to be the last"
            )
        print(f"resumed at step {trainer.step}")
    return trainer, until


def _check(trainer: Trainer, count: int) -> None:
    """Says how many of `count` samples show their caption."""
    from shapes.checking import found

    for frames, steps, shift in _CHECKED:
        shares = found(trainer.velocity, trainer.device, count, steps=steps, shift=shift, frames=frames)
        how = f"{frames} frames, {steps} Euler steps, shift {shift:g}"
        text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        print(f"step {trainer.step}, {how}: {text}", flush=True)


def _environment() -> dict[str, str]:
    """For a training that has the process to itself, before CUDA starts.

    cuBLAS has deterministic sums only with a workspace of its own, and the model stays on the device.
    """
    return {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        COMFYUI_ARGS: "--disable-dynamic-vram" if cuda.is_there() else "--cpu",
    }


if __name__ == "__main__":
    for _name, _value in _environment().items():
        os.environ.setdefault(_name, _value)
    sys.exit(main(sys.argv[1:]))
