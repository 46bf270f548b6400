"""Workflow graphs in ComfyUI's API format for tiny models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .builders import TinyModel

Graph = dict[str, dict[str, Any]]


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """One node of a graph. A link to another node is ["its id", output index]."""
    return {"class_type": class_type, "inputs": inputs}


def sampling_graph(
    tiny: TinyModel,
    *,
    model_nodes: Sequence[tuple[str, Mapping[str, Any]]] = (),
    steps: int = 3,
    seed: int = 7,
    cfg: float = 1.0,
    negative: bool = False,
    sampler: str = "euler",
    scheduler: str = "simple",
    save_as: str = "latent",
    weight_dtype: str = "default",
    latent: Mapping[str, int] | None = None,
) -> Graph:
    """UNETLoader -> model_nodes -> KSampler -> TestSaveLatent.

    model_nodes: (class_type, inputs) of nodes with a MODEL input named `model` and MODEL as their
        first output, chained in this order.
    negative, cfg and the rest: as in inprocess.sample, which gives the same samples.
    latent: inputs of the empty-latent node that differ from tiny.latent_inputs.
    save_as: name of the file, see ComfyServer.latent.

    Node ids: "unet", "model_1", "model_2", ..., "positive", "negative", "empty", "sampler", "save".
    """
    tokens, width = tiny.context_shape
    sizes = {"tokens": tokens, "width": width, "pooled_width": tiny.pooled_width}
    graph: Graph = {
        "unet": node("UNETLoader", unet_name=tiny.path.name, weight_dtype=weight_dtype),
        "positive": node("TestConditioning", **sizes, seed=3),
        "text_2": node("TestConditioning", **sizes, seed=4),
        "empty": node(tiny.latent_node, **{**tiny.latent_inputs, **(latent or {})}),
    }
    if "batch_size" not in graph["empty"]["inputs"] and tiny.latent_node != "EmptyMiniMaxH3LatentAV":
        graph["empty"]["inputs"]["batch_size"] = 1
    if negative:
        graph["negative"] = graph.pop("text_2")
    else:
        graph["negative"] = node("ConditioningZeroOut", conditioning=["text_2", 0])
    last = "unet"
    for index, (class_type, inputs) in enumerate(model_nodes, start=1):
        graph[f"model_{index}"] = node(class_type, **{"model": [last, 0], **inputs})
        last = f"model_{index}"
    graph["sampler"] = node(
        "KSampler",
        model=[last, 0],
        seed=seed,
        steps=steps,
        cfg=cfg,
        sampler_name=sampler,
        scheduler=scheduler,
        positive=["positive", 0],
        negative=["negative", 0],
        latent_image=["empty", 0],
        denoise=1.0,
    )
    graph["save"] = node("TestSaveLatent", samples=["sampler", 0], filename=save_as)
    return graph
