"""What a tiny model is, and how one is written: random weights for the shapes of a model class."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .weights import fill


@dataclass(frozen=True)
class TinyModel:
    """A model file and what it takes to sample it.

    path: the safetensors file.
    config: constructor arguments of the diffusion model.
    dtype: dtype of the block matrices in the file.
    latent_node: class name of the node that makes its empty latent, and `latent_inputs` for it
        (pixels and frames); `latent_module` is where ComfyUI defines that node.
    latent_shapes: shapes of the latents these inputs give: one [B,C,H,W] or [B,C,T,H,W], and
        for audio-video models a second one [B,C,2,T].
    context_shape: (tokens, width) of the text conditioning.
    pooled_width: width of `pooled_output`, 0 where the model takes none.
    attention_mask: the conditioning must have an `attention_mask`.
    """

    family: str
    path: Path
    config: Mapping[str, Any]
    dtype: torch.dtype
    latent_node: str
    latent_module: str
    latent_inputs: Mapping[str, int]
    latent_shapes: tuple[tuple[int, ...], ...]
    context_shape: tuple[int, int]
    pooled_width: int = 0
    attention_mask: bool = False


def state_dict_template(
    model_class: Callable[..., torch.nn.Module], config: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Meta tensors with the names, shapes and dtypes of a model's state dict, which costs no memory.

    The model class decides which layers stay in fp32.
    """
    import comfy.memory_management
    import comfy.ops

    # With dynamic VRAM core's layers have no weights until a state dict is loaded.
    dynamic, comfy.memory_management.aimdo_enabled = comfy.memory_management.aimdo_enabled, False
    try:
        module = model_class(
            **copy.deepcopy(dict(config)),  # some constructors empty the lists they are given
            dtype=dtype,
            device="meta",
            operations=comfy.ops.disable_weight_init,
        )
        return module.state_dict()
    finally:
        comfy.memory_management.aimdo_enabled = dynamic


def write_model(
    family: str,
    folder: Path,
    model_class: Callable[..., torch.nn.Module],
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    seed: int,
    name: str | None,
    adjust: Callable[[dict[str, torch.Tensor]], None] | None = None,
    metadata: Mapping[str, str] | None = None,
    **sampling: Any,
) -> TinyModel:
    """Writes a model of random weights as <folder>/<name>, by default <family>.safetensors.

    adjust: changes the weights before they are written.
    metadata: of the file.
    sampling: the fields of TinyModel that say how to sample it.
    """
    from safetensors.torch import save_file

    is_fp8 = dtype.itemsize == 1
    template = state_dict_template(model_class, config, torch.bfloat16 if is_fp8 else dtype)
    weights = fill(template, seed, matrix_dtype=dtype if is_fp8 else None)
    if adjust is not None:
        adjust(weights)
    path = Path(folder) / (name or f"{family}.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(path), metadata=dict(metadata) if metadata else None)
    return TinyModel(family=family, path=path, config=MappingProxyType(dict(config)), dtype=dtype, **sampling)
