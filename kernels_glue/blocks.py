"""Finds the repeated block lists of a DiT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# Attribute names under which ComfyUI's DiTs keep their repeated blocks (comfy/ldm/*).
KNOWN_LISTS = frozenset(
    {
        "blocks",  # Wan, MiniMax-H3, Cosmos Predict2, Krea2, Mochi
        "vace_blocks",  # Wan VACE
        "double_blocks",  # Flux, Chroma, HunyuanVideo
        "single_blocks",
        "transformer_blocks",  # LTX, Qwen-Image
        "transformer_1d_blocks",  # LTX audio-video connectors
        "layers",  # Lumina, Z-Image
        "noise_refiner",
        "context_refiner",
        "ref_image_refiner",  # OmniGen2
        "joint_blocks",  # SD3
        "double_layers",  # AuraFlow
        "single_layers",
        "double_stream_blocks",  # HiDream
        "single_stream_blocks",
        "double_stream_layers",  # Boogu
        "single_stream_layers",
        "visual_transformer_blocks",  # Kandinsky5
        "text_transformer_blocks",
    }
)

# Block lists besides the main ones: refiners, text blocks, and side branches that core counts with the
# block at which they join.
_SIDE_LISTS = frozenset(
    {
        "vace_blocks",
        "noise_refiner",
        "context_refiner",
        "ref_image_refiner",
        "text_transformer_blocks",
        "transformer_1d_blocks",
    }
)

Blocks = torch.nn.ModuleList | torch.nn.ModuleDict  # Cosmos 1 has its blocks in a dict
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def find_block_lists(diffusion_model: torch.nn.Module) -> tuple[str, ...]:
    """Returns the dotted names of the repeated block lists, in module order.

    A list is looked for only outside of other lists and sequences: what is inside a block belongs to
    the block. That also keeps UNets (SDXL) out, whose transformer blocks sit inside the lists
    `input_blocks` and `output_blocks` and the sequence `middle_block`. Where no
    known name is found, lists of two or more same-class blocks count if together they hold more
    than half of the model's parameters; otherwise the result is empty.
    """
    lists = list(_outermost_lists(diffusion_model))
    known = tuple(name for name, _ in lists if name.rpartition(".")[2] in KNOWN_LISTS)
    if known:
        return known
    candidates = [(name, module) for name, module in lists if len(module) > 1]
    held = sum(_parameter_count(module) for _, module in candidates)
    if 2 * held > _parameter_count(diffusion_model):
        return tuple(name for name, _ in candidates)
    return ()


def main_lists(diffusion_model: torch.nn.Module) -> tuple[tuple[str, int], ...]:
    """Names and lengths of the main block lists, in the order in which they run.

    Lists of submodules (H3's and HunyuanVideo's token refiners) count only where the model has no others, and
    then only those of the largest submodule (the language model in HiDream-O1, not its eyes).
    """
    model = uncompiled(diffusion_model)
    names = [name for name in find_block_lists(model) if name.rpartition(".")[2] not in _SIDE_LISTS]
    owners = {name.rpartition(".")[0] for name in names}
    owner = "" if "" in owners else max(owners, key=lambda name: _size(model, name), default="")
    names = [name for name in names if name.rpartition(".")[0] == owner]
    names.sort(key=is_single)  # stable: other lists keep the order in which the model defines them
    return tuple((name, len(model.get_submodule(name))) for name in names)


def is_single(name: str) -> bool:
    """Whether a list holds single-stream blocks, which core numbers apart from the double-stream ones."""
    return "single" in name


def _size(model: torch.nn.Module, name: str) -> int:
    return sum(parameter.numel() for parameter in model.get_submodule(name).parameters())


def uncompiled(module: Any) -> Any:
    """The module itself, where torch.compile wraps it."""
    return getattr(module, "_orig_mod", module)


def _outermost_lists(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, Blocks]]:
    for name, child in module.named_children():
        full = prefix + name
        if isinstance(child, _LISTS):
            if _holds_blocks(child):
                yield full, child
        elif not isinstance(child, torch.nn.Sequential):
            yield from _outermost_lists(child, full + ".")


def _holds_blocks(modules: Blocks) -> bool:
    """Same-class children that normalise something, and are not mere containers of modules.

    Every transformer block has a norm; a stack of plain MLPs (Chroma's distilled guidance) has none.
    """
    children = list(modules.children())
    classes = {type(child) for child in children}
    if len(classes) != 1 or issubclass(classes.pop(), _CONTAINERS):
        return False
    return any("norm" in type(part).__name__.lower() for part in children[0].modules())


def _parameter_count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
