"""Tiny random models of the families whose text and image share a sequence, and of LTX.

HunyuanVideo and LTX are detected as they are. For Chroma, Qwen-Image, Lumina 2 and Z-Image core's detection
has the widths of the public checkpoints as constants (from 2304 to 5120 channels; the smallest file would
have gigabytes), so their files carry a narrow configuration in their metadata, which detection is told to
take. Everything else about loading them is core's own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .tiny_model import TinyModel, write_model

_METADATA_KEY = "kitchen_sol_test_config"

_IMAGE: Mapping[str, Any] = dict(
    latent_node="EmptySD3LatentImage",
    latent_module="comfy_extras.nodes_sd3",
    latent_inputs=MappingProxyType({"width": 64, "height": 64}),
    latent_shapes=((1, 16, 8, 8),),
)


def _let_detection_read_widths() -> None:
    """Makes core's detection take the configuration that a narrow file has in its metadata."""
    import comfy.model_detection as detection

    core = detection.detect_unet_config
    if getattr(core, "reads_widths", False):
        return

    @functools.wraps(core)
    def detect(state_dict: Any, key_prefix: str, metadata: Any = None) -> dict[str, Any] | None:
        config = core(state_dict, key_prefix, metadata=metadata)
        if config is not None and metadata is not None and _METADATA_KEY in metadata:
            config.update(json.loads(metadata[_METADATA_KEY]))
        return config

    detect.reads_widths = True
    detection.detect_unet_config = detect


def _write_narrow(
    family: str, folder: Path, model_class: type[torch.nn.Module], config: dict[str, Any], **arguments: Any
) -> TinyModel:
    _let_detection_read_widths()
    metadata = {_METADATA_KEY: json.dumps(config)}
    return write_model(family, folder, model_class, config, metadata=metadata, **arguments)


def write_chroma(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """Chroma: 2 `double_blocks`, 2 `single_blocks`, 1 head of 128, 2.5 MB in bf16."""
    from comfy.ldm.chroma.model import Chroma

    config = dict(
        in_channels=64, out_channels=64, patch_size=2, in_dim=64, out_dim=128, hidden_dim=64, n_layers=2,
        context_in_dim=128, hidden_size=128, mlp_ratio=4.0, num_heads=1, depth=2, depth_single_blocks=2,
        axes_dim=[16, 56, 56], theta=10000, qkv_bias=True, txt_ids_dims=[], vec_in_dim=None,
    )  # fmt: skip
    config.update(overrides)
    return _write_narrow(
        "chroma",
        folder,
        Chroma,
        config,
        dtype=dtype,
        seed=seed,
        name=name,
        context_shape=(16, config["context_in_dim"]),
        **_IMAGE,
    )


def write_qwen_image(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """Qwen-Image: 2 `transformer_blocks`, 1 head of 128, 2.6 MB in bf16."""
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    config = dict(
        patch_size=2, in_channels=64, out_channels=16, num_layers=2, attention_head_dim=128,
        num_attention_heads=1, joint_attention_dim=128,
    )  # fmt: skip
    config.update(overrides)
    return _write_narrow(
        "qwen_image",
        folder,
        QwenImageTransformer2DModel,
        config,
        dtype=dtype,
        seed=seed,
        name=name,
        context_shape=(16, config["joint_attention_dim"]),
        **_IMAGE,
    )


def _write_next_dit(
    family: str,
    folder: Path,
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    seed: int,
    name: str | None,
) -> TinyModel:
    from comfy.ldm.lumina.model import NextDiT

    config = dict(patch_size=2, in_channels=16, n_layers=2, n_refiner_layers=1, cap_feat_dim=128) | config
    return _write_narrow(
        family,
        folder,
        NextDiT,
        config,
        dtype=dtype,
        seed=seed,
        name=name,
        context_shape=(16, config["cap_feat_dim"]),
        **_IMAGE,
    )


def write_lumina2(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """Lumina 2: 2 `layers`, 1 block in each refiner, 2 heads of 96 over 1 of keys, 3.3 MB in bf16."""
    config = dict(
        dim=192, n_heads=2, n_kv_heads=1, axes_dims=[32, 32, 32], axes_lens=[300, 512, 512],
        rope_theta=10000.0, ffn_dim_multiplier=1.0, qk_norm=True,
    )  # fmt: skip
    return _write_next_dit("lumina2", folder, config | overrides, dtype=dtype, seed=seed, name=name)


def write_z_image(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """Z-Image: 2 `layers`, 1 block in each refiner, 2 heads of 128, parts padded to 32 tokens, 6 MB.

    With `siglip_feat_dim` it takes image references (Z-Image Omni).
    """
    config = dict(
        dim=256, n_heads=2, n_kv_heads=2, axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512],
        rope_theta=256.0, ffn_dim_multiplier=1.0, qk_norm=True, z_image_modulation=True, time_scale=1000.0,
        pad_tokens_multiple=32,
    )  # fmt: skip
    return _write_next_dit("z_image", folder, config | overrides, dtype=dtype, seed=seed, name=name)


def write_hunyuan_video(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """HunyuanVideo: 2 `double_blocks`, 2 `single_blocks`, 2 blocks in its token refiner, 1 head of 128, 5 MB.

    overrides: `byt5` adds 15 MB of glyph embedder, whose widths core fixes; `vision_in_dim` adds the
        vision embedder of 1.5.
    """
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    config = dict(
        in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=128, hidden_size=128, mlp_ratio=4.0,
        num_heads=1, depth=2, depth_single_blocks=2, axes_dim=[16, 56, 56], theta=256, patch_size=[1, 2, 2],
        qkv_bias=True, guidance_embed=True, byt5=False, meanflow=False, use_cond_type_embedding=False,
        vision_in_dim=None, meanflow_sum=False,
    )  # fmt: skip
    config.update(overrides)
    return write_model(
        "hunyuan_video",
        folder,
        HunyuanVideo,
        config,
        dtype=dtype,
        seed=seed,
        name=name,
        latent_node="EmptyHunyuanLatentVideo",
        latent_module="comfy_extras.nodes_hunyuan",
        latent_inputs=MappingProxyType({"width": 64, "height": 64, "length": 5}),
        latent_shapes=((1, 16, 2, 8, 8),),
        context_shape=(16, config["context_in_dim"]),
        pooled_width=768,
    )


def write_ltx(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> TinyModel:
    """LTX video: 2 `transformer_blocks`, 2 heads of 64, 1.5 MB in bf16.

    Its widths are in the file's metadata, where core looks for them.
    """
    from comfy.ldm.lightricks.model import LTXVModel

    config = dict(
        in_channels=128, cross_attention_dim=128, attention_head_dim=64, num_attention_heads=2,
        caption_channels=128, num_layers=2,
    )  # fmt: skip
    config.update(overrides)
    return write_model(
        "ltx",
        folder,
        LTXVModel,
        config,
        dtype=dtype,
        seed=seed,
        name=name,
        metadata={"config": json.dumps({"transformer": config})},
        latent_node="EmptyLTXVLatentVideo",
        latent_module="comfy_extras.nodes_lt",
        latent_inputs=MappingProxyType({"width": 160, "height": 96, "length": 9}),
        latent_shapes=((1, 128, 2, 3, 5),),
        context_shape=(16, config["caption_channels"]),
        attention_mask=True,
    )


MORE_FAMILIES: dict[str, Callable[..., TinyModel]] = {
    "chroma": write_chroma,
    "qwen_image": write_qwen_image,
    "hunyuan_video": write_hunyuan_video,
    "lumina2": write_lumina2,
    "z_image": write_z_image,
    "ltx": write_ltx,
}
