"""Writes tiny random diffusion models that ComfyUI's own loaders detect and accept.

ComfyUI must be importable (inprocess.start()) before a function here is called.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .lora import layer_shapes, write_lora
from .more_families import MORE_FAMILIES
from .tiny_model import TinyModel, state_dict_template, write_model

__all__ = [
    "FAMILIES",
    "TinyModel",
    "layer_shapes",
    "state_dict_template",
    "supported_families",
    "write_flux",
    "write_h3",
    "write_lora",
    "write_sdxl",
    "write_vace",
    "write_wan",
]


def _wan_config(overrides: dict[str, Any]) -> dict[str, Any]:
    config = dict(
        dim=256, ffn_dim=512, num_layers=2, in_dim=16, out_dim=16, text_dim=4096, freq_dim=256,
        text_len=512, patch_size=(1, 2, 2),
    )  # fmt: skip
    config.update(overrides)
    # Detection derives the number of heads from dim, so any other value would not survive loading.
    config.setdefault("num_heads", config["dim"] // 128)
    return config


def _wan_sampling(config: dict[str, Any]) -> dict[str, Any]:
    return dict(
        latent_node="EmptyHunyuanLatentVideo",
        latent_module="comfy_extras.nodes_hunyuan",
        latent_inputs=MappingProxyType({"width": 64, "height": 64, "length": 5}),
        latent_shapes=((1, 16, 2, 8, 8),),
        context_shape=(16, config["text_dim"]),
    )


def write_wan(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """Wan 2.1 text-to-video: 2 `blocks`, 2 heads of 128, about 6.5 MB in bf16.

    dtype: of all weights except those that Wan keeps in fp32; with an fp8 dtype only the
    matrices change and the rest is bf16. overrides: arguments of comfy's WanModel.
    """
    from comfy.ldm.wan.model import WanModel

    config = {"model_type": "t2v", **_wan_config(overrides)}
    return write_model(
        "wan", folder, WanModel, config, dtype=dtype, seed=seed, name=name, **_wan_sampling(config)
    )


def write_vace(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """Wan 2.1 VACE: like write_wan, plus 1 block in `vace_blocks`."""
    from comfy.ldm.wan.model import VaceWanModel

    config = _wan_config({"vace_layers": 1, "vace_in_dim": 96, **overrides})
    return write_model(
        "vace", folder, VaceWanModel, config, dtype=dtype, seed=seed, name=name, **_wan_sampling(config)
    )


def write_h3(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """MiniMax-H3 audio-video: 2 `blocks`, 1 block in `token_refiner`, 2 heads of 128, 3.7 MB.

    The patch projections, the time embedder, the output heads and inv_freq stay in fp32.
    Raises ImportError where ComfyUI does not have the model (before 0.30).
    """
    from comfy.ldm.minimax.model import MiniMaxH3Model

    config = dict(
        hidden_size=256, num_layers=2, token_refiner_num_layers=1, num_attention_heads=2,
        attention_head_dim=128, ffn_hidden_size=256, text_dim=64, timestep_input_dim=32,
        time_embed_hidden_size=64, time_embed_dim=32, rope_inv_freq_len=16,
    )  # fmt: skip
    config.update(overrides)

    def real_frequencies(weights: dict[str, torch.Tensor]) -> None:
        # Random frequencies would make positions meaningless; this is the usual rope ladder.
        count = config["rope_inv_freq_len"]
        weights["rope.inv_freq"] = 10000.0 ** (-torch.arange(count, dtype=torch.float32) / count)

    return write_model(
        "h3",
        folder,
        MiniMaxH3Model,
        config,
        dtype=dtype,
        seed=seed,
        name=name,
        adjust=real_frequencies,
        latent_node="EmptyMiniMaxH3LatentAV",
        latent_module="comfy_extras.nodes_minimax_h3",
        latent_inputs=MappingProxyType({"width": 128, "height": 128, "length": 5}),
        latent_shapes=((1, 24, 2, 8, 8), (1, 32, 2, 8)),
        context_shape=(16, config["text_dim"]),
    )


def write_flux(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """Flux Schnell: 2 `double_blocks`, 2 `single_blocks`, 2 heads of 128, about 14 MB in bf16."""
    from comfy.ldm.flux.model import Flux

    config = dict(
        in_channels=16, out_channels=16, patch_size=2, vec_in_dim=128, context_in_dim=128,
        hidden_size=256, mlp_ratio=4.0, num_heads=2, depth=2, depth_single_blocks=2,
        axes_dim=[16, 56, 56], theta=10000, qkv_bias=True, guidance_embed=False, txt_ids_dims=[],
    )  # fmt: skip
    config.update(overrides)
    return write_model(
        "flux",
        folder,
        Flux,
        config,
        dtype=dtype,
        seed=seed,
        name=name,
        latent_node="EmptySD3LatentImage",
        latent_module="comfy_extras.nodes_sd3",
        latent_inputs=MappingProxyType({"width": 64, "height": 64}),
        latent_shapes=((1, 16, 8, 8),),
        context_shape=(16, config["context_in_dim"]),
        pooled_width=config["vec_in_dim"],
    )


def write_sdxl(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """An SDXL-type UNet without DiT blocks, about 126 MB in bf16.

    Detection demands 320 base channels and one of a few depth patterns; this is KOALA-700M's
    (a distilled SDXL), with every level at the base width and no attention after the bottleneck.
    Its samples have a standard deviation near 100: the noise starts at sigma 14.6, a random model
    predicts none of it, and SDXL latents are divided by 0.13 at the end.
    """
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    config = dict(
        image_size=32, in_channels=4, out_channels=4, model_channels=320, num_res_blocks=[1, 1, 1],
        channel_mult=[1, 1, 1], transformer_depth=[0, 2, 5], transformer_depth_middle=-1,
        transformer_depth_output=[0, 0, 0, 0, 0, 0], context_dim=2048, adm_in_channels=2816,
        num_classes="sequential", num_head_channels=64, use_spatial_transformer=True,
        use_linear_in_transformer=True, legacy=False,
    )  # fmt: skip
    config.update(overrides)
    return write_model(
        "sdxl",
        folder,
        UNetModel,
        config,
        dtype=dtype,
        seed=seed,
        name=name,
        latent_node="EmptyLatentImage",
        latent_module="nodes",
        latent_inputs=MappingProxyType({"width": 64, "height": 64}),
        latent_shapes=((1, 4, 8, 8),),
        context_shape=(16, config["context_dim"]),
        pooled_width=1280,
    )


FAMILIES: dict[str, Callable[..., TinyModel]] = {
    "wan": write_wan,
    "vace": write_vace,
    "h3": write_h3,
    "flux": write_flux,
    "sdxl": write_sdxl,
    **MORE_FAMILIES,
}


def supported_families() -> tuple[str, ...]:
    """The families that the imported ComfyUI can build, in the order of FAMILIES."""
    absent = {"h3"} if importlib.util.find_spec("comfy.ldm.minimax") is None else set()
    return tuple(family for family in FAMILIES if family not in absent)
