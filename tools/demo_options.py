"""The arguments of the demo, apart from it so that they are read before anything is installed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

FAMILIES = ("wan", "h3", "flux")


def chosen_models(argv: Sequence[str]) -> list[str] | None:
    """The families that the arguments name; None: all that the ComfyUI at hand has. Exits on bad ones."""
    parser = argparse.ArgumentParser(
        prog="dev.py demo", description="Quantize tiny models and compare.", allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=FAMILIES, help="default: all that this ComfyUI has")
    return parser.parse_args(argv).models
