"""The text on a node shows the report's lines and characters in both of the frontend's renderers.

Canvas nodes insert the text as HTML with a line break for each newline; "Nodes 2.0" nodes render it as
Markdown, in which a newline alone is a space, `*` is emphasis and a list takes in the lines behind it.
"""

from __future__ import annotations

import html

import pytest
from comfyui import inprocess


@pytest.fixture(scope="module")
def markup():
    return inprocess.pack_module("nodes.node_text").markup


def test_every_line_but_the_last_ends_in_a_markdown_line_break(markup) -> None:
    assert markup("quantized 20 of 26 layers\nLoRA: none attached") == (
        "quantized 20 of 26 layers  \nLoRA: none attached"
    )
    assert markup("one line") == "one line"


def test_a_list_does_not_take_in_the_line_behind_it(markup) -> None:
    assert markup("kept: 1\n- norm (1): a - b\nLoRA: none") == "kept: 1  \n• norm (1): a - b  \nLoRA: none"


def test_patterns_of_a_user_are_shown_as_they_are(markup) -> None:
    text = "'blocks.*.fc*', 're:(?<!x)`q`&amp;' and weights 2 GiB -> 1 GiB, blocks.[0-49].attn_q"
    shown = markup(text)
    assert html.unescape(shown) == text
    assert not set(shown) & set("*<`")
    assert "2 GiB -> 1 GiB, blocks.[0-49].attn_q" in shown
