"""Finds the repeated block lists of a DiT."""

from __future__ import annotations

from collections.abc import Iterator

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
