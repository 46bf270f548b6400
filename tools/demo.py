"""Shows the pack at work, in two parts.

Run it by ``python tools/dev.py demo``, which prepares the environment. The first part quantizes tiny random
models of several families in a ComfyUI server; the second samples the shipped video model with INT8, with
Sol and with both, and shows in decibels and in a picture what each costs. Exit code 0 only if every number
is within its bounds.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence

from demo_options import read_options
from devkit import cuda
from devkit.console import say, title
from devkit.environment import COMFYUI_ARGS
from devkit.files import require_writable
from devkit.layout import TESTS

# Only tests/, never the pack's root: ComfyUI has a top-level module ``nodes`` as well.
sys.path.insert(0, str(TESTS))

import shapes_model
from comfyui import inprocess


def main(argv: Sequence[str]) -> int:
    options = read_options(argv)
    if "fidelity" in options.parts:
        try:
            shapes_model.require_weights()
            require_writable(options.picture)
        except (ValueError, OSError) as error:
            say(f"error: {error}")
            return 2
    started = time.monotonic()
    arguments = device_args()
    inprocess.start()
    fine = True
    if "int8" in options.parts:
        import demo_int8

        title("INT8, by model family")
        fine &= demo_int8.run(options.families, arguments)
    if "fidelity" in options.parts:
        import demo_fidelity

        title("what INT8 and Sol cost, on a trained model")
        fine &= demo_fidelity.run(options.seeds, options.picture)
    say(f"\n{time.monotonic() - started:.0f} s in all")
    return 0 if fine else 1


def device_args() -> list[str]:
    """ComfyUI's arguments that choose the device: the caller's, else the GPU if there is one.

    They are put into the environment, where this process' own ComfyUI looks for them.
    """
    if COMFYUI_ARGS not in os.environ:
        os.environ[COMFYUI_ARGS] = "" if cuda.is_there() else "--cpu"
    return shlex.split(os.environ[COMFYUI_ARGS], posix=os.name != "nt")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
