"""The shipped video model: a small Wan that was taught moving shapes, and how to sample it.

Its weights come from tools/train_demo_model.py. ComfyUI must be importable (inprocess.start()) before a
function here is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from comfyui import inprocess

if TYPE_CHECKING:
    import torch
    from comfyui.tiny_model import TinyModel

WEIGHTS = Path(__file__).resolve().parent / "models" / "shapes_wan.safetensors"

# How it is sampled unless a caller says otherwise: 2,048 tokens, the size it has seen most.
STEPS = 8
CFG = 5.0
SIZE, FRAMES = 64, 8
SAMPLER, SCHEDULER = "euler", "simple"

# Coprime to the 12 captions, so that a few seeds in a row differ in shape and colour.
_STRIDE = 5


@dataclass(frozen=True)
class Case:
    """One sampling: a seed and what is asked for."""

    seed: int
    caption: str


def cases(count: int) -> tuple[Case, ...]:
    """The fixed samplings 0, 1, ...: twelve in a row go through all shapes and colours."""
    from comfyui.testnodes.shapes import COLOURS, SHAPES

    captions = [f"{colour} {shape}" for shape in SHAPES for colour in COLOURS]
    return tuple(Case(seed, captions[seed * _STRIDE % len(captions)]) for seed in range(count))


def model() -> TinyModel:
    """The shipped model. Raises as `require_weights` where its file is not, or is damaged."""
    import torch
    from comfyui.tiny_model import TinyModel

    require_weights()
    config = dict(
        model_type="t2v", dim=256, ffn_dim=1024, num_heads=2, num_layers=4, in_dim=16, out_dim=16,
        text_dim=4096, freq_dim=256, text_len=512, patch_size=(1, 2, 2),
    )  # fmt: skip
    return TinyModel(
        family="wan",
        path=WEIGHTS,
        config=MappingProxyType(config),
        dtype=torch.bfloat16,
        latent_node="EmptyHunyuanLatentVideo",
        latent_module="comfy_extras.nodes_hunyuan",
        latent_inputs=MappingProxyType(latent_inputs(SIZE, FRAMES)),
        latent_shapes=((1, 16, FRAMES, SIZE // 2, SIZE // 2),),
        context_shape=(2, config["text_dim"]),
    )


def require_weights() -> None:
    """Raises FileNotFoundError where the model is not, ValueError where it is damaged; one sentence each."""
    from safetensors import SafetensorError, safe_open

    name = WEIGHTS.relative_to(WEIGHTS.parents[2]).as_posix()
    if not WEIGHTS.is_file():
        raise FileNotFoundError(f"the shipped model is not there: get {name} from the repository")
    try:
        with safe_open(WEIGHTS, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"the shipped model is damaged ({error}): get {name} from the repository") from error


def latent_inputs(size: int, frames: int) -> dict[str, int]:
    """Inputs of EmptyHunyuanLatentVideo for videos of size x size pixels: its VAE would make them larger."""
    return {"width": 4 * size, "height": 4 * size, "length": 4 * frames - 3}


def applied(source: Any, group_size: str | None = None, sol: Mapping[str, Any] | None = None) -> Any:
    """`source` behind the pack's nodes.

    Args:
        group_size: of Kitchen INT8 Quantize Model; None leaves the node out.
        sol: inputs of Sol Attention Patch that differ from its defaults; None leaves the node out.
    """
    nodes = inprocess.pack_nodes()
    if group_size is not None:
        int8 = {"layers": "blocks", "ignored_layers": "", "lora": "keep", "device": "auto"}
        node = nodes["KitchenInt8QuantizeModel"]
        source = inprocess.run_node(node, model=source, group_size=group_size, **int8)[0]
    if sol is not None:
        source = inprocess.run_node(nodes["KitchenSolAttentionPatch"], model=source, **sol)[0]
    return source


class _NoiseOfEach:
    """Noise for core's custom sampling in which each video of a batch has a seed of its own."""

    seed = 0

    def __init__(self, seeds: Sequence[int]):
        self._seeds = seeds

    def generate_noise(self, latent: Mapping[str, Any]) -> torch.Tensor:
        import comfy.sample
        import torch

        one = latent["samples"][:1]
        return torch.cat([comfy.sample.prepare_noise(one, seed) for seed in self._seeds])


def sample(
    patcher: Any,
    wanted: Sequence[Case],
    *,
    steps: int = STEPS,
    cfg: float = CFG,
    size: int = SIZE,
    frames: int = FRAMES,
) -> torch.Tensor:
    """Samples videos as one batch, by core's own nodes (CFGGuider, SamplerCustomAdvanced).

    A video does not depend on the others in the batch, but for rounding. The negative caption is none.

    Returns:
        [B, frames, size, size, 3] in 0..1, fp32 on the CPU.
    """
    import torch
    from comfy_extras import nodes_custom_sampler as core
    from comfy_extras.nodes_hunyuan import EmptyHunyuanLatentVideo
    from comfyui.testnodes.shapes import embed, frames_of, parse_caption

    run = inprocess.run_node
    text = torch.stack([embed(parse_caption(case.caption)) for case in wanted])
    negative = embed(()).expand_as(text)
    empty = run(EmptyHunyuanLatentVideo, batch_size=len(wanted), **latent_inputs(size, frames))[0]
    result = run(
        core.SamplerCustomAdvanced,
        noise=_NoiseOfEach([case.seed for case in wanted]),
        guider=run(core.CFGGuider, model=patcher, positive=[[text, {}]], negative=[[negative, {}]], cfg=cfg)[
            0
        ],
        sampler=run(core.KSamplerSelect, sampler_name=SAMPLER)[0],
        sigmas=run(core.BasicScheduler, model=patcher, scheduler=SCHEDULER, steps=steps, denoise=1.0)[0],
        latent_image=empty,
    )
    return frames_of(result[0]["samples"].cpu())
