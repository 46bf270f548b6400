"""Diffusion transformers of real size with random weights, and how ComfyUI samples them.

ComfyUI must be importable (inprocess.start()) before a function here is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from comfyui.builders import TinyModel


@dataclass(frozen=True)
class BenchModel:
    """A model without its weights.

    Attributes:
        family: name of the family, as the test harness knows it.
        title: what tables call it.
        model_class: module and name of ComfyUI's class.
        config: constructor arguments of that class.
        latent_node: module and name of the node that makes its empty latent.
        lengths: inputs of that node (pixels and frames) by a label that says about how many tokens they give.
        context: (tokens, width) of the text conditioning.
        text_in_sequence: whether the text stands in the same sequence as the latent.
    """

    family: str
    title: str
    model_class: tuple[str, str]
    config: Mapping[str, Any]
    latent_node: tuple[str, str]
    lengths: Mapping[str, Mapping[str, int]]
    context: tuple[int, int]
    text_in_sequence: bool

    def with_blocks(self, blocks: int) -> BenchModel:
        """The same model with another number of blocks."""
        return replace(self, config={**self.config, "num_layers": blocks})

    def tokens(self, shapes: Sequence[Sequence[int]]) -> int:
        """Tokens of self-attention. shapes: of the latents, [B, C, T, H, W] and for audio [B, C, 2, T]."""
        frames, height, width = shapes[0][2:]
        video = frames * ((height + 1) // 2) * ((width + 1) // 2)
        audio = sum(shape[-1] * shape[-2] for shape in shapes[1:])
        return video + audio + (self.context[0] if self.text_in_sequence else 0)

    def sampling(self, length: str) -> TinyModel:
        """What inprocess.sample wants to know about the model."""
        from comfyui.builders import TinyModel

        return TinyModel(
            family=self.family,
            path=Path(),
            config=MappingProxyType(dict(self.config)),
            dtype=None,
            latent_node=self.latent_node[1],
            latent_module=self.latent_node[0],
            latent_inputs=MappingProxyType(dict(self.lengths[length])),
            latent_shapes=(),
            context_shape=self.context,
        )


_TEXT_TOKENS = 256
# MiniMax-H3 with its small modulation table (the curve form that its checkpoints have).
H3 = BenchModel(
    family="h3",
    title="MiniMax-H3",
    model_class=("comfy.ldm.minimax.model", "MiniMaxH3Model"),
    config=dict(
        hidden_size=5376, num_layers=50, token_refiner_num_layers=2, num_attention_heads=56,
        attention_head_dim=128, ffn_hidden_size=14336, text_dim=5120, time_embed_dim=8,
        adaln_curve_grid=1024, rope_inv_freq_len=16,
    ),
    latent_node=("comfy_extras.nodes_minimax_h3", "EmptyMiniMaxH3LatentAV"),
    lengths={
        "7k": {"width": 1344, "height": 768, "length": 22},
        "2k": {"width": 1344, "height": 672, "length": 5},
        "33k": {"width": 1344, "height": 768, "length": 107},
    },
    context=(_TEXT_TOKENS, 5120),
    text_in_sequence=True,
)  # fmt: skip

# Wan 2.1 and 2.2 text-to-video, 14B.
WAN = BenchModel(
    family="wan",
    title="Wan 14B",
    model_class=("comfy.ldm.wan.model", "WanModel"),
    config=dict(
        model_type="t2v", dim=5120, ffn_dim=13824, num_heads=40, num_layers=40, in_dim=16, out_dim=16,
        text_dim=4096, freq_dim=256, text_len=512, patch_size=(1, 2, 2),
    ),
    latent_node=("comfy_extras.nodes_hunyuan", "EmptyHunyuanLatentVideo"),
    lengths={
        "7k": {"width": 832, "height": 448, "length": 17},
        "2k": {"width": 512, "height": 512, "length": 5},
        "33k": {"width": 832, "height": 480, "length": 81},
    },
    context=(512, 4096),
    text_in_sequence=False,
)  # fmt: skip

MODELS = {"h3": H3, "wan": WAN}


def shrunk(model: BenchModel) -> BenchModel:
    """A tiny model of the same family, to try a benchmark out on a CPU."""
    if model.family == "h3":
        sizes = dict(
            hidden_size=256,
            num_attention_heads=2,
            ffn_hidden_size=256,
            text_dim=64,
            token_refiner_num_layers=1,
        )
        lengths = {name: {"width": 64, "height": 64, "length": 5} for name in model.lengths}
        config = {**model.config, "num_layers": 4, **sizes}
        return replace(model, config=config, lengths=lengths, context=(16, 64))
    lengths = {name: {"width": 64, "height": 64, "length": 5} for name in model.lengths}
    config = {**model.config, "dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 4}
    return replace(model, config=config, lengths=lengths, context=(16, 4096))


def random_weights(model: BenchModel, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Random bf16 weights in pageable, touched host memory; drawn on the GPU because that is faster."""
    import torch
    from comfyui.builders import state_dict_template

    module, name = model.model_class
    template = state_dict_template(
        getattr(importlib.import_module(module), name), dict(model.config), torch.bfloat16
    )
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for key, tensor in template.items():
        values = torch.randn(tensor.shape, generator=generator, device=device, dtype=torch.float32)
        values = 1 + 0.05 * values if tensor.ndim == 1 and key.endswith("weight") else 0.02 * values
        weights[key] = values.to(tensor.dtype).cpu()
    if "rope.inv_freq" in weights:
        # Random frequencies would make positions meaningless; this is the usual rope ladder.
        count = weights["rope.inv_freq"].numel()
        weights["rope.inv_freq"] = 10000.0 ** (-torch.arange(count, dtype=torch.float32) / count)
    if device == "cuda":
        torch.cuda.empty_cache()
    return weights


def load(weights: dict[str, torch.Tensor]) -> Any:
    """The patcher that ComfyUI's loader makes of bf16 weights; empties the dict."""
    import comfy.sd
    import torch

    # Left to itself core turns a bf16 Wan into fp16, which is another model.
    patcher = comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": torch.bfloat16})
    if patcher is None:
        raise RuntimeError("ComfyUI does not recognise the random model")
    return patcher
