"""What each linear layer of ComfyUI's real model classes is for, and where their block lists are.

The expected names were read from comfy/ldm: {a,b} stands for either, as in a shell. Digits are written
out: `fc1` and `fc2` are two layers, and `ffn.0` is not `blocks.0`.
"""

from __future__ import annotations

import re
from collections import defaultdict

import meta_models
import pytest
import torch
from comfyui import inprocess

blocks = inprocess.pack_module("kernels_glue.blocks")
roles = inprocess.pack_module("kernels_glue.quantization.roles")

# What the families of Flux have in common.
_FLUX_BLOCKS = (
    "double_blocks.{0,1}.{img,txt}_{attn.{qkv,proj},mlp.{0,2}} single_blocks.{0,1}.{linear1,linear2}"
)
_FLUX_MODULATION = (
    "double_blocks.{0,1}.{img,txt}_mod.lin single_blocks.{0,1}.modulation.lin final_layer.adaLN_modulation.1"
)
_LUMINA_BLOCK = "{0,1}.{attention.{qkv,out},feed_forward.{w1,w2,w3}}"
_OMNIGEN_BLOCK = "{0,1}.{attn.{to_q,to_k,to_v,to_out.0},feed_forward.{linear_1,linear_2,linear_3}}"
_WAN_ATTENTION = "{self_attn,cross_attn}.{q,k,v,o}"
_TIMESTEP = "timestep_embedder.{linear_1,linear_2}"

