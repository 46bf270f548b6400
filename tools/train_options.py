"""The arguments of the training, read and checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST = 2**31 - 1


@dataclass(frozen=True)
class TrainOptions:
    """What is trained and where it goes; None: what the settings say.

    Attributes:
        stop_at: the step of the schedule after which it stops.
        resume: a checkpoint to go on from.
        checkpoint, checkpoint_every: where checkpoints go, and after how many steps each.
        check: samples that are looked at as often; 0: none.
    """

    out: Path
    seed: int | None
    steps: int | None
    learning_rate: float | None
    shift: float | None
    stop_at: int | None
    resume: Path | None
    checkpoint: Path | None
    checkpoint_every: int
    check: int


def read_options(argv: Sequence[str], description: str) -> TrainOptions:
    """Reads the arguments. Exits on bad ones."""
    parser = argparse.ArgumentParser(
        prog="dev.py train",
        description=description,
        epilog="Relative paths begin at the repository's root.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, help="the model file to write")
    parser.add_argument("--seed", type=_whole(0))
    parser.add_argument("--steps", type=_whole(1))
    parser.add_argument("--learning-rate", type=_positive)
    parser.add_argument("--shift", type=_positive)
    parser.add_argument("--stop-at", type=_whole(1), metavar="STEP", help="stop after this step")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--checkpoint", type=Path, help="where to write checkpoints")
    parser.add_argument("--checkpoint-every", type=_whole(1), default=1000, metavar="STEPS")
    parser.add_argument(
        "--check",
        type=_whole(0),
        default=0,
        metavar="SAMPLES",
        help="as often, sample and say how many show their caption",
    )
    return TrainOptions(**vars(parser.parse_args(argv)))


def as_typed(argv: Sequence[str]) -> str:
    """The command, with files by their names: a path says nothing on another machine."""
    words = []
    for word in argv:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        words.append(option + equals + Path(value).name)
    return " ".join(["python tools/dev.py train", *words])


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= _MOST:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {_MOST}")
        return int(text)

    return read


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
