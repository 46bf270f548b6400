"""The table of joint sequences: on real models, the rows that change with the conditioning and no others.

Attention gives zeros in these runs, so that in every block of every list a row holds what became of its own
token: the rows of v that change when the conditioning does are the rows of the conditioning.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

import meta_models
import pytest
import torch
from attention_calls import Inputs, Recording, changed_rows, conditioning_marked, layouts, record
from comfyui import inprocess
from comfyui.builders import TinyModel

pytestmark = pytest.mark.core

layers = inprocess.pack_module("kernels_glue.attention.layers")
blocks = inprocess.pack_module("kernels_glue.blocks")
MakeTiny = Callable[..., TinyModel]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def text(tiny: TinyModel, tokens: int, **extra: Any) -> list[list[Any]]:
    """CONDITIONING of so many tokens."""
    from node_helpers import conditioning_set_values

    tiny = dataclasses.replace(tiny, context_shape=(tokens, tiny.context_shape[1]))
    return conditioning_set_values(inprocess.conditioning(tiny), extra)


def prove(
    tiny: TinyModel,
    positive: list[list[Any]],
    *,
    names: tuple[str, ...] = (),
    mark: Callable[[Inputs], Inputs] | None = None,
    parameters: tuple[str, ...] = (),
    patch: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    **sampling: Any,
) -> tuple[int, int]:
    """Checks text_rows in each block of the main lists; returns (rows of conditioning, all rows)."""
    patcher = inprocess.load_unet(tiny.path)
    if patch is not None:
        patcher.set_model_post_input_patch(patch)
    mark = mark or (lambda inputs: conditioning_marked(inputs, names))
    recordings = record(
        patcher, tiny, mark=mark, parameters=parameters, mixing=False, positive=positive, **sampling
    )
    assert len(recordings) == 1
    return _check(recordings[0])


def _check(recording: Recording) -> tuple[int, int]:
    model = recording.inputs.diffusion_model
    main = blocks.main_lists(model)
    layout = layouts.layout_for(model)
    indexed = layers.gives_block_index(model)
    in_blocks = [i for i, call in enumerate(recording.calls) if call.place or not indexed]
    assert len(in_blocks) == sum(length for _, length in main)
    if len(main) == 2:
        types_seen = [recording.calls[i].place["block_type"] for i in in_blocks]
        assert types_seen == ["double"] * main[0][1] + ["single"] * main[1][1]
    sizes = set()
    for i in in_blocks:
        tokens = recording.calls[i].tokens
        start, stop = layout.text_rows(tokens, recording.inputs)
        assert changed_rows(recording, i) == list(range(start, stop))
        sizes.add((stop - start, tokens))
    assert len(sizes) == 1
    return sizes.pop()


def test_flux(tiny: MakeTiny) -> None:
    model = tiny("flux")
    assert prove(model, text(model, 19), width=72, height=56) == (19, 19 + 5 * 4)


def test_flux_with_a_negative_in_the_batch(tiny: MakeTiny) -> None:
    model = tiny("flux")
    assert prove(model, text(model, 16), cfg=2.0, width=72, height=56) == (16, 16 + 5 * 4)


def test_flux_leaves_reference_images_sparse(tiny: MakeTiny) -> None:
    model = tiny("flux")
    references = [noise(1, 16, 6, 10), noise(1, 16, 3, 5)]
    positive = text(model, 70, reference_latents=references)
    assert prove(model, positive, width=72, height=56) == (70, 70 + 5 * 4 + 3 * 5 + 2 * 3)


def test_flux_with_text_that_a_patch_adds(tiny: MakeTiny) -> None:
    """As USOStyleReference does: tokens of an image in front of the text."""
    model = tiny("flux")

    def style(args: dict[str, Any]) -> dict[str, Any]:
        # Made of the text, so that a change of it shows.
        args["txt"] = torch.cat([args["txt"][:, :7], args["txt"]], dim=1)
        args["txt_ids"] = torch.cat([args["txt_ids"][:, :7], args["txt_ids"]], dim=1)
        return args

    assert prove(model, text(model, 19), patch=style) == (26, 26 + 16)


def test_flux_without_the_reference_rows_that_a_patch_drops(tiny: MakeTiny) -> None:
    """As FluxKVCache does from its second step on."""
    model = tiny("flux")

    def drop(args: dict[str, Any]) -> dict[str, Any]:
        args["img"], args["img_ids"] = args["img"][:, :16], args["img_ids"][:, :16]
        return args

    positive = text(model, 19, reference_latents=[noise(1, 16, 6, 10)])
    assert prove(model, positive, patch=drop) == (19, 19 + 16)


def test_chroma(tiny: MakeTiny) -> None:
    model = tiny("chroma")
    assert prove(model, text(model, 33), width=72, height=56) == (33, 33 + 5 * 4)


def test_chroma_ignores_reference_images(tiny: MakeTiny) -> None:
    model = tiny("chroma")
    positive = text(model, 33, reference_latents=[noise(1, 16, 6, 10)])
    assert prove(model, positive, width=72, height=56) == (33, 33 + 5 * 4)


def test_qwen_image(tiny: MakeTiny) -> None:
    model = tiny("qwen_image")
    assert prove(model, text(model, 21), width=72, height=56) == (21, 21 + 5 * 4)


@pytest.mark.parametrize("method", ["index", "index_timestep_zero", "negative_index", "offset"])
def test_qwen_image_leaves_reference_images_sparse(tiny: MakeTiny, method: str) -> None:
    model = tiny("qwen_image")
    references = [noise(1, 16, 1, 6, 10), noise(1, 16, 2, 3, 5)]
    positive = text(model, 21, reference_latents=references, reference_latents_method=method)
    assert prove(model, positive, width=72, height=56) == (21, 21 + 5 * 4 + 3 * 5 + 2 * 2 * 3)


def test_hunyuan_video(tiny: MakeTiny) -> None:
    model = tiny("hunyuan_video")
    # Core cannot put together videos of odd latent sizes.
    assert prove(model, text(model, 45), width=80, height=48) == (45, 45 + 2 * 5 * 3)


def test_hunyuan_video_with_a_reference_latent(tiny: MakeTiny) -> None:
    model = tiny("hunyuan_video")
    positive = text(model, 45, ref_latent=noise(1, 16, 1, 6, 10))
    assert prove(model, positive, width=80, height=48) == (45, 45 + 3 * 5 + 2 * 5 * 3)


def test_hunyuan_video_15_with_glyphs_and_vision(tiny: MakeTiny) -> None:
    model = tiny(
        "hunyuan_video", in_channels=65, out_channels=32, vec_in_dim=None, byt5=True, vision_in_dim=1152,
        use_cond_type_embedding=True, guidance_embed=False, meanflow_sum=True,
    )  # fmt: skip
    vision = types.SimpleNamespace(last_hidden_state=noise(1, 13, 1152))
    positive = text(model, 45, conditioning_byt5small=noise(1, 11, 1472), clip_vision_output=vision)
    # 16 pixels a latent pixel, others have 8
    rows = prove(model, positive, names=("txt_byt5", "clip_fea"), width=160, height=96)
    assert rows == (45 + 11 + 13, 45 + 11 + 13 + 2 * 5 * 3)


def test_hunyuan_image_with_glyphs(tiny: MakeTiny) -> None:
    model = tiny(
        "hunyuan_video", in_channels=64, out_channels=64, vec_in_dim=None, byt5=True, patch_size=[1, 1],
        axes_dim=[64, 64],
    )  # fmt: skip
    model = dataclasses.replace(
        model,
        latent_node="EmptyHunyuanImageLatent",
        latent_inputs={"width": 160, "height": 96},
    )
    positive = text(model, 45, conditioning_byt5small=noise(1, 11, 1472))
    assert prove(model, positive, names=("txt_byt5",)) == (56, 56 + 5 * 3)


def test_lumina2(tiny: MakeTiny) -> None:
    model = tiny("lumina2")
    assert prove(model, text(model, 23), width=72, height=56) == (23, 23 + 5 * 4)


def test_z_image_counts_the_padding_of_the_text(tiny: MakeTiny) -> None:
    model = tiny("z_image")
    rows = prove(model, text(model, 35), parameters=("cap_pad_token",), width=72, height=56)
    assert rows == (64, 64 + 32)


def test_z_image_omni(tiny: MakeTiny) -> None:
    model = tiny("z_image", siglip_feat_dim=48)
    vision = types.SimpleNamespace(image_sizes=[(3, 5 * 16, 7 * 16)], last_hidden_state=noise(1, 35, 48))
    positive = text(
        model,
        35,
        reference_latents=[noise(1, 16, 6, 10), noise(1, 16, 12, 14)],
        reference_latents_text_embeds=[noise(1, length, 128) for length in (5, 40, 33)],
        clip_vision_outputs=[vision],
    )
    rows = prove(
        model,
        positive,
        names=("ref_contexts", "siglip_feats"),
        parameters=("cap_pad_token", "siglip_pad_token"),
        width=72,
        height=56,
    )
    captions = 64 + 32 + 64 + 64
    # One reference has no features and the image to be made has none either: 32 rows of padding each.
    siglip = 64 + 32 + 32
    assert rows == (captions + siglip, captions + siglip + 32 + 64 + 32)


def _h3_marked(inputs: Inputs) -> Inputs:
    """Other values in everything but the video: text, frames, references and the audio."""
    video = torch.Size(inputs.conds["latent_shapes"][0]).numel()
    x = inputs.x.clone()
    x[..., video:] += 1
    payload = dict(inputs.conds["minimax_payload"])
    for name in ("cond_video_latents", "cond_audio_latents"):
        payload[name] = [latent + 1 for latent in payload.get(name, [])]
    conds = {**inputs.conds, "minimax_payload": payload}
    return Inputs(x, inputs.context + 1, conds)


H3_SIZE = dict(width=160, height=96, length=5)  # video 2 x 5 x 3 rows, audio 2 x 8
H3_AUDIO, H3_VIDEO = 2 * 8, 2 * 5 * 3


def test_h3_text_and_audio(tiny: MakeTiny) -> None:
    model = tiny("h3")
    rows = prove(model, text(model, 17), mark=_h3_marked, **H3_SIZE)
    assert rows == (17 + H3_AUDIO, 17 + H3_AUDIO + H3_VIDEO)


def test_h3_first_and_last_frame(tiny: MakeTiny) -> None:
    """The conditioning that MiniMaxH3ImageToVideo makes."""
    model = tiny("h3")
    frames = [{"resolved_frame_index": index, "latent": noise(1, 24, 1, 6, 10)} for index in (0, 4)]
    positive = text(model, 17, minimax_keyframes=frames, minimax_frame_count=5)
    prefix = 17 + 2 * 5 * 3 + H3_AUDIO
    assert prove(model, positive, mark=_h3_marked, **H3_SIZE) == (prefix, prefix + H3_VIDEO)


def test_h3_references(tiny: MakeTiny) -> None:
    """The conditioning that MiniMaxH3ReferenceToVideo makes."""
    model = tiny("h3")
    image = {"kind": "image", "latent_h": 4, "latent_w": 6, "latent": noise(1, 24, 1, 4, 6)}
    video = {
        "kind": "video_audio",
        "latent_t": 2,
        "latent_h": 6,
        "latent_w": 4,
        "ref_audio_t": 5,
        "latent": noise(1, 24, 2, 6, 4),
        "audio_latent": noise(1, 32, 2, 5),
    }
    speech = {"kind": "audio", "ref_audio_t": 3, "audio_latent": noise(1, 32, 2, 3)}
    positive = text(model, 17, minimax_refs=[image, video, speech])
    prefix = 17 + 2 * 3 + (2 * 5 + 2 * 3 * 2) + 2 * 3 + H3_AUDIO
    assert prove(model, positive, mark=_h3_marked, **H3_SIZE) == (prefix, prefix + H3_VIDEO)


def test_queries_are_dense_for_h3_only() -> None:
    dense = {name for name, layout in layouts.LAYOUTS.items() if layout is not None and layout.queries}
    assert dense == {"MiniMaxH3Model"}


@pytest.mark.parametrize(("family", "name"), [("flux", "Flux"), ("chroma", "Chroma"), ("vace", None)])
def test_models_go_by_their_class(family: str, name: str | None) -> None:
    layout = layouts.layout_for(meta_models.build(family))
    assert (layout and layout.family) == name


def test_subclasses_go_by_their_base(comfy: ModuleType) -> None:
    from comfy.ldm.chroma.model import Chroma
    from comfy.ldm.chroma_radiance.model import ChromaRadiance

    radiance = ChromaRadiance.__new__(ChromaRadiance)
    torch.nn.Module.__init__(radiance)
    radiance.patch_size = 16
    layout = layouts.layout_for(radiance)
    assert issubclass(ChromaRadiance, Chroma) and layout.family == "Chroma"
    # The same packing as Chroma's, with 16 x 16 pixels a token.
    inputs = layouts.ModelInputs(radiance, noise(1, 3, 90, 64), noise(1, 33, 8), {})
    assert layout.text_rows(33 + 6 * 4, inputs) == (0, 33)


def test_unknown_and_compiled_models(tiny: MakeTiny) -> None:
    assert layouts.layout_for(torch.nn.Linear(2, 2)) is None
    model = inprocess.load_unet(tiny("flux").path).model.diffusion_model
    compiled = torch.compile(model)
    assert type(compiled) is not type(model)
    assert layouts.layout_for(compiled).family == "Flux"


def test_the_range_stays_inside_the_sequence() -> None:
    layout = layouts.Layout("any", lambda inputs: 10)
    inputs = layouts.ModelInputs(None, None, noise(1, 5, 2), {})
    assert layout.text_rows(20, inputs) == (0, 10)
    assert layout.text_rows(12, inputs) == (0, 5)
    assert layout.text_rows(4, inputs) == (0, 4)