# family -> block lists, and role -> names
EXPECTED: dict[str, tuple[str, dict[str, str]]] = {
    "wan": (
        "blocks",
        {
            "BLOCK": f"blocks.{{0,1}}.{{{_WAN_ATTENTION},cross_attn.{{k,v}}_img,ffn.{{0,2}}}}",
            "MODULATION": "time_projection.1",
            "EMBEDDER": "time_embedding.{0,2}",
            "OUTSIDE": "text_embedding.{0,2} img_emb.proj.{1,3} head.head",
        },
    ),
    "vace": (
        "blocks vace_blocks",
        {
            "BLOCK": f"{{,vace_}}blocks.{{0,1}}.{{{_WAN_ATTENTION},ffn.{{0,2}}}}"
            " vace_blocks.0.before_proj vace_blocks.{0,1}.after_proj",
            "MODULATION": "time_projection.1",
            "EMBEDDER": "time_embedding.{0,2}",
            "OUTSIDE": "text_embedding.{0,2} head.head",
        },
    ),
    "minimax_h3": (
        "token_refiner.blocks blocks",
        {
            "BLOCK": "{token_refiner.,}blocks.{0,1}.{attn.{qkv_proj,out_proj},mlp.{fc1,fc2}}",
            "MODULATION": "blocks.{0,1}.adaln_proj.linear final_layer.adaln_proj.linear",
            "EMBEDDER": "time_embedder.proj_{in,out}",
            "OUTSIDE": "{video_patch,audio_patch,condition}_proj final_layer.{video,audio}_out",
        },
    ),
    "flux": (
        "double_blocks single_blocks",
        {
            "BLOCK": _FLUX_BLOCKS,
            "MODULATION": _FLUX_MODULATION,
            "EMBEDDER": "{time,vector,guidance}_in.{in,out}_layer",
            "OUTSIDE": "img_in txt_in final_layer.linear",
        },
    ),
    # One small network computes the modulation of all blocks, which have none of their own.
    "chroma": (
        "double_blocks single_blocks",
        {
            "BLOCK": _FLUX_BLOCKS,
            "MODULATION": "distilled_guidance_layer.{in_proj,out_proj,layers.{0,1,2,3,4}.{in,out}_layer}",
            "OUTSIDE": "img_in txt_in final_layer.linear",
        },
    ),
    "hunyuan_video": (
        "txt_in.individual_token_refiner.blocks double_blocks single_blocks",
        {
            "BLOCK": _FLUX_BLOCKS
            + " txt_in.individual_token_refiner.blocks.{0,1}.{self_attn.{qkv,proj},mlp.{0,2}}",
            "MODULATION": _FLUX_MODULATION
            + " txt_in.individual_token_refiner.blocks.{0,1}.adaLN_modulation.1",
            "EMBEDDER": "{time_in,time_r_in,vector_in,guidance_in,txt_in.t_embedder}.{in,out}_layer",
            "OUTSIDE": "txt_in.{input_embedder,c_embedder.{in,out}_layer} byt5_in.{fc1,fc2,fc3}"
            " vision_in.proj.{1,3} final_layer.linear",
        },
    ),
    # The last block returns no text, so it has no projections for it.
    "mochi": (
        "blocks",
        {
            "BLOCK": "blocks.{0,1}.{attn.{qkv_x,qkv_y,proj_x},mlp_x.{w1,w2}}"
            " blocks.0.{attn.proj_y,mlp_y.{w1,w2}}",
            "MODULATION": "blocks.{0,1}.mod_{x,y} final_layer.mod",
            "EMBEDDER": "t_embedder.mlp.{0,2}",
            "OUTSIDE": "final_layer.linear",
        },
    ),
    "pixart": (
        "blocks",
        {
            "BLOCK": "blocks.{0,1}.{attn.{qkv,proj},cross_attn.{q_linear,kv_linear,proj},mlp.{fc1,fc2}}",
            "MODULATION": "t_block.1",
            "EMBEDDER": "{t,csize,ar}_embedder.mlp.{0,2} y_embedder.y_proj.{fc1,fc2}",
            "OUTSIDE": "final_layer.linear",
        },
    ),
    "krea2": (
        "blocks",
        {
            "BLOCK": "blocks.{0,1}.{attn.{wq,wk,wv,gate,wo},mlp.{gate,up,down}}",
            "MODULATION": "tproj.1",
            "EMBEDDER": "tmlp.{0,2}",
            "OUTSIDE": "first txtmlp.{1,3} last.linear txtfusion.projector"
            " txtfusion.{layerwise,refiner}_blocks.{0,1}.{attn.{wq,wk,wv,gate,wo},mlp.{gate,up,down}}",
        },
    ),
    "qwen_image": (
        "transformer_blocks",
        {
            "BLOCK": "transformer_blocks.{0,1}.{{img,txt}_mlp.net.{0.proj,2},"
            "attn.{to_{q,k,v,add_out,out.0},add_{q,k,v}_proj}}",
            "MODULATION": "transformer_blocks.{0,1}.{img,txt}_mod.1",
            "EMBEDDER": f"time_text_embed.{_TIMESTEP}",
            "NORM": "norm_out.linear",
            "OUTSIDE": "img_in txt_in proj_out",
        },
    ),
    "lumina": (
        "noise_refiner context_refiner layers",
        {
            "BLOCK": f"{{noise_refiner,context_refiner,layers}}.{_LUMINA_BLOCK}",
            "MODULATION": "{noise_refiner,layers}.{0,1}.adaLN_modulation.1 final_layer.adaLN_modulation.1",
            "EMBEDDER": "t_embedder.mlp.{0,2}",
            "OUTSIDE": "x_embedder cap_embedder.1 final_layer.linear",
        },
    ),
    "ltx": (
        "transformer_blocks",
        {
            "BLOCK": "transformer_blocks.{0,1}.{attn{1,2}.to_{q,k,v,out.0},ff.net.{0.proj,2}}",
            "MODULATION": "adaln_single.linear",
            "EMBEDDER": f"adaln_single.emb.{_TIMESTEP}",
            "OUTSIDE": "patchify_proj caption_projection.linear_{1,2} proj_out",
        },
    ),
    "ltx_av": (
        "{audio,video}_embeddings_connector.transformer_1d_blocks transformer_blocks",
        {
            "BLOCK": "{audio,video}_embeddings_connector.transformer_1d_blocks.{0,1}."
            "{attn1.to_{q,k,v,out.0},ff.net.{0.proj,2}}"
            " transformer_blocks.{0,1}.{{,audio_}attn{1,2}.to_{q,k,v,out.0},{,audio_}ff.net.{0.proj,2},"
            "{audio_to_video,video_to_audio}_attn.to_{q,k,v,out.0}}",
            "MODULATION": "{{,audio_}adaln,av_ca_{{video,audio}_scale_shift,{a2v,v2a}_gate}_adaln}"
            "_single.linear",
            "EMBEDDER": "{{,audio_}adaln,av_ca_{{video,audio}_scale_shift,{a2v,v2a}_gate}_adaln}"
            f"_single.emb.{_TIMESTEP}",
            "OUTSIDE": "{,audio_}{patchify_proj,caption_projection.linear_{1,2},proj_out}",
        },
    ),
    # The last context block only makes keys and values.
    "sd3": (
        "joint_blocks",
        {
            "BLOCK": "joint_blocks.{0,1}.x_block.{attn.{qkv,proj},mlp.{fc1,fc2}}"
            " joint_blocks.0.context_block.{attn.{qkv,proj},mlp.{fc1,fc2}}"
            " joint_blocks.1.context_block.attn.qkv",
            "MODULATION": "joint_blocks.{0,1}.{x,context}_block.adaLN_modulation.1"
            " final_layer.adaLN_modulation.1",
            "EMBEDDER": "{t,y}_embedder.mlp.{0,2}",
            "OUTSIDE": "context_embedder final_layer.linear",
        },
    ),
    "hidream": (
        "double_stream_blocks single_stream_blocks",
        {
            "BLOCK": "{double,single}_stream_blocks.{0,1}.block.{attn1.to_{q,k,v,out},"
            "ff_i.{shared_experts,experts.{0,1,2,3}}.w{1,2,3}}"
            " double_stream_blocks.{0,1}.block.{attn1.to_{q,k,v,out}_t,ff_t.w{1,2,3}}",
            "MODULATION": "{double,single}_stream_blocks.{0,1}.block.adaLN_modulation.1"
            " final_layer.adaLN_modulation.1",
            "EMBEDDER": f"t_embedder.{_TIMESTEP} p_embedder.pooled_embedder.linear_{{1,2}}",
            "OUTSIDE": "x_embedder.proj caption_projection.{0,1,2,3,4}.linear final_layer.linear",
        },
    ),
    "kandinsky5": (
        "text_transformer_blocks visual_transformer_blocks",
        {
            "BLOCK": "{text,visual}_transformer_blocks.{0,1}."
            "{self_attention.{to_{query,key,value},out_layer},feed_forward.{in,out}_layer}"
            " visual_transformer_blocks.{0,1}.cross_attention.{to_{query,key,value},out_layer}",
            "MODULATION": "text_transformer_blocks.{0,1}.text_modulation.out_layer"
            " visual_transformer_blocks.{0,1}.visual_modulation.out_layer out_layer.modulation.out_layer",
            "EMBEDDER": "time_embeddings.{in,out}_layer pooled_text_embeddings.in_layer",
            "OUTSIDE": "{text,visual}_embeddings.in_layer out_layer.out_layer",
        },
    ),
    "cosmos_predict2": (
        "blocks",
        {
            "BLOCK": "blocks.{0,1}.{{self,cross}_attn.{q,k,v,output}_proj,mlp.layer{1,2}}",
            "MODULATION": "{blocks.{0,1}.adaln_modulation_{self_attn,cross_attn,mlp},"
            "final_layer.adaln_modulation}.{1,2}",
            "EMBEDDER": "t_embedder.1.linear_{1,2}",
            "OUTSIDE": "x_embedder.proj.1 final_layer.linear",
        },
    ),
    "aura": (
        "double_layers single_layers",
        {
            "BLOCK": "double_layers.{0,1,2,3}.{mlp{C,X}.c_{fc1,fc2,proj},attn.w{1,2}{q,k,v,o}}"
            " single_layers.{0,1}.{mlp.c_{fc1,fc2,proj},attn.w1{q,k,v,o}}",
            "MODULATION": "double_layers.{0,1,2,3}.mod{C,X}.1 single_layers.{0,1}.modCX.1 modF.1",
            "EMBEDDER": "t_embedder.mlp.{0,2}",
            "OUTSIDE": "cond_seq_linear init_x_linear final_linear",
        },
    ),
    # Their AdaLN is inside of the norm classes.
    "omnigen2": (
        "noise_refiner ref_image_refiner context_refiner layers",
        {
            "BLOCK": f"{{noise_refiner,ref_image_refiner,context_refiner,layers}}.{_OMNIGEN_BLOCK}",
            "NORM": "{noise_refiner,ref_image_refiner,layers}.{0,1}.norm1.linear norm_out.linear_{1,2}",
            "EMBEDDER": f"time_caption_embed.{_TIMESTEP}",
            "OUTSIDE": "x_embedder ref_image_patch_embedder time_caption_embed.caption_embedder.1",
        },
    ),
    "boogu": (
        "noise_refiner ref_image_refiner context_refiner double_stream_layers single_stream_layers",
        {
            "BLOCK": "{noise_refiner,ref_image_refiner,context_refiner,single_stream_layers}."
            f"{_OMNIGEN_BLOCK}"
            " double_stream_layers.{0,1}.{{img,instruct}_feed_forward.linear_{1,2,3},"
            "img_self_attn.to_{q,k,v,out.0},img_instruct_attn.{to_out.0,processor.{img,instruct}_"
            "{to_q,to_k,to_v,out}}}",
            "NORM": "{noise_refiner,ref_image_refiner,single_stream_layers}.{0,1}.norm1.linear"
            " double_stream_layers.{0,1}.{img_norm{1,2,3},instruct_norm{1,2}}.linear norm_out.linear_{1,2}",
            "EMBEDDER": f"time_caption_embed.{_TIMESTEP}",
            "OUTSIDE": "x_embedder ref_image_patch_embedder time_caption_embed.caption_embedder.1",
        },
    ),
    "ace": (
        "transformer_blocks",
        {
            "BLOCK": "transformer_blocks.{0,1}.{attn.to_{q,k,v,out.0},"
            "cross_attn.{to_{q,k,v,out.0,add_out},add_{q,k,v}_proj}}",
            "MODULATION": "t_block.1",
            "EMBEDDER": _TIMESTEP,
            "OUTSIDE": "speaker_embedder genre_embedder lyric_proj projectors.{0,1}.{0,2,4}"
            " lyric_encoder.embed.out.0 lyric_encoder.encoders.{0,1,2,3,4,5}."
            "{self_attn.linear_{q,k,v,out,pos},feed_forward.w_{1,2}} final_layer.linear",
        },
    ),
}


