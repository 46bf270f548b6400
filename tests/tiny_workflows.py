"""A workflow in its API form on a tiny model, without the files and the time that a real one takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from comfyui import builders, graphs
from sol_node import NODE_ID as SOL

# What provider reference lacks and refuses, at its default.
WITHOUT_KERNEL_OPTIONS = {"kv_splits": "auto", "token_aug": 0}


def tiny_model_for(graph: graphs.Graph, tiny: Callable[..., builders.TinyModel]) -> builders.TinyModel:
    """The tiny model for whose family the graph makes a latent."""
    latents = {
        "EmptyHunyuanLatentVideo": "wan",
        "EmptyMiniMaxH3LatentAV": "h3",
        "EmptySD3LatentImage": "flux",
    }
    [family] = {latents[n["class_type"]] for n in graph.values() if n["class_type"] in latents}
    return tiny(family)


def with_tiny_model(graph: graphs.Graph, model: builders.TinyModel, **latent: int) -> graphs.Graph:
    """The graph on a tiny model, with a small latent and few steps.

    latent: inputs of the empty-latent node that differ from model.latent_inputs.

    No tiny text encoders and VAEs exist, so test nodes give the conditioning and take the latent, under the
    names workflow, workflow_1, ...; nodes behind the VAE are left out.
    """
    tokens, width = model.context_shape
    texts = nodes_of(graph, "CLIPTextEncode")
    decoders = nodes_of(graph, "VAEDecode")
    result: graphs.Graph = {}
    for key, node in copy.deepcopy(graph).items():
        inputs = node["inputs"]
        match node["class_type"]:
            case "UNETLoader":
                inputs["unet_name"] = model.path.name
            case "CLIPTextEncode":
                sizes = {"tokens": tokens, "width": width, "pooled_width": model.pooled_width}
                node = graphs.node("TestConditioning", **sizes, seed=3 + texts.index(key))
            case "VAEDecode":
                name = "_".join(["workflow", *map(str, filter(None, [decoders.index(key)]))])
                node = graphs.node("TestSaveLatent", samples=inputs["samples"], filename=name)
            case "KSampler" | "BasicScheduler":
                inputs["steps"] = 4
            case "CLIPLoader" | "VAELoader" | "VAEDecodeAudio":
                continue  # the latent of VAEDecode has the sound in it
            case model.latent_node:
                inputs.update({**model.latent_inputs, **latent})
        result[key] = node
    later = nodes_of(graph, "VAEDecode")
    while later:
        later = [key for key, node in result.items() if any(source in later for source in sources(node))]
        for key in later:
            del result[key]
    for node in result.values():  # an optional VAE
        gone = [
            name
            for name, value in node["inputs"].items()
            if isinstance(value, list) and value[0] not in result
        ]
        for name in gone:
            del node["inputs"][name]
    return result


def for_the_reference(graph: graphs.Graph) -> graphs.Graph:
    """The graph without the settings that provider reference refuses because it lacks them."""
    result = copy.deepcopy(graph)
    for key in nodes_of(result, SOL):
        if result[key]["inputs"]["provider"] == "reference":
            result[key]["inputs"].update(WITHOUT_KERNEL_OPTIONS)
    return result


def without(graph: graphs.Graph, class_type: str) -> graphs.Graph:
    """The graph with the nodes of a class bypassed, and without the nodes that show what they say."""
    bypassed = {key: n["inputs"]["model"] for key, n in graph.items() if n["class_type"] == class_type}
    result: graphs.Graph = {}
    for key, node in copy.deepcopy(graph).items():
        shows = node["class_type"] in ("PreviewAny", "PreviewImage")
        if key in bypassed or (shows and bypassed.keys() & sources(node)):
            continue
        for name, value in node["inputs"].items():
            if isinstance(value, list) and value[0] in bypassed:
                node["inputs"][name] = bypassed[value[0]]
        result[key] = node
    return result


def nodes_of(graph: graphs.Graph, class_type: str) -> list[str]:
    return [key for key, node in graph.items() if node["class_type"] == class_type]


def behind(graph: graphs.Graph, key: str, output: int) -> list[str]:
    """The nodes that get an output of a node."""
    return [other for other, node in graph.items() if [key, output] in node["inputs"].values()]


def sources(node: dict[str, Any]) -> list[str]:
    """Ids of the nodes that a node gets its inputs from."""
    return [value[0] for value in node["inputs"].values() if isinstance(value, list)]
