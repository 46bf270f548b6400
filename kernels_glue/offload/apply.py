"""The one verb of this package: keep the weights of a model that flows through a graph within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..applied import record_offload
from ..errors import KitchenSolError
from ..mixins import lay_over, take_off
from ..report import Report, Show
from . import report
from .config import NODE, OffloadConfig
from .core_policy import apply_core
from .handle import KEY, Offload, install
from .lane import CudaLane
from .lists import find_blocks
from .patcher import Streams, sizes_of
from .plan import make_plan
from .session import Session, watch
from .strategy import choose
from .streaming import Lane
from .twins import without_dynamic_vram

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

LaneFor = Callable[[torch.device], Lane]


def offload_model(
    source: ModelPatcher, config: OffloadConfig, show: Show, lane_for: LaneFor | None = None
) -> tuple[ModelPatcher, Report]:
    """Returns a patcher whose blocks are resident or streamed within the budget, and the report.

    Where the node was applied before, the later settings take the place of the earlier ones.

    Args:
        source: a patcher around a diffusion transformer.
        show: puts a report on the node, now and whenever the result is sampled.
        lane_for: makes the way to a device that is no CUDA device; without it such devices pass through.

    Raises:
        KitchenSolError: the model has no blocks, or a setting cannot be met; nothing has been changed.
    """
    diffusion_model = getattr(source.model, "diffusion_model", None)
    found = find_blocks(diffusion_model) if isinstance(diffusion_model, torch.nn.Module) else None
    if found is None or not found.blocks:
        raise KitchenSolError(
            NODE,
            f"{type(diffusion_model).__name__} has no repeated transformer blocks; this node streams those of"
            " diffusion transformers (MiniMax-H3, Wan, Flux, Qwen-Image, ...), not UNets such as SDXL.",
            "Connect the model without this node.",
        )
    if lane_for is None and source.load_device.type != "cuda":
        return source.clone(), Report.of(NODE, [report.passed_line(str(source.load_device))])
    sizes = sizes_of(source.model)
    strategy = choose(config, sizes, source.is_dynamic())
    lines = [
        report.found_line(found.lists, sizes),
        report.wanted_line(config),
        report.strategy_line(strategy),
    ]
    if strategy.name == "core":
        patcher = apply_core(source, config, strategy, show)
        record_offload(patcher, source, config, lane_for)
        return patcher, Report.of(NODE, lines)
    offload = Offload(config, lane_for or CudaLane)
    if config.budget is not None:
        lines.append(report.plan_line(make_plan(sizes, config.budget, offload.wishes), config.budget))
    patcher = without_dynamic_vram(source)
    patcher.set_attachments(KEY, offload)
    lay_over(patcher, Streams, KEY)
    watch(patcher, Session(config, strategy, show))
    record_offload(patcher, source, config, lane_for)
    return patcher, Report.of(NODE, lines)


def remove_offload(patcher: ModelPatcher) -> None:
    """Takes all that `offload_model` gave a patcher off again, in place; its model stays the one it is."""
    install(patcher, {})
    patcher.remove_attachments(KEY)
    take_off(patcher, Streams, KEY)
