"""ComfyUI's real diffusion model classes at full width on torch's meta device: no weight is allocated.

Depths are cut to two blocks a list; widths and switches are those of public checkpoints.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

_FLUX = dict(
    in_channels=16, out_channels=16, patch_size=2, context_in_dim=4096, hidden_size=3072, mlp_ratio=4.0,
    num_heads=24, depth=2, depth_single_blocks=2, axes_dim=[16, 56, 56], theta=10000, qkv_bias=True,
    vec_in_dim=768,
)  # fmt: skip

# family -> module below comfy.ldm, class, constructor arguments
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "wan": ("wan.model", "WanModel", dict(model_type="i2v", num_layers=2)),
    "vace": (
        "wan.model",
        "VaceWanModel",
        dict(model_type="vace", num_layers=2, vace_layers=2, vace_in_dim=96),
    ),
    "minimax_h3": ("minimax.model", "MiniMaxH3Model", dict(num_layers=2)),
    "flux": ("flux.model", "Flux", dict(**_FLUX, guidance_embed=True, txt_ids_dims=[])),
    "chroma": (
        "chroma.model",
        "Chroma",
        dict(**_FLUX, txt_ids_dims=[], in_dim=64, out_dim=3072, hidden_dim=5120, n_layers=5),
    ),
    "hunyuan_video": (
        "hunyuan_video.model",
        "HunyuanVideo",
        dict(
            {**_FLUX, "patch_size": [1, 2, 2]},
            guidance_embed=True,
            byt5=True,
            meanflow=True,
            use_cond_type_embedding=True,
            vision_in_dim=1152,
            meanflow_sum=False,
        ),
    ),
    "mochi": (
        "genmo.joint_model.asymm_models_joint",
        "AsymmDiTJoint",
        dict(
            depth=2,
            num_heads=24,
            hidden_size_x=3072,
            hidden_size_y=1536,
            mlp_ratio_x=4.0,
            mlp_ratio_y=4.0,
            t5_feat_dim=4096,
            t5_token_length=256,
            attend_to_padding=False,
            qkv_bias=False,
            out_bias=True,
            patch_size=2,
            in_channels=12,
            qk_norm=True,
            patch_embed_bias=True,
        ),
    ),
    "pixart": ("pixart.pixartms", "PixArtMS", dict(depth=2, num_heads=16, input_size=None)),
    "krea2": ("krea2.model", "SingleStreamDiT", dict(layers=2)),
    "qwen_image": ("qwen_image.model", "QwenImageTransformer2DModel", dict(num_layers=2)),
    "lumina": (
        "lumina.model",
        "NextDiT",
        dict(
            n_layers=2,
            dim=2304,
            n_heads=24,
            n_kv_heads=8,
            axes_dims=[32, 32, 32],
            axes_lens=[300, 512, 512],
            cap_feat_dim=2304,
            qk_norm=True,
        ),
    ),
    "ltx": ("lightricks.model", "LTXVModel", dict(num_layers=2)),
    "ltx_av": ("lightricks.av_model", "LTXAVModel", dict(num_layers=2)),
    "sd3": (
        "modules.diffusionmodules.mmdit",
        "MMDiT",
        dict(
            depth=2,
            adm_in_channels=2048,
            context_embedder_config={
                "target": "torch.nn.Linear",
                "params": {"in_features": 4096, "out_features": 1536},
            },
        ),
    ),
    "hidream": (
        "hidream.model",
        "HiDreamImageTransformer2DModel",
        dict(
            patch_size=2,
            in_channels=64,
            out_channels=64,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=128,
            num_attention_heads=20,
            caption_channels=[4096, 4096],
            text_emb_dim=2048,
            num_routed_experts=4,
            num_activated_experts=2,
            axes_dims_rope=[64, 32, 32],
            max_resolution=[128, 128],
            llama_layers=[0, 1, 2, 3],
        ),
    ),
    "kandinsky5": (
        "kandinsky5.model",
        "Kandinsky5",
        dict(num_visual_blocks=2, num_text_blocks=2, visual_embed_dim=132),
    ),
    "cosmos_predict2": (
        "cosmos.predict2",
        "MiniTrainDIT",
        dict(
            max_img_h=240,
            max_img_w=240,
            max_frames=128,
            in_channels=16,
            out_channels=16,
            patch_spatial=2,
            patch_temporal=1,
            model_channels=2048,
            num_blocks=2,
            num_heads=16,
            concat_padding_mask=True,
            crossattn_emb_channels=1024,
            pos_emb_cls="rope3d",
            use_adaln_lora=True,
            adaln_lora_dim=256,
        ),
    ),
    "aura": ("aura.mmdit", "MMDiT", dict(n_layers=6, n_double_layers=4)),
    "omnigen2": ("omnigen.omnigen2", "OmniGen2Transformer2DModel", dict(num_layers=2)),
    "boogu": (
        "boogu.model",
        "BooguTransformer2DModel",
        dict(num_layers=2, num_double_stream_layers=2),
    ),
    "ace": ("ace.model", "ACEStepTransformer2DModel", dict(num_layers=2)),
    # The real SDXL: unlike the tiny one of builders.py it has transformer blocks in its middle block.
    "sdxl": (
        "modules.diffusionmodules.openaimodel",
        "UNetModel",
        dict(
            image_size=32,
            in_channels=4,
            out_channels=4,
            model_channels=320,
            num_res_blocks=[2, 2, 2],
            channel_mult=[1, 2, 4],
            transformer_depth=[0, 0, 2, 2, 10, 10],
            transformer_depth_middle=10,
            transformer_depth_output=[0, 0, 0, 2, 2, 2, 10, 10, 10],
            context_dim=2048,
            adm_in_channels=2816,
            num_classes="sequential",
            num_head_channels=64,
            use_spatial_transformer=True,
            use_linear_in_transformer=True,
            legacy=False,
        ),
    ),
}
# Their constructors call `.item()` on a tensor made without a device; the others make parameters so.
_EXPLICIT_DEVICE_ONLY = ("pixart", "mochi")


def build(family: str) -> torch.nn.Module:
    """The family's model on the meta device; skips the test where this ComfyUI does not have it."""
    import comfy.ops

    module_name, class_name, arguments = CLASSES[family]
    try:
        module = importlib.import_module(f"comfy.ldm.{module_name}")
    except ModuleNotFoundError as error:
        if not error.name.startswith("comfy.ldm."):
            raise
        pytest.skip(f"this ComfyUI has no {family} model")
    meta = dict(dtype=torch.bfloat16, device="meta", operations=comfy.ops.disable_weight_init)
    model_class = getattr(module, class_name)
    arguments = copy.deepcopy(arguments)  # some constructors empty the lists they are given
    if family in _EXPLICIT_DEVICE_ONLY:
        return model_class(**arguments, **meta)
    with torch.device("meta"):
        return model_class(**arguments, **meta)
