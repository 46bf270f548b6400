"""Which of a model's layers an attention call belongs to, and which layers are to stay dense."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..blocks import is_single
from ..errors import KitchenSolError
from ..model_code import codes_of
from .config import NODE

_ENTRY = re.compile(r"(-?[0-9]{1,9})(?:\s*-\s*(-?[0-9]{1,9}))?")
# What a text editor makes of a hyphen.
_DASHES = re.compile("[\u2010-\u2015\u2212]")


@dataclass(frozen=True)
class LayerSet:
    """Layers by index, and what to say about entries that name no layer of the model."""

    layers: frozenset[int]
    remark: str = ""

    def __contains__(self, layer: int) -> bool:
        return layer in self.layers


def parse_layers(text: str, count: int) -> LayerSet:
    """Reads `dense_layers`, such as `0,1,-1,10-12`.

    Args:
        text: indices and ranges (both ends included) between commas or on lines; negative ones count from
            the end (`-3--1` are the last three).
        count: number of the model's layers.

    Raises:
        KitchenSolError: the text is not such a list. Entries outside of the model are no error, since one
            workflow serves models of several depths; they make the remark.
    """
    layers: set[int] = set()
    outside: list[str] = []
    for entry in _entries(_DASHES.sub("-", text)):
        first, last = _ends(entry)
        start, stop = (end + count if end < 0 else end for end in (first, last))
        layers.update(range(max(start, 0), min(stop, count - 1) + 1))
        if start < 0 or stop >= count or start > stop:
            outside.append(entry)
    return LayerSet(frozenset(layers), _outside_remark(outside, count))


def _entries(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line := line.strip().removesuffix(",").strip():
            yield from (entry.strip() for entry in line.split(","))


def _ends(entry: str) -> tuple[int, int]:
    match = _ENTRY.fullmatch(entry)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    # 5-2 is a slip; whether 5--2 runs backwards depends on the model.
    if first > last and (first < 0) == (last < 0):
        raise KitchenSolError(
            NODE,
            f"dense_layers has the entry {entry!r}, which is neither a layer nor a range.",
            "Write layers and ranges with commas between them, such as 0,1,-1,10-12; -1 is the last layer.",
        )
    return first, last


def _outside_remark(entries: list[str], count: int) -> str:
    if not entries:
        return ""
    has = f"the model has layers 0 to {count - 1}" if count else "the model has no layers that are known"
    return f"dense_layers: {', '.join(map(repr, entries))} not or only partly in the model, {has}."


def gives_block_index(diffusion_model: torch.nn.Module) -> bool:
    """Whether the model writes `block_index` into its options as it runs (in 0.33, H3 and LTX do not)."""
    return _speaks_of("block_index", diffusion_model)


def takes_block_replacements(diffusion_model: torch.nn.Module) -> bool:
    """Whether the model asks for replacements of its blocks, by which they can be told apart."""
    return _speaks_of("patches_replace", diffusion_model)


def _speaks_of(word: str, diffusion_model: torch.nn.Module) -> bool:
    return any(word in code.co_consts for code in codes_of(diffusion_model))


class LayerCounter:
    """Numbers the attention calls of one evaluation of a model; make one for each evaluation.

    Args:
        lists: the main block lists, see blocks.main_lists.
        indexed: the model says itself at which block it is, see gives_block_index.
    """

    def __init__(self, lists: tuple[tuple[str, int], ...], indexed: bool):
        self._indexed = indexed
        self._before_single = sum(length for name, length in lists if not is_single(name))
        if not any(is_single(name) for name, _ in lists):
            self._before_single = 0  # core calls the blocks of some models with one list `single`
        self._seen: dict[tuple[int, int], int] = {}

    def layer_of(self, transformer_options: Mapping[str, Any], heads: int, head_dim: int) -> int | None:
        """The layer that makes a self-attention call, over all main lists; None outside of them.

        To be asked once for each self-attention call within the evaluation. A model that does not say where
        it is gets a count of its calls, apart for each (heads, head_dim): audio-video models have a
        self-attention of either kind in a block. Calls over the text alone (a token refiner) cannot be told
        apart here and must not be asked about.
        """
        count = self._seen.get((heads, head_dim), 0)
        self._seen[heads, head_dim] = count + 1
        index = transformer_options.get("block_index")
        if index is None:
            return None if self._indexed else count
        single = transformer_options.get("block_type") == "single"
        return index + (self._before_single if single else 0)
