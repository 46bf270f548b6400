"""Writes what a comparison found into ComfyUI's output folder: a row a step as CSV, all of it as JSON."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import KitchenSolError
from .config import NODE
from .results import StepScore

_SCORES = ("psnr", "cosine", "relative_l2")
COLUMNS = (
    "step",
    "sigma",
    *(f"{what}_{score}" for what in ("denoised", "latent") for score in _SCORES),
)


def check_prefix(prefix: str) -> None:
    """Refuses a `filename_prefix` that leads out of ComfyUI's output folder or names no file; "" is fine.

    Raises:
        KitchenSolError: with the prefix in it.
    """
    import folder_paths

    if not prefix.strip():
        return
    root = os.path.realpath(folder_paths.get_output_directory())
    try:
        target = os.path.realpath(os.path.join(root, os.path.normpath(prefix)))
        inside = target != root and os.path.commonpath((root, target)) == root
    except ValueError:  # a null byte; on Windows another drive
        inside = False
    if not inside:
        raise KitchenSolError(
            NODE,
            f"filename_prefix is {prefix!r}, which is no name inside of ComfyUI's output folder.",
            "Give a name, with folders of the output folder before it or none.",
        )


def write_files(prefix: str, steps: Sequence[StepScore], everything: str) -> tuple[str, ...]:
    """Writes <prefix>_00001_.csv and .json, counted on as Save Image counts.

    A file is there as a whole or not at all.

    Args:
        prefix: as Save Image takes it, with its %year% and others; "" writes nothing.
        steps: the rows of the CSV.
        everything: the text of the JSON.

    Returns:
        Their names below the output folder, with forward slashes.

    Raises:
        KitchenSolError: see `check_prefix`.
        OSError: they could not be written.
    """
    import folder_paths

    check_prefix(prefix)
    if not prefix.strip():
        return ()
    output = folder_paths.get_output_directory()
    folder, name, counter, _, _ = folder_paths.get_save_image_path(prefix, output)
    # Either of them may lead through a link that the other one does not take.
    below = Path(os.path.realpath(folder)).relative_to(os.path.realpath(output))
    paths = []
    for suffix, content in ((".csv", table(steps)), (".json", everything)):
        path = Path(folder) / f"{name}_{counter:05}_{suffix}"
        _write_whole(path, content)
        paths.append((below / path.name).as_posix())
    return tuple(paths)


def table(steps: Sequence[StepScore]) -> str:
    """The steps, counted from 1, as CSV with COLUMNS as its first row.

    Infinity is written as `inf`, what is not defined as `nan`.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for step in steps:
        scores = [getattr(side, name) for side in (step.denoised, step.latent) for name in _SCORES]
        writer.writerow([step.step + 1, step.sigma, *scores])
    return text.getvalue()


def _write_whole(path: Path, content: str) -> None:
    # In the same folder, because a file can only be moved as a whole within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(content, encoding="utf-8", newline="")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
