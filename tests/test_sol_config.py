"""The settings of Sol Attention Patch: every spelling that is accepted, and errors that list the choices."""

from __future__ import annotations

from typing import Any

import pytest
from comfyui import inprocess

config = inprocess.pack_module("kernels_glue.attention.config")
sinks = inprocess.pack_module("kernels_glue.attention.sinks")
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("dense_backend", "sage", "sage_attn"),
        ("dense_backend", "sageattention", "sage_attn"),
        ("dense_backend", "Sage-Attn", "sage_attn"),
        ("dense_backend", "SAGE_ATTENTION", "sage_attn"),
        ("dense_backend", "flash", "fa"),
        ("dense_backend", "flash-attn", "fa"),
        ("dense_backend", "Flash_Attn", "fa"),
        ("dense_backend", "FA2", "fa"),
        ("dense_backend", "fa3", "fa"),
        ("dense_backend", "fa4", "fa"),
        ("dense_backend", "Kitchen-INT8", "kitchen_int8"),
        ("dense_backend", "Current", "current"),
        ("provider", " Auto ", "auto"),
        ("provider", "NVLabs", "nvlabs"),
        ("provider", "Built-in", "builtin"),
        ("sinks", "Keys-and-Queries", "keys_and_queries"),
        ("sinks", "keys and queries", "keys_and_queries"),
        ("kv_splits", 4, "4"),
        ("curve", "COSINE", "cosine"),
        ("thresh_type", "Exact", "exact"),
    ],
)
def test_spellings(name: str, value: Any, meant: str) -> None:
    assert getattr(config.SolConfig.of({name: value}), name) == meant


@pytest.mark.parametrize("name", config.CHOICES)
def test_anything_else_lists_the_choices(name: str) -> None:
    with pytest.raises(KitchenSolError) as caught:
        config.SolConfig.of({name: "fa5x"})
    message = str(caught.value)
    assert message.startswith("Sol Attention Patch: ") and f"{name} is 'fa5x'" in message
    assert ", ".join(config.CHOICES[name]) in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tau", float("nan")),
        ("tau", float("inf")),
        ("tau", "much"),
        ("tau", None),
        ("dense_percent", 1.01),
        ("dense_percent", -0.1),
        ("dense_steps", -2),
        ("dense_steps", 1.5),
        ("min_tokens", -1),
        ("sink_tokens", -64),
        ("token_aug", 65),
        ("token_aug", 320),
        ("steps", 0),
    ],
)
def test_numbers_out_of_bounds_are_named(name: str, value: Any) -> None:
    with pytest.raises(KitchenSolError, match=f"{name} is {value!r}"):
        config.SolConfig.of({name: value})


def test_the_defaults_are_the_first_options() -> None:
    default = config.SolConfig()
    assert config.SolConfig.of({}) == default
    for name, options in config.CHOICES.items():
        assert getattr(default, name) == options[0]


# --- sinks --------------------------------------------------------------------------------------


def rows(layout_queries: bool = False, tokens: int = 1000, **settings: Any) -> tuple[Any, Any]:
    rule = sinks.sink_rule(config.SolConfig.of(settings), layout_queries)
    found = rule.rows(tokens, lambda: (0, 300))
    return found.keys, found.queries


def test_auto_keeps_queries_exact_only_where_the_layout_says_so() -> None:
    assert rows(layout_queries=True) == ((0, 300), (0, 300))
    assert rows(layout_queries=False) == ((0, 300), (0, 0))


def test_explicit_sinks_win_over_the_layout() -> None:
    assert rows(layout_queries=True, sinks="keys") == ((0, 300), (0, 0))
    assert rows(sinks="keys_and_queries") == ((0, 300), (0, 300))
    assert rows(layout_queries=True, sinks="off") == ((0, 0), (0, 0))


def test_a_range_by_hand_takes_the_place_of_the_layout() -> None:
    assert rows(sink_start=10, sink_tokens=50) == ((10, 60), (0, 0))
    assert rows(sink_start=10, sink_tokens=50, sinks="keys_and_queries") == ((10, 60), (10, 60))
    assert rows(sink_start=10, sinks="keys") == ((0, 300), (0, 0))
    assert rows(sink_start=10, sink_tokens=50, sinks="off") == ((0, 0), (0, 0))


def test_a_range_behind_the_sequence_is_refused_with_both_numbers() -> None:
    assert rows(sink_start=940, sink_tokens=60)[0] == (940, 1000)
    with pytest.raises(KitchenSolError, match=r"sink_start 940 and sink_tokens 61 .* 1000 tokens"):
        rows(sink_start=940, sink_tokens=61)
