"""The plan: which layers are quantized with which ConvRot group, and why each other one is kept.

Pure values in, pure values out; what real models give is in test_roles.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from comfyui import inprocess

plan = inprocess.pack_module("kernels_glue.quantization.plan")
QuantizeConfig = inprocess.pack_module("kernels_glue.quantization.config").QuantizeConfig

NO_GROUP = "in_features {} divides by no group size ({})"


def layer(name: str, in_features: int = 256, out_features: int = 512, **others: Any) -> Any:
    """A layer as the survey describes it; in a block if its name starts with `blocks.`."""
    return plan.LayerInfo(name, in_features, out_features, name.startswith("blocks."), **others)


def int8(name: str, group: int | None, in_features: int = 256) -> Any:
    return layer(name, in_features, quant_format="int8_tensorwise", group_size=group)


def decide(found: list[Any], /, **settings: str) -> tuple[dict[str, int], dict[str, str]]:
    """({quantized layer: group}, {kept layer: reason})."""
    made = plan.make_plan(found, QuantizeConfig(**settings))
    assert [d.layer for d in made.decisions] == found
    return made.to_quantize, {d.layer.name: d.reason for d in made.kept}


# Case 2 of the field: adaln with 8 inputs, patch projections of 96 and 32. All are block weights by
# name, so that the widths alone decide.
WIDTHS = [layer(f"blocks.0.w{width}", width) for width in (8, 32, 96, 256)]
NAMES = [x.name for x in WIDTHS]


def test_group_256_skips_what_it_does_not_divide_and_lists_each_with_its_reason() -> None:
    done, kept = decide(WIDTHS, group_size="256")
    assert done == {"blocks.0.w256": 256}
    assert kept == {f"blocks.0.w{width}": NO_GROUP.format(width, 256) for width in (8, 32, 96)}


def test_auto_takes_the_largest_group_a_layer_at_a_time() -> None:
    done, kept = decide(WIDTHS)
    assert done == {"blocks.0.w32": 16, "blocks.0.w96": 16, "blocks.0.w256": 256}
    assert kept == {"blocks.0.w8": NO_GROUP.format(8, "256, 64, 16")}


@pytest.mark.parametrize(
    ("width", "group"),
    [(16, 16), (48, 16), (64, 64), (128, 64), (192, 64), (256, 256), (320, 64), (512, 256), (5376, 256)],
)
def test_auto_group_of_a_width(width: int, group: int) -> None:
    assert decide([layer("blocks.0.a", width)])[0] == {"blocks.0.a": group}


@pytest.mark.parametrize(
    ("group", "widths"),
    [("256", {256, 512}), ("64", {64, 192, 256, 512}), ("16", {16, 64, 96, 192, 256, 512})],
)
def test_an_explicit_group_is_used_for_every_layer_it_divides(group: str, widths: set[int]) -> None:
    layers = [layer(f"blocks.0.w{width}", width) for width in (8, 16, 64, 96, 192, 256, 512)]
    done, kept = decide(layers, group_size=group)
    assert done == {f"blocks.0.w{width}": int(group) for width in widths}
    assert set(done) | set(kept) == {x.name for x in layers}
    assert kept["blocks.0.w8"] == NO_GROUP.format(8, group)


@pytest.mark.parametrize("group_size", ["auto", "256", "64", "16"])
def test_case_3_in_12_out_1_is_kept(group_size: str) -> None:
    done, kept = decide([layer("blocks.0.odd", 12, 1)], group_size=group_size)
    tried = "256, 64, 16" if group_size == "auto" else group_size
    assert (done, kept) == ({}, {"blocks.0.odd": NO_GROUP.format(12, tried)})


def test_a_layer_with_one_output_is_quantized() -> None:
    assert decide([layer("blocks.0.one", 256, 1)])[0] == {"blocks.0.one": 256}


SCOPED = [
    layer("patch_proj"),
    layer("time_embedder.proj_in"),
    layer("blocks.0.attn.qkv"),
    layer("blocks.0.adaln_proj.linear"),
    layer("blocks.0.norm1.linear"),
    layer("final_layer.adaLN_modulation.1"),
    layer("norm_out.linear"),
]
MODULATION, NORM = "modulation (AdaLN) layer", "part of a norm layer"
EMBEDDER, OUTSIDE = (
    "time, label or guidance embedder",
    "input or output projection, outside of the blocks",
)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("blocks", {"blocks.0.attn.qkv"}),
        (
            "blocks+modulation",
            {"blocks.0.attn.qkv", "blocks.0.adaln_proj.linear", "final_layer.adaLN_modulation.1"},
        ),
        ("all", {"blocks.0.attn.qkv", "patch_proj"}),
    ],
)
def test_scopes(layers: str, expected: set[str]) -> None:
    done, kept = decide(SCOPED, layers=layers)
    assert set(done) == expected
    reasons = {
        "patch_proj": OUTSIDE,
        "time_embedder.proj_in": EMBEDDER,
        "blocks.0.adaln_proj.linear": MODULATION,
        "blocks.0.norm1.linear": NORM,
        "final_layer.adaLN_modulation.1": MODULATION,
        "norm_out.linear": NORM,
    }
    assert kept == {name: reason for name, reason in reasons.items() if name not in expected}


@pytest.mark.parametrize("layers", ["blocks", "blocks+modulation", "all"])
def test_fp32_islands_stay_fp32_in_every_scope(layers: str) -> None:
    island = [layer(name, is_fp32_island=True) for name in ("patch_proj", "blocks.0.a", "blocks.0.adaln.l")]
    done, kept = decide([*island, layer("blocks.0.b")], layers=layers)
    assert done == {"blocks.0.b": 256}
    assert kept["blocks.0.a"] == "the model keeps it in fp32"
    assert set(kept) == {x.name for x in island}


def test_ignored_layers_are_kept_and_name_their_entry() -> None:
    done, kept = decide([layer("blocks.0.a"), layer("blocks.1.a")], ignored_layers="re:zzz\nblocks.0")
    assert done == {"blocks.1.a": 256}
    assert kept == {"blocks.0.a": "in ignored_layers (blocks.0)"}


def test_a_module_without_weight_is_kept() -> None:
    done, kept = decide([layer("blocks.0.a", has_weight=False), layer("blocks.0.b")])
    assert done == {"blocks.0.b": 256}
    assert kept == {"blocks.0.a": "holds no weight"}


def test_a_layer_in_another_quantized_format_is_kept() -> None:
    done, kept = decide([layer("blocks.0.a", quant_format="nvfp4"), layer("blocks.0.b")])
    assert done == {"blocks.0.b": 256}
    assert kept == {"blocks.0.a": "already quantized (nvfp4)"}


def test_a_model_that_is_int8_has_nothing_to_do() -> None:
    made = plan.make_plan([int8("blocks.0.a", 256), int8("blocks.0.b", None)], QuantizeConfig())
    assert made.to_quantize == {} and made.kept == ()
    assert made.already_int8 == made.int8_layers == ("blocks.0.a", "blocks.0.b")
    reasons = [d.reason for d in made.decisions]
    assert reasons == ["already INT8, ConvRot group 256", "already INT8, without ConvRot"]


@pytest.mark.parametrize("group_size", ["auto", "256", "64"])
def test_partly_int8_takes_over_the_group_size(group_size: str) -> None:
    layers = [int8("blocks.0.a", 64), layer("blocks.1.a", 512), layer("blocks.1.b", 96)]
    made = plan.make_plan(layers, QuantizeConfig(group_size))
    assert made.to_quantize == {"blocks.1.a": 64}
    assert made.int8_layers == ("blocks.0.a", "blocks.1.a")
    assert [d.reason for d in made.kept] == [NO_GROUP.format(96, 64)]
    remark = "group_size 256 had no effect: the model has INT8 layers of group 64."
    assert made.remarks == ((remark,) if group_size == "256" else ())


def test_partly_int8_with_several_groups_takes_the_largest_that_divides() -> None:
    layers = [int8("blocks.0.a", 16), int8("blocks.0.b", 256), layer("blocks.1.a"), layer("blocks.1.b", 64)]
    made = plan.make_plan(layers, QuantizeConfig("64"))
    assert made.to_quantize == {"blocks.1.a": 256, "blocks.1.b": 16}
    assert made.remarks == ("group_size 64 had no effect: the model has INT8 layers of group 256, 16.",)


def test_int8_without_convrot_leaves_the_group_free() -> None:
    made = plan.make_plan([int8("blocks.0.a", None), layer("blocks.1.a")], QuantizeConfig("64"))
    assert made.to_quantize == {"blocks.1.a": 64} and made.remarks == ()


def test_fp8_is_quantized_with_a_remark_on_the_double_rounding() -> None:
    scaled = layer("blocks.0.a", quant_format="float8_e4m3fn", is_fp8=True)
    layers = [scaled, layer("blocks.0.b", is_fp8=True), layer("blocks.0.c"), layer("patch", is_fp8=True)]
    made = plan.make_plan(layers, QuantizeConfig())
    assert set(made.to_quantize) == {"blocks.0.a", "blocks.0.b", "blocks.0.c"}
    assert made.remarks == (
        "2 layers come from fp8, so they are rounded twice; a bf16 file gives a closer result.",
    )


def test_remarks_name_entries_without_effect() -> None:
    layers = [int8("blocks.0.a", 256), layer("blocks.1.a")]
    made = plan.make_plan(layers, QuantizeConfig(ignored_layers="blocks.0, blocks.1, blocks.2, blocks"))
    assert made.remarks == (
        "ignored_layers: 'blocks.0' had no effect, its layers are already INT8.",
        "ignored_layers: 'blocks.2' matches no linear layer.",
    )


def test_plain_settings_leave_no_remark() -> None:
    assert plan.make_plan(SCOPED, QuantizeConfig("16", ignored_layers="blocks.0.attn")).remarks == ()


def test_nothing_to_quantize_says_why_with_counts() -> None:
    layers = [layer("blocks.0.a", 8), layer("blocks.1.a", 8), layer("patch_proj")]
    made = plan.make_plan(layers, QuantizeConfig("256"))
    assert plan.nothing_to_quantize(made) == (
        f"no linear layer is left to quantize (2 x {NO_GROUP.format(8, 256)}; 1 x {OUTSIDE})."
    )
    empty = plan.make_plan([], QuantizeConfig())
    assert plan.nothing_to_quantize(empty) == (
        "no linear layer is left to quantize (the model has no linear layer)."
    )
