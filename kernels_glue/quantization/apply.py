"""The one verb of this package: quantize a model that flows through a graph."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.utils
import torch
from comfy.quant_ops import QuantizedTensor

from ..applied import record_int8
from ..attach import refuse_bound_patches, root_patcher
from ..errors import KitchenSolError
from ..names import compress
from ..pristine import PristineWeights, taken
from ..probe import int8_backend, require_int8
from ..report import Line, Report, Show
from . import report
from .config import NODE, QuantizeConfig
from .convert import Int8Weight, Job, quantize_jobs
from .merge import NOTHING, Merge, without
from .patch_count import count_patches
from .patcher import attach, detach
from .plan import Plan, make_plan, nothing_to_quantize
from .rebuild import QUANTIZED_PARTS, build_model, int8_entries
from .reuse import Conversion, Conversions
from .sampling import SamplingText, unwatch, watch
from .saving import make_savable, unmake_savable
from .survey import survey

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

_conversions = Conversions()

# What a layer of MiniMax-H3's size needs on the GPU beside the staging buffers, with a LoRA to merge.
_GPU_HEADROOM = 2 * 2**30


def quantize_model(
    source: ModelPatcher, config: QuantizeConfig, show: Show, node: Hashable = None, keep: bool = True
) -> tuple[ModelPatcher, Report]:
    """Returns a patcher whose linear layers are INT8 ConvRot, and the report.

    The source is not changed. The result is what core builds from a file with the same INT8 layers.

    Args:
        source: a patcher around a diffusion transformer.
        show: puts a report on the node, now and whenever the result is sampled.
        node: identity of the calling node, which keeps one conversion of each model.
        keep: whether a new conversion is kept for it; else it goes with the patcher.

    Raises:
        KitchenSolError: the model or a setting does not allow it; nothing has been changed.
        comfy.model_management.InterruptProcessingException: the user cancelled between two layers.
    """
    refuse_bound_patches(source, NODE, "unquantized layers")
    plan = make_plan(survey(source.model.diffusion_model), config)
    if plan.to_quantize:
        conversion, reused = _converted(source, config, plan, node, keep)
        patcher = attach(source, conversion.root)
        patcher.patches = without(patcher.patches, conversion.merged)
        merged = len(conversion.merged)
        lines = _lines(source, conversion, reused)
    elif plan.int8_layers:
        patcher, merged = source.clone(), 0
        lines = [report.result_line(plan), *report.remark_lines(_without_effect(plan, config))]
    else:
        raise KitchenSolError(NODE, nothing_to_quantize(plan), "Change layers, group_size or ignored_layers.")
    record_int8(patcher, source, config, conversion.merged if plan.to_quantize else ())
    make_savable(patcher)
    watch(patcher, SamplingText(tuple(lines), frozenset(plan.int8_layers), merged, show))
    lora = report.lora_lines(count_patches(patcher.patches, plan.int8_layers), merged)
    return patcher, report.assemble(lines, lora)


def remove_int8(patcher: ModelPatcher) -> None:
    """Takes all that `quantize_model` gave a patcher off again, in place; its model stays the one it is."""
    unwatch(patcher)
    detach(patcher)
    unmake_savable(patcher)


def _converted(
    source: ModelPatcher, config: QuantizeConfig, plan: Plan, node: Hashable, keep: bool
) -> tuple[Conversion, bool]:
    settings = _settings(source, config)
    found = _conversions.find(source.model, settings)
    conversion = found or _convert(source, config, plan)
    if keep:
        _conversions.keep(source.model, node, settings, conversion)
    return conversion, found is not None


def _settings(source: ModelPatcher, config: QuantizeConfig) -> Hashable:
    merged = source.patches_uuid if config.lora == "bake" and source.patches else None
    placement = (source.is_dynamic(), source.load_device, source.offload_device)
    return (config, _compute_dtype(source), merged, placement)


def _compute_dtype(source: ModelPatcher) -> torch.dtype:
    # Through the patcher: the node ModelComputeDtype sets it as an object patch.
    return source.get_model_object("manual_cast_dtype") or source.model.get_dtype()


def _convert(source: ModelPatcher, config: QuantizeConfig, plan: Plan) -> Conversion:
    started = time.perf_counter()
    dtype = _compute_dtype(source)
    device = _device(source, config)
    if device.type == "cuda":
        comfy.model_management.free_memory(_GPU_HEADROOM, device)
    require_int8(NODE, source.load_device, dtype, plan.to_quantize.values())
    weights = PristineWeights.of(source)
    merge = Merge.of(source.patches, weights, plan.to_quantize) if config.lora == "bake" else NOTHING
    progress = comfy.utils.ProgressBar(len(plan.to_quantize))
    jobs = (
        Job(name, group_size, partial(_load, weights, merge, name, device), dtype)
        for name, group_size in plan.to_quantize.items()
    )
    int8 = quantize_jobs(jobs, device, partial(_between_layers, progress))
    share = source.is_dynamic()
    state_dict: dict[str, torch.Tensor] = {}
    for name, weight in int8.items():
        state_dict.update(int8_entries(name, weight))
    replaced = [f"{name}.{part}" for name in int8 for part in QUANTIZED_PARTS]
    for key, tensor in weights.items(skip=replaced):
        state_dict[key] = taken(merge.rounded(key, tensor), share)
    model = build_model(source.model, dtype, source.offload_device, state_dict, share)
    return Conversion(
        root_patcher(source, model),
        plan,
        merge.keys,
        time.perf_counter() - started,
        comfy.model_management.module_size(source.model.diffusion_model),
        comfy.model_management.module_size(model.diffusion_model),
        str(device),
        tuple(_remarks(int8)),
    )


def _remarks(int8: Mapping[str, Int8Weight]) -> Iterator[str]:
    broken = [name for name, weight in int8.items() if not weight.scale.isfinite().all()]
    if broken:
        names = ", ".join(compress(broken))
        yield f"the file has NaN or infinite weights in {names}; the unquantized model is as broken."


def _device(source: ModelPatcher, config: QuantizeConfig) -> torch.device:
    return torch.device("cpu") if config.device == "cpu" else source.load_device


def _load(weights: PristineWeights, merge: Merge, name: str, device: torch.device) -> torch.Tensor:
    """Returns the full-precision weight of a layer, on the device if it had to be computed."""
    key = f"{name}.weight"
    weight = weights[key]
    if isinstance(weight, QuantizedTensor):
        weight = weight.to(device).dequantize()
    if key in merge.patches:
        weight = merge.exact(key, weight.to(device))
    return weight.detach()


def _between_layers(progress: comfy.utils.ProgressBar) -> None:
    comfy.model_management.throw_exception_if_processing_interrupted()
    progress.update(1)


def _lines(source: ModelPatcher, done: Conversion, reused: bool) -> list[Line]:
    plan = done.plan
    return [
        report.result_line(plan),
        *report.weight_lines(plan, done.bytes_before, done.bytes_after, done.seconds, done.device, reused),
        report.kernels_line(int8_backend(source.load_device)),
        *report.kept_lines(plan.kept),
        *report.remark_lines(plan.remarks),
        *report.remark_lines(done.remarks),
        report.int8_line(plan),
    ]


def _without_effect(plan: Plan, config: QuantizeConfig) -> Iterator[str]:
    yield from plan.remarks
    default = QuantizeConfig()
    for name in ("layers", "lora", "device"):
        value = getattr(config, name)
        if value != getattr(default, name):
            yield f"{name} {value} had no effect: there is no layer left to quantize."
