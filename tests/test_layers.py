"""`dense_layers` as text, and the layer that each attention call of a real model belongs to."""

from __future__ import annotations

from collections.abc import Callable

import meta_models
import pytest
import torch
from attention_calls import Call, record
from comfyui import inprocess
from comfyui.builders import TinyModel

layers = inprocess.pack_module("kernels_glue.attention.layers")
blocks = inprocess.pack_module("kernels_glue.blocks")
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError
MakeTiny = Callable[..., TinyModel]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", set()),
        ("  \n ", set()),
        ("0", {0}),
        ("0,1,-1,10-12", {0, 1, 10, 11, 12, 19}),
        (" 0 ,\n 3 - 5 ,\n", {0, 3, 4, 5}),
        ("2\n4", {2, 4}),
        ("-3--1", {17, 18, 19}),
        ("18--1", {18, 19}),
        ("-20-1", {0, 1}),
        ("7-7,7", {7}),
        ("\N{MINUS SIGN}1, 2\N{EN DASH}3", {2, 3, 19}),
    ],
)
def test_lists_of_layers(text: str, expected: set[int]) -> None:
    chosen = layers.parse_layers(text, 20)
    assert (set(chosen.layers), chosen.remark) == (expected, "")
    assert [layer in chosen for layer in range(20)] == [layer in expected for layer in range(20)]


