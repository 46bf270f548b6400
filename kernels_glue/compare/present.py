"""A comparison as its user gets it: a report, a picture and two files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import KitchenSolError
from ..failures import first_line
from ..figures import no_drawing
from ..report import Line, Report, Show, detail, note, warning
from .apply import Inputs, compare
from .config import NODE, CompareConfig
from .files import check_prefix, write_files
from .plot import draw
from .report import report_of
from .results import Comparison

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy.sd import VAE


def compare_models(
    model: ModelPatcher,
    reference: ModelPatcher | None,
    inputs: Inputs,
    config: CompareConfig,
    prefix: str,
    show: Show,
    vae: VAE | None = None,
) -> tuple[dict[str, Any], dict[str, Any], Report, torch.Tensor]:
    """Compares two models and tells what came out; see `compare` and `present`.

    Args:
        show: puts a report on the node: what is being done, and at the end what was found.

    Returns:
        The LATENT of the model and that of the reference, the report, and the plot as IMAGE [1, H, W, 3].

    Raises:
        KitchenSolError: an input makes no sense; what can be seen beforehand is, before anything is sampled.
    """
    check_prefix(prefix)

    def progress(text: str) -> None:
        show(Report.of(NODE, [detail(text)]))

    latent, latent_of_reference, comparison = compare(model, reference, inputs, config, progress, vae)
    report, image = present(comparison, prefix)
    report.log()
    show(report)
    return latent, latent_of_reference, report, image


def present(comparison: Comparison, prefix: str) -> tuple[Report, torch.Tensor]:
    """Draws and writes what was found.

    What cannot be drawn or written costs no result: the report says so.

    Args:
        prefix: `filename_prefix` of the files, "" for none.

    Returns:
        The report, and the plot as IMAGE [1, H, W, 3].

    Raises:
        KitchenSolError: the prefix leads out of the output folder.
    """
    image, remarks = _drawn(comparison)
    report = report_of(comparison, *remarks)
    try:
        paths = write_files(prefix, comparison.steps, report.to_json())
    except KitchenSolError:
        raise
    except Exception as error:  # of the disk, or core refuses the prefix: two samplings are done
        return _with(report, warning(f"the files were not written ({first_line(error)})", files=[])), image
    if paths:
        report = _with(report, detail(f"written: {', '.join(paths)}", files=paths))
    return report, image


def _drawn(comparison: Comparison) -> tuple[torch.Tensor, list[Line]]:
    try:
        return draw(comparison), []
    except Exception as error:  # whatever is wrong with matplotlib: the picture is decoration
        said = first_line(error)
        return no_drawing(), [note(f"the plot was not drawn, matplotlib does not work here ({said})")]


def _with(report: Report, line: Line) -> Report:
    return Report.of(report.node, report.lines, [line])
