"""The one verb of this package: patch the attention of a model that flows through a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import comfy.samplers
import torch

from ..applied import record_sol
from ..blocks import main_lists
from ..errors import KitchenSolError
from ..failures import first_line
from ..figures import no_drawing
from ..report import Line, Report, Show
from . import report
from .config import NODE, SolConfig
from .dense import BACKENDS
from .devices import sm_of
from .drawing import draw_schedule
from .layers import gives_block_index, parse_layers, takes_block_replacements
from .layouts import layout_for
from .override import SolOverride, describe
from .providers import PROVIDERS, auto_order, kv_splits_for
from .providers.base import Provider
from .providers.fastest import FastestProvider
from .routing import Router
from .sampling import OVERRIDE, Model, Session, unwatch, watch
from .schedule import Schedule, make_schedule
from .sinks import sink_rule
from .sol import SolOptions

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# The scheduler for which the picture is drawn; which one samples is not known when the node runs.
_DRAWN_SCHEDULER = "simple"


def patch_attention(
    source: ModelPatcher, config: SolConfig, show: Show
) -> tuple[ModelPatcher, Report, torch.Tensor]:
    """Returns a patcher whose self-attention is sparse where that is right, the report and the drawing.

    The source is not changed. Where the node was applied before, the later settings take the place of the
    earlier ones.

    Args:
        source: a patcher around a diffusion transformer; others pass through with a remark.
        show: puts a report on the node, now and whenever the result is sampled.

    Returns:
        The patcher, the report, and the schedule as IMAGE [1, H, W, 3].

    Raises:
        KitchenSolError: a setting cannot be met; nothing has been changed.
    """
    diffusion_model = getattr(source.model, "diffusion_model", None)
    lists = main_lists(diffusion_model) if isinstance(diffusion_model, torch.nn.Module) else ()
    schedule = _drawn_schedule(source, config)
    image, drawing_lines = _draw(schedule, config)
    patcher = source.clone()
    if not lists:
        return patcher, Report.of(NODE, [report.passed_line()]), image
    device = source.load_device
    providers, absent = _providers(config, device)
    _require_backend(config, device)
    layout = layout_for(diffusion_model)
    rule = sink_rule(config, layout is not None and layout.queries)
    dense_layers = parse_layers(config.dense_layers, sum(count for _, count in lists))
    indexed = gives_block_index(diffusion_model)
    marks = not indexed and takes_block_replacements(diffusion_model)
    model = Model(lists, layout, indexed, marks, dense_layers, rule)

    transformer_options = patcher.model_options.setdefault("transformer_options", {})
    earlier = transformer_options.get(OVERRIDE)
    if isinstance(earlier, SolOverride):
        earlier = earlier.earlier
    session = Session(config, model, show)
    router = Router(providers, config.min_tokens, FastestProvider() if config.provider == "auto" else None)
    override = SolOverride(config, router, earlier, session.tally, session.evaluation)
    transformer_options[OVERRIDE] = override
    watch(patcher, session, override)
    record_sol(patcher, source, config)

    name = describe(earlier) if earlier is not None else ""
    kernels = [provider.name for provider in providers]
    said = Report.of(
        NODE,
        report.settings_lines(config, kernels, name, lists, dense_layers, rule, model.family),
        [report.drawn_line(schedule, _DRAWN_SCHEDULER)],
        report.remark_lines(config, dense_layers, name),
        drawing_lines,
        report.missing_lines(absent),
    )
    return patcher, said, image


def remove_attention(patcher: ModelPatcher) -> None:
    """Takes all that `patch_attention` gave a patcher off again, in place; an earlier override is back."""
    options: dict[str, Any] = patcher.model_options.get("transformer_options", {})
    override = options.get(OVERRIDE)
    if isinstance(override, SolOverride):
        if override.earlier is None:
            del options[OVERRIDE]
        else:
            options[OVERRIDE] = override.earlier
    unwatch(patcher)


def _providers(config: SolConfig, device: torch.device) -> tuple[list[Provider], dict[str, str]]:
    """The kernels to try on a device, in order, and why others are not here.

    Raises:
        KitchenSolError: the kernel that the user chose cannot run here, or lacks an option that was set.
    """
    sm = sm_of(device)
    if config.provider == "auto":
        tried = [PROVIDERS[name] for name in auto_order(sm)]
        absent = {p.name: why for p in tried if (why := p.missing(device) or _unsupported(p, config, sm))}
        return [provider for provider in tried if provider.name not in absent], absent
    provider = PROVIDERS[config.provider]
    if why := provider.missing(device):
        raise KitchenSolError(
            NODE,
            f"provider {provider.name} cannot run on {device}: {why}.",
            "Choose auto or another provider.",
        )
    if why := _unsupported(provider, config, sm):
        raise KitchenSolError(
            NODE,
            f"provider {provider.name} lacks what was asked: {why}.",
            "Set it back, or choose another provider.",
        )
    return [provider], {}


def _unsupported(provider: Provider, config: SolConfig, sm: tuple[int, int] | None) -> str:
    splits = 1 if config.kv_splits == "auto" else kv_splits_for(config.kv_splits, sm, 0)
    # The scale is the model's; any stands for it.
    asked = SolOptions(config.tau, 1.0, config.thresh_type, splits, config.token_aug)
    return provider.unsupported(asked)


def _require_backend(config: SolConfig, device: torch.device) -> None:
    backend = BACKENDS.get(config.dense_backend)
    if backend is not None and (why := backend.missing(device)):
        raise KitchenSolError(
            NODE, f"dense_backend {backend.name} cannot run on {device}: {why}.", "Choose fa or current."
        )


def _drawn_schedule(source: ModelPatcher, config: SolConfig) -> Schedule:
    sampling = source.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, _DRAWN_SCHEDULER, config.steps)
    return make_schedule(config, sigmas.tolist(), sampling.percent_to_sigma)


def _draw(schedule: Schedule, config: SolConfig) -> tuple[torch.Tensor, list[Line]]:
    try:
        title = f"{config.steps} steps, scheduler {_DRAWN_SCHEDULER}, curve {config.curve}"
        return draw_schedule(schedule.steps, title), []
    except Exception as error:  # whatever is wrong with matplotlib: the picture is decoration
        return no_drawing(), [report.not_drawn_line(first_line(error))]
