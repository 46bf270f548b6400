"""The fidelity part of the demo: samples the shipped video model under every setting, from the same noise."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.utils
import shapes_model
from comfyui import inprocess
from comfyui.quick_int8 import quick_int8
from demo_picture import Strip, draw
from demo_table import BOTH, INT8, MODEL, SOL, Row, Setting, decibels, problems, settings, text
from devkit.console import say

if TYPE_CHECKING:
    import torch
    from shapes_model import Case

_IN_THE_PICTURE = (MODEL, INT8, SOL, BOTH)
_SEEDS_IN_THE_PICTURE = 2


def run(seeds: int, picture: Path) -> bool:
    """Prints the table and writes the picture.

    Args:
        seeds: samplings a row, of seeds 0, 1, ... with a caption each.

    Returns:
        Whether every number is within its bounds.
    """
    # One line a setting says more than a bar a sampling; that all steps are dense is meant where it is so.
    comfy.utils.set_progress_bar_enabled(False)
    logging.getLogger().setLevel(logging.ERROR)
    device = comfy.model_management.get_torch_device()
    provider, dense, absent = _provider(device), *_dense_backends(device)
    wanted = shapes_model.cases(seeds)
    say(f"device: {device}; Sol provider: {provider}; {shapes_model.STEPS} steps")
    say("seeds: " + ", ".join(f"{case.seed} ({case.caption})" for case in wanted))
    with quick_int8() if device.type == "cpu" else nullcontext():
        rows, strips = _measure(provider, dense, wanted)

    say("\n" + text(rows))
    say("\nPSNR in dB (peak 1) and SSIM of the frames, against those of the model without the pack.")
    for name, why in absent:
        say(f"dense_backend {name} is not in the table: {why}")
    draw(strips, [f"{case.caption}, seed {case.seed}" for case in wanted], picture)
    say(f"picture: {picture.resolve()}")
    found = problems(rows)
    for problem in found:
        say(f"FAILED: {problem}")
    return not found


def _measure(provider: str, dense: Sequence[str], wanted: Sequence[Case]) -> tuple[list[Row], list[Strip]]:
    """The rows of the table, and what goes into the picture."""
    source = inprocess.load_unet(shapes_model.model().path)
    exact = shapes_model.sample(source, wanted)
    rows: list[Row] = []
    frames = {MODEL: exact}
    chosen = settings(dense)
    for number, setting in enumerate(chosen, start=1):
        started = time.monotonic()
        model = shapes_model.applied(source, setting.group_size, setting.sol_inputs(provider))
        sampled = shapes_model.sample(model, wanted)
        row = _score(setting, sampled, exact)
        rows.append(row)
        if setting in _IN_THE_PICTURE:
            frames[setting] = sampled
        seconds = time.monotonic() - started
        say(f"  {number} of {len(chosen)}: {setting.name}: {decibels(row.mean)} ({seconds:.0f} s)")
    psnr = {row.setting: row.psnr for row in rows}
    strips = [
        Strip(setting.name, frames[setting][:_SEEDS_IN_THE_PICTURE], psnr.get(setting))
        for setting in _IN_THE_PICTURE
    ]
    return rows, strips


def _score(setting: Setting, sampled: torch.Tensor, exact: torch.Tensor) -> Row:
    final = inprocess.pack_module("kernels_glue.compare.metrics").final
    scores = [final(one, other, images=True, lpips=False) for one, other in zip(sampled, exact, strict=True)]
    return Row(setting, tuple(score.psnr for score in scores), tuple(score.ssim for score in scores))


def _provider(device: torch.device) -> str:
    """`auto` where there is a Sol kernel; the plain reference elsewhere, which runs on any device."""
    providers = inprocess.pack_module("kernels_glue.attention.providers")
    sm = inprocess.pack_module("kernels_glue.attention.devices").sm_of(device)
    here = (not providers.PROVIDERS[name].missing(device) for name in providers.auto_order(sm))
    return "auto" if any(here) else "reference"


def _dense_backends(device: torch.device) -> tuple[list[str], list[tuple[str, str]]]:
    """The dense backends that run on a device, and the others with the reason."""
    options = inprocess.pack_module("kernels_glue.attention.config").DENSE_OPTIONS
    backends = inprocess.pack_module("kernels_glue.attention.dense").BACKENDS
    missing = {name: backends[name].missing(device) if name in backends else "" for name in options}
    return [name for name in options if not missing[name]], [item for item in missing.items() if item[1]]
