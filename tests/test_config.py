"""The settings of the INT8 node: every bad value is refused with a way out, and the language of
`ignored_layers` selects exactly the layers that it says."""

from __future__ import annotations

import dataclasses

import pytest
from comfyui import inprocess

config = inprocess.pack_module("kernels_glue.quantization.config")
patterns = inprocess.pack_module("kernels_glue.quantization.patterns")
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError

NODE = "Kitchen INT8 Quantize Model"
NAMES = [
    "blocks.0.attn.qkv_proj",
    "blocks.1.attn.qkv_proj",
    "blocks.1.mlp.fc2",
    "blocks.10.attn.qkv_proj",
    "blocks.10.mlp.fc2",
    "token_refiner.blocks.1.mlp.fc2",
    "final_layer.video_out",
]


def ignored(text: str) -> list[str]:
    """The names of NAMES that the entry selects."""
    parsed = config.QuantizeConfig(ignored_layers=text).ignored
    return [name for name in NAMES if patterns.first_match(parsed, name)]


def test_an_exact_name_selects_that_layer_only() -> None:
    assert ignored("blocks.1.mlp.fc2") == ["blocks.1.mlp.fc2"]
    assert ignored("final_layer.video_out") == ["final_layer.video_out"]
    assert ignored("video_out") == []


@pytest.mark.parametrize("text", ["blocks.1", "blocks.1."])
def test_a_prefix_ends_at_a_dot(text: str) -> None:
    assert ignored(text) == ["blocks.1.attn.qkv_proj", "blocks.1.mlp.fc2"]


def test_a_prefix_starts_at_the_top_of_the_model() -> None:
    assert ignored("blocks") == NAMES[:5]
    assert ignored("token_refiner") == ["token_refiner.blocks.1.mlp.fc2"]
    assert ignored("block") == []


def test_a_glob_spans_the_whole_name() -> None:
    assert ignored("blocks.*.mlp.fc2") == ["blocks.1.mlp.fc2", "blocks.10.mlp.fc2"]
    assert ignored("*.mlp.fc2") == ["blocks.1.mlp.fc2", "blocks.10.mlp.fc2", "token_refiner.blocks.1.mlp.fc2"]
    assert ignored("blocks.?.attn.qkv_proj") == ["blocks.0.attn.qkv_proj", "blocks.1.attn.qkv_proj"]
    assert ignored("blocks.[1-9].*") == ["blocks.1.attn.qkv_proj", "blocks.1.mlp.fc2"]
    assert ignored("blocks.*.mlp") == []
    assert ignored("BLOCKS.*") == []


def test_a_regular_expression_is_searched_in_the_name() -> None:
    assert ignored(r"re:^blocks\.(0|10)\.attn") == ["blocks.0.attn.qkv_proj", "blocks.10.attn.qkv_proj"]
    assert ignored("re: fc2$") == ["blocks.1.mlp.fc2", "blocks.10.mlp.fc2", "token_refiner.blocks.1.mlp.fc2"]
    # Commas and # belong to an expression.
    assert ignored(r"re:blocks\.1{1,1}\.mlp") == ["blocks.1.mlp.fc2", "token_refiner.blocks.1.mlp.fc2"]
    assert ignored("re:fc2#") == []


def test_comments_commas_and_blank_lines() -> None:
    text = "\n# a comment, with a comma\n  blocks.0 , final_layer # the ends\n\n,blocks.10.mlp.fc2,\n"
    assert [p.text for p in patterns.parse_patterns(text)] == ["blocks.0", "final_layer", "blocks.10.mlp.fc2"]
    assert ignored(text) == ["blocks.0.attn.qkv_proj", "blocks.10.mlp.fc2", "final_layer.video_out"]


def test_empty_text_selects_nothing() -> None:
    assert ignored("") == ignored("  \n # nothing\n,,") == []


@pytest.mark.parametrize("text", ["blocks.1.mlp.fc2", "blocks.1.ml*.fc2"])
def test_the_prefix_of_lora_keys_is_accepted(text: str) -> None:
    assert ignored(f"diffusion_model.{text}") == ["blocks.1.mlp.fc2"]


def test_the_first_matching_entry_is_the_one_reported() -> None:
    parsed = patterns.parse_patterns("re:nothing\n*.fc2\nblocks.1")
    assert patterns.first_match(parsed, "blocks.1.mlp.fc2").text == "*.fc2"
    assert patterns.first_match(parsed, "blocks.1.attn.qkv_proj").text == "blocks.1"
    assert patterns.first_match(parsed, "blocks.2.attn.qkv_proj") is None


def test_a_bad_regular_expression_is_refused_by_name() -> None:
    with pytest.raises(KitchenSolError) as caught:
        config.QuantizeConfig(ignored_layers="blocks.0\nre:blocks.(0")
    message = str(caught.value)
    assert message.startswith(f"{NODE}: ignored_layers: 're:blocks.(0' is not a regular expression")
    assert "unterminated subpattern" in message
    assert message.endswith("Correct that line or remove it.")


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("group_size", "128", "auto, 256, 64, 16"),
        ("group_size", 256, "auto, 256, 64, 16"),
        ("layers", "everything", "blocks, blocks+modulation, all"),
        ("lora", "merge", "keep, bake"),
        ("device", "cuda:0", "auto, cpu"),
        ("device", None, "auto, cpu"),
    ],
)
def test_a_value_that_is_no_option_is_refused_with_the_options(
    name: str, value: object, options: str
) -> None:
    with pytest.raises(KitchenSolError) as caught:
        config.QuantizeConfig(**{name: value})
    assert str(caught.value) == f"{NODE}: {name} is {value!r}. Choose one of: {options}."
    assert (caught.value.node, caught.value.problem) == (NODE, f"{name} is {value!r}.")


def test_every_option_is_accepted_and_the_first_is_the_default() -> None:
    default = config.QuantizeConfig()
    for name in ("group_size", "layers", "lora", "device"):
        options = getattr(config, f"{name.upper()}_OPTIONS")
        assert getattr(default, name) == options[0]
        for option in options:
            assert getattr(config.QuantizeConfig(**{name: option}), name) == option


def test_group_sizes_to_try() -> None:
    assert config.QuantizeConfig().group_sizes == (256, 64, 16)
    for size in (256, 64, 16):
        assert config.QuantizeConfig(str(size)).group_sizes == (size,)


def test_a_config_is_a_value() -> None:
    first, second = (config.QuantizeConfig(ignored_layers="re:a") for _ in range(2))
    assert first == second and hash(first) == hash(second)
    assert first != config.QuantizeConfig(ignored_layers="re:b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.layers = "all"