def expand(text: str) -> list[str]:
    """Shell brace expansion of words: `a{1,2}` -> a1, a2."""
    return [name for word in text.split() for name in _expand_word(word)]


def _expand_word(word: str) -> list[str]:
    # Innermost braces first, so that the alternatives hold none.
    match = re.search(r"\{([^{}]*)\}", word)
    if match is None:
        return [word]
    return [
        name
        for choice in match[1].split(",")
        for name in _expand_word(word[: match.start()] + choice + word[match.end() :])
    ]


def linear_names(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.parametrize("family", list(EXPECTED))
def test_layers_by_role_and_block_lists(family: str) -> None:
    model = meta_models.build(family)
    lists, expected = EXPECTED[family]
    assert list(blocks.find_block_lists(model)) == expand(lists)

    prefixes = tuple(f"{name}." for name in expand(lists))
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name in linear_names(model):
        found[roles.role_of(name, name.startswith(prefixes)).name].add(name)
    for role in roles.Role:
        assert sorted(found[role.name]) == sorted(set(expand(expected.get(role.name, "")))), role


@pytest.mark.core
def test_sdxl_has_no_block_list() -> None:
    """Its transformer blocks sit in input_blocks, middle_block and output_blocks of a UNet."""
    model = meta_models.build("sdxl")
    assert any(name.startswith("middle_block.1.transformer_blocks.9.") for name in linear_names(model))
    assert blocks.find_block_lists(model) == ()
    survey = inprocess.pack_module("kernels_glue.quantization.survey").survey
    with pytest.raises(ValueError, match="UNetModel has no repeated transformer block list"):
        survey(model)


class Block(torch.nn.Module):
    """A transformer block of a model that nobody has seen yet."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.inner = (
            torch.nn.LayerNorm(width),
            torch.nn.ModuleList([torch.nn.Linear(width, width)]),
        )


def model_of(**children: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


def test_an_unknown_list_counts_if_it_holds_most_of_the_model() -> None:
    many = torch.nn.ModuleList(Block() for _ in range(4))
    assert blocks.find_block_lists(model_of(stack=many, head=torch.nn.Linear(8, 8))) == ("stack",)
    assert blocks.find_block_lists(model_of(stack=many, head=torch.nn.Linear(80, 80))) == ()
    one = torch.nn.ModuleList([Block()])
    assert blocks.find_block_lists(model_of(stack=one)) == ()
    # Known names need neither.
    assert blocks.find_block_lists(model_of(blocks=one, head=torch.nn.Linear(80, 80))) == ("blocks",)


def test_lists_of_mixed_classes_of_bare_layers_and_of_plain_mlps_do_not_count() -> None:
    mixed = torch.nn.ModuleList([Block(), torch.nn.Linear(8, 8)])
    bare = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    mlps = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(3))
    for found in (mixed, bare, mlps):
        assert blocks.find_block_lists(model_of(blocks=found)) == ()
