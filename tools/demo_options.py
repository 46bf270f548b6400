"""The arguments of the demo, apart from it so that they are read before anything is installed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from devkit.layout import DEV

FAMILIES = ("wan", "h3", "flux")
PARTS = ("int8", "fidelity")

_PICTURE = DEV / "demo" / "shapes.png"
_SEEDS = 1
_MOST_SEEDS = 64


@dataclass(frozen=True)
class DemoOptions:
    """What the demo shows.

    Attributes:
        parts: some of `PARTS`.
        families: of the INT8 part; None: all that the ComfyUI at hand has.
        seeds: how many samplings of the fidelity part make a row of its table.
        picture: the file that its picture goes to.
    """

    parts: tuple[str, ...]
    families: tuple[str, ...] | None
    seeds: int
    picture: Path


def read_options(argv: Sequence[str]) -> DemoOptions:
    """Reads the arguments. Exits on bad ones, and on those of a part that was not chosen."""
    parser = argparse.ArgumentParser(
        prog="dev.py demo",
        description="Quantize tiny models and compare; show what INT8 and Sol cost on a trained model.",
        allow_abbrev=False,
    )
    parser.add_argument("--only", choices=PARTS, help="one of the two parts; default: both")
    parser.add_argument(
        "--models", nargs="+", choices=FAMILIES, help="of the int8 part; default: all that this ComfyUI has"
    )
    parser.add_argument(
        "--seeds", type=_seeds, metavar="N", help=f"samplings a row of the table; default {_SEEDS}"
    )
    parser.add_argument(
        "--picture",
        type=_png,
        metavar="PATH",
        help="where the picture goes, from the repository's root on; default .dev/demo/shapes.png",
    )
    found = parser.parse_args(argv)
    if found.only == "fidelity" and found.models:
        parser.error("--models belongs to the int8 part, which --only fidelity leaves out")
    if found.only == "int8" and (found.seeds or found.picture):
        parser.error("--seeds and --picture belong to the fidelity part, which --only int8 leaves out")
    return DemoOptions(
        (found.only,) if found.only else PARTS,
        tuple(found.models) if found.models else None,
        found.seeds or _SEEDS,
        found.picture or _PICTURE,
    )


def _png(text: str) -> Path:
    if Path(text).suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    return Path(text)


def _seeds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_SEEDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST_SEEDS}")
    return int(text)
