"""Gives the blocks of a model an index where the model itself gives none (MiniMax-H3, LTX)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .layers import is_single

Replacement = Callable[[dict[str, Any], dict[str, Any]], Any]


def marked(transformer_options: Mapping[str, Any], lists: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    """The options with a block replacement for every block that runs what would run, and says which it is.

    Core's block replacements (`patches_replace["dit"]`) are called by number, so the index is right also
    where another node skips a block, replaces it or runs it twice. Replacements that are there already stay
    in charge.

    Args:
        lists: the main block lists, see blocks.main_lists.
    """
    patches_replace = dict(transformer_options.get("patches_replace") or {})
    replacements = dict(patches_replace.get("dit") or {})
    for name, count in lists:
        block_type = "single" if is_single(name) else "double"
        for index in range(count):
            key = (f"{block_type}_block", index)
            replacements[key] = _saying(block_type, index, replacements.get(key))
    patches_replace["dit"] = replacements
    return {**transformer_options, "patches_replace": patches_replace}


def _saying(block_type: str, index: int, replacement: Replacement | None) -> Replacement:
    def run(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        told = {"block_type": block_type, "block_index": index}
        args = {**args, "transformer_options": {**args["transformer_options"], **told}}
        return extra["original_block"](args) if replacement is None else replacement(args, extra)

    return run