@pytest.mark.parametrize(
    "text",
    [
        "all",
        "1.5",
        "0,,1",
        "1 2",
        "0;1",
        "5-3",
        "-1--3",
        "1-2-3",
        "0,-",
        "0x1",
        "\N{SUPERSCRIPT TWO}",
        "9" * 30,
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(KitchenSolError, match="dense_layers"):
        layers.parse_layers(text, 20)


@pytest.mark.parametrize(
    ("text", "inside", "named"),
    [
        ("20", set(), "'20'"),
        ("-21,0", {0}, "'-21'"),
        ("18-30,1", {1, 18, 19}, "'18-30'"),
        ("-30--19,5", {0, 1, 5}, "'-30--19'"),
        ("15--10,2", {2}, "'15--10'"),
        ("0-999999999", set(range(20)), "'0-999999999'"),
        ("40,50-60", set(), "'40', '50-60'"),
    ],
)
def test_entries_outside_of_the_model_leave_a_remark(text: str, inside: set[int], named: str) -> None:
    chosen = layers.parse_layers(text, 20)
    assert set(chosen.layers) == inside
    expected = f"dense_layers: {named} not or only partly in the model, the model has layers 0 to 19."
    assert chosen.remark == expected


def test_a_model_without_layers_has_a_remark_for_every_entry() -> None:
    chosen = layers.parse_layers("0,-1", 0)
    assert chosen.layers == frozenset()
    assert "'0', '-1'" in chosen.remark and "no layers" in chosen.remark
    assert layers.parse_layers("", 0).remark == ""


LISTS = {
    "wan": ["blocks"],
    "vace": ["blocks"],
    "minimax_h3": ["blocks"],
    "flux": ["double_blocks", "single_blocks"],
    "chroma": ["double_blocks", "single_blocks"],
    "hunyuan_video": ["double_blocks", "single_blocks"],
    "qwen_image": ["transformer_blocks"],
    "lumina": ["layers"],
    "ltx": ["transformer_blocks"],
    "ltx_av": ["transformer_blocks"],
    "hidream": ["double_stream_blocks", "single_stream_blocks"],
    "kandinsky5": ["visual_transformer_blocks"],
    "aura": ["double_layers", "single_layers"],
    "omnigen2": ["layers"],
    "sd3": ["joint_blocks"],
    "sdxl": [],
}


@pytest.mark.core
@pytest.mark.parametrize("family", LISTS)
def test_main_lists_are_those_of_the_joint_sequence(family: str) -> None:
    model = meta_models.build(family)
    found = blocks.main_lists(model)
    assert [name for name, _ in found] == LISTS[family]
    assert [length for _, length in found] == [len(model.get_submodule(name)) for name in LISTS[family]]


def _blocks(count: int) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(4, 1, 8) for _ in range(count))


def test_double_blocks_run_before_single_blocks_wherever_they_stand() -> None:
    model = torch.nn.Module()
    model.single_blocks, model.double_blocks = _blocks(3), _blocks(2)
    assert blocks.main_lists(model) == (("double_blocks", 2), ("single_blocks", 3))


def test_lists_below_a_submodule_count_where_there_are_no_others() -> None:
    model = torch.nn.Module()
    model.transformer = torch.nn.Module()
    model.transformer.blocks = _blocks(2)
    assert blocks.main_lists(model) == (("transformer.blocks", 2),)
    model.blocks = _blocks(3)
    assert blocks.main_lists(model) == (("blocks", 3),)


# One evaluation of each family, as core's code runs: refiners first, self-attention calls only.
# None: outside of the main lists. VACE runs its side block at the block that it is for, and after it.
SEQUENCES = {
    "wan": ({"num_layers": 3}, [0, 1, 2]),
    "vace": ({"num_layers": 4, "vace_layers": 2}, [0, 0, 1, 2, 2, 3]),
    "h3": ({"num_layers": 3}, [0, 1, 2]),
    "flux": ({"depth": 2, "depth_single_blocks": 3}, [0, 1, 2, 3, 4]),
    "chroma": ({"depth": 3, "depth_single_blocks": 2}, [0, 1, 2, 3, 4]),
    "qwen_image": ({"num_layers": 3}, [0, 1, 2]),
    "hunyuan_video": ({"depth": 3, "depth_single_blocks": 2}, [None, None, 0, 1, 2, 3, 4]),
    "lumina2": ({"n_layers": 3}, [None, None, 0, 1, 2]),
    "z_image": ({"n_layers": 3}, [None, None, 0, 1, 2]),
    "ltx": ({"num_layers": 3}, [0, 1, 2]),
}


@pytest.mark.core
@pytest.mark.parametrize("family", SEQUENCES)
def test_layers_of_an_evaluation(tiny: MakeTiny, family: str) -> None:
    overrides, expected = SEQUENCES[family]
    model = tiny(family, **overrides)
    patcher = inprocess.load_unet(model.path)
    diffusion_model = patcher.model.diffusion_model
    lists, indexed = blocks.main_lists(diffusion_model), layers.gives_block_index(diffusion_model)
    recordings = record(patcher, model, steps=2, cfg=2.0)
    assert len(recordings) == (4 if family == "h3" else 2)  # H3 evaluates its two conditions apart
    for recording in recordings:
        counter = layers.LayerCounter(lists, indexed)
        calls = [call for call in recording.calls if call.q_shape == call.k_shape]
        found = [counter.layer_of(call.place, call.q_shape[1], call.q_shape[3]) for call in calls]
        assert found == expected
        assert any("block_index" in call.place for call in calls) == indexed


def test_calls_are_counted_apart_for_each_head_shape() -> None:
    """An audio-video model has a self-attention of either kind in a block."""
    counter = layers.LayerCounter((("transformer_blocks", 2),), indexed=False)
    calls = [(32, 128), (32, 64), (32, 128), (32, 64)]
    assert [counter.layer_of({}, *shape) for shape in calls] == [0, 0, 1, 1]


def test_one_list_that_core_calls_single_counts_from_zero() -> None:
    counter = layers.LayerCounter((("blocks", 28),), indexed=True)
    assert counter.layer_of({"block_index": 5, "block_type": "single"}, 8, 128) == 5


def test_an_index_without_a_type_counts_from_zero() -> None:
    counter = layers.LayerCounter((("double_blocks", 2), ("single_blocks", 3)), indexed=True)
    assert counter.layer_of({"block_index": 1}, 8, 128) == 1
    assert counter.layer_of({"block_index": 1, "block_type": "single"}, 8, 128) == 3
    assert counter.layer_of({"block_type": "single"}, 8, 128) is None


def test_a_model_that_starts_to_say_where_it_is_is_noticed() -> None:
    class Silent(torch.nn.Module):
        def forward(self, x: torch.Tensor, options: dict[str, int]) -> torch.Tensor:
            return x

    class Base(Silent):
        def _forward(self, x: torch.Tensor, options: dict[str, int]) -> torch.Tensor:
            options["block_index"] = 0
            return x

    class Derived(Base):
        def forward(self, x: torch.Tensor, options: dict[str, int]) -> torch.Tensor:
            return self._forward(x, options)

    assert not layers.gives_block_index(Silent())
    assert layers.gives_block_index(Derived())
    assert layers.gives_block_index(torch.compile(Derived()))


def test_recorded_rows_are_those_of_the_keys(tiny: MakeTiny) -> None:
    """The recorder itself: Wan's sequence is its latent alone; its text has 16 tokens."""
    model = tiny("wan")
    calls: list[Call] = record(inprocess.load_unet(model.path), model)[0].calls
    assert [call.tokens for call in calls] == [2 * 4 * 4] * 4
    assert {call.rows.shape for call in calls} == {(32, 256), (16, 256)}


def test_blocks_in_a_dict_are_one_list() -> None:
    """Cosmos 1 keeps each block under a name, and three parts in every one of them."""
    import comfy.ops
    from comfy.ldm.cosmos.model import GeneralDIT

    cosmos = GeneralDIT(
        max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2,
        patch_temporal=1, model_channels=256, num_blocks=2, num_heads=2, pos_emb_cls="rope3d",
        pos_emb_learnable=False, affline_emb_norm=True, use_adaln_lora=True, adaln_lora_dim=64,
        device="meta", dtype=torch.float32, operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    assert blocks.main_lists(cosmos) == (("blocks", 2),)


def test_lists_of_submodules_count_in_the_largest_only() -> None:
    """HiDream-O1 has a language model that denoises, and eyes."""

    class Block(torch.nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.norm = torch.nn.LayerNorm(width)

    model = torch.nn.Module()
    model.visual = torch.nn.Module()
    model.visual.blocks = torch.nn.ModuleList(Block(4) for _ in range(9))
    model.language_model = torch.nn.Module()
    model.language_model.layers = torch.nn.ModuleList(Block(64) for _ in range(3))
    assert blocks.main_lists(model) == (("language_model.layers", 3),)
