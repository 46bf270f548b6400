"""The one verb of this package: compare two models that flow through a graph, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..applied import Settings, settings_of
from ..errors import KitchenSolError
from ..failures import first_line, is_out_of_memory
from ..units import counted
from .config import NODE, CompareConfig
from .layers import int8_names
from .metrics import streams
from .outcome import Reference, broken, results_of
from .pair import Pair, Progress, finished, telling
from .results import Comparison
from .sampling import Inputs, sample, start_of
from .search import Search
from .settings import without_our_patches

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

__all__ = ["Inputs", "Progress", "compare"]


def compare(
    model: ModelPatcher,
    reference: ModelPatcher | None,
    inputs: Inputs,
    config: CompareConfig,
    progress: Progress = lambda text: None,
    vae: Any = None,
) -> tuple[dict[str, Any], dict[str, Any], Comparison]:
    """Samples two models from the same noise, and compares what they do. Neither is changed.

    Args:
        reference: None is the model without the pack's nodes.
        progress: told what is going on.
        vae: core's VAE, by which the results are compared as images; without it, as latents.

    Returns:
        The LATENT of the model, that of the reference, and what was found.

    Raises:
        KitchenSolError: the models cannot be compared, or a node of the pack refuses one.
    """
    if not inputs.steps:
        raise KitchenSolError(
            NODE,
            f"sigmas has {counted(inputs.sigmas.shape[-1], 'value')}, which is no step.",
            "Connect a scheduler with one step or more.",
        )
    remarks = list(_no_difference(model, reference))
    reference = without_our_patches(model) if reference is None else reference
    _require_alike(model, reference, inputs)
    names = int8_names(model.model.diffusion_model) if config.layers else ()
    pair = Pair(inputs, progress, names, config.layers)
    first, second = pair.sample_reference(reference), pair.sample_model(model)
    result, other = results_of(first.latent, second.latent, vae)
    layers = pair.layers() if config.layers else ()
    unusable = broken(first.latent, result.result, "reference")
    if config.layers and not layers and not names:
        remarks.append(
            "no layer was looked at: the model has no INT8 layer, and no attention went through Sol or a"
            " quantized backend of its node"
        )
    found = Comparison(
        tuple(pair.scores),
        result.score(other, config.lpips != "off"),
        second.usage,
        first.usage,
        layers,
        remarks=(*remarks, *result.remarks, *pair.remarks()),
        warnings=(*unusable, *broken(second.latent, other, "model")),
    )
    if config.recommends and unusable:
        found = _without_recommendation(found, "there is nothing to measure other settings against")
    elif config.recommends:
        try:
            search = _search(model, inputs, config, progress, result, found)
            found = replace(found, recommendation=search.run(found.layers, pair.sparse))
        # Two samplings are done; they are not to be lost.
        except KitchenSolError as error:
            found = _without_recommendation(found, str(error))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found = _without_recommendation(found, first_line(error))
    return second.latent, first.latent, found


def _without_recommendation(found: Comparison, why: str) -> Comparison:
    return replace(found, remarks=(*found.remarks, f"no recommendation: {why}"))


def _search(
    model: ModelPatcher,
    inputs: Inputs,
    config: CompareConfig,
    progress: Progress,
    result: Reference,
    found: Comparison,
) -> Search:
    def measure(patcher: ModelPatcher, name: str) -> float:
        sampled = sample(patcher, inputs, telling(progress, name, inputs.steps))
        finished(progress, name, inputs.steps, sampled.steps)
        return result.psnr(sampled.latent)

    # Not from the model at `reference`: with another LoRA in it, what is measured would not hold for `model`.
    base = without_our_patches(model)
    remarks = [] if config.layers else ["no layers are proposed, because `layers` is off"]
    return Search(base, settings_of(model), config.keep_psnr, measure, found.final.psnr, remarks)


def _no_difference(model: ModelPatcher, reference: ModelPatcher | None) -> Iterator[str]:
    if reference is None and settings_of(model) == Settings():
        yield "the model carries no node of this pack, so it is compared with itself"
    elif reference is model:
        yield "`reference` is the same model, so it is compared with itself"


def _require_alike(model: ModelPatcher, reference: ModelPatcher, inputs: Inputs) -> None:
    one, other = (type(patcher.model).__name__ for patcher in (model, reference))
    if one != other:
        raise KitchenSolError(
            NODE,
            f"the model is a {one} and the reference a {other}, which draw different latents.",
            "Connect two models of one family.",
        )
    shapes, expected = (_shapes(start_of(patcher, inputs)) for patcher in (model, reference))
    if shapes != expected:
        raise KitchenSolError(
            NODE,
            f"the model ({one}) starts from a latent of {shapes}, the reference ({other}) from {expected}.",
            "Connect two models of one family.",
        )


def _shapes(samples: Any) -> list[tuple[int, ...]]:
    return [tuple(part.shape) for part in streams(samples)]
