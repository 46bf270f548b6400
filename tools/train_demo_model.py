#!/usr/bin/env python3
"""Trains the small video model that the tests and the demo use, and writes it as ComfyUI loads it.

    python tools/dev.py train --out shapes_wan.safetensors

One command, under 9 minutes on one data-centre GPU; on a CPU it works and takes days. The same seed gives the
same loss curve: docs/measured.md says how closely. Beside the model stands <out>.loss.csv.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from comfyui import inprocess

if TYPE_CHECKING:
    from shapes.training import Settings

# For a training that has the process to itself, before CUDA starts: cuBLAS has deterministic sums only with a
# workspace of its own, and the model stays on the device as it is.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "KITCHEN_SOL_COMFYUI_ARGS": "--disable-dynamic-vram"}

# Frames, steps and shift of the samples that --check looks at: single pictures, which come first in the
# training, then videos with ComfyUI's default for Wan and finer.
_CHECKED = ((1, 20, 3.0), (8, 8, 8.0), (8, 20, 3.0))


def main(argv: Sequence[str], settings: Settings | None = None) -> int:
    """Trains and writes. `settings`: where the arguments say nothing."""
    options = _options(argv)
    inprocess.start()
    import torch
    from shapes.checking import found
    from shapes.files import read_checkpoint, write_checkpoint, write_losses, write_model
    from shapes.training import Settings, Trainer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # a CPU is deterministic by itself
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    given = {field.name: getattr(options, field.name, None) for field in fields(Settings)}
    settings = replace(
        settings or Settings(), **{name: value for name, value in given.items() if value is not None}
    )
    trainer = Trainer(settings, device)
    if options.resume:
        trainer.load_state(read_checkpoint(options.resume))
        print(f"resumed at step {trainer.step}")
    started = time.monotonic()

    def told(step: int, loss: float) -> None:
        print(f"step {step} loss {loss:.5f} {time.monotonic() - started:.1f} s", flush=True)

    until = min(options.stop_at or settings.steps, settings.steps)
    while trainer.step < until:
        trainer.run(min(until, trainer.step + options.checkpoint_every), told)
        if options.checkpoint:
            write_checkpoint(options.checkpoint, trainer.state())
        if options.check:
            for frames, steps, shift in _CHECKED:
                shares = found(
                    trainer.velocity, device, options.check, steps=steps, shift=shift, frames=frames
                )
                how = f"{frames} frames, {steps} Euler steps, shift {shift:g}"
                text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
                print(f"step {trainer.step}, {how}: {text}", flush=True)
    losses = torch.stack(trainer.losses).cpu()
    metadata = {
        "command": _command(argv),
        "seed": str(settings.seed),
        "steps": str(trainer.step),
        "loss": f"{losses[-100:].mean():.6f}",
        "license": "Apache-2.0",
    }
    write_model(options.out, trainer.model, metadata)
    write_losses(options.out.with_suffix(".loss.csv"), losses)
    seconds = time.monotonic() - started
    print(f"{trainer.step} steps in {seconds:.1f} s, loss {metadata['loss']}: {options.out}")
    return 0


def _command(argv: Sequence[str]) -> str:
    """What was typed, with files by their names: a path says nothing on another machine."""
    return " ".join(["python tools/dev.py train", *(Path(word).name for word in argv)])


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py train", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the model file to write")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--shift", type=float)
    parser.add_argument("--stop-at", type=int, help="stop at this step of the schedule")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--checkpoint", type=Path, help="where to write checkpoints")
    parser.add_argument("--checkpoint-every", type=int, default=1000, metavar="STEPS")
    parser.add_argument(
        "--check",
        type=int,
        default=0,
        metavar="SAMPLES",
        help="as often, sample and say how many show their caption",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    for _name, _value in _ENVIRONMENT.items():
        os.environ.setdefault(_name, _value)
    sys.exit(main(sys.argv[1:]))
