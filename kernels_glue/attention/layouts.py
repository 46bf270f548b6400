"""Where the conditioning tokens lie in the joint sequence of each model family.

Every family of the table packs its sequence as [conditioning | image], so one rule holds for all: what is
not image is conditioning. Only shapes are read, of what core gives to APPLY_MODEL wrappers
(`comfy/model_base.py`, BaseModel.apply_model), so nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..blocks import uncompiled


@dataclass(frozen=True)
class ModelInputs:
    """What a model is called with, before core prepares it.

    Attributes:
        diffusion_model: the DiT.
        x: latent [B, C, (T,) H, W]; for MiniMax-H3 video and audio packed into [B, 1, N].
        context: text states [B, L, C] (core's `c_crossattn`), or None.
        conds: core's other keywords, such as `ref_latents` and `latent_shapes`.
    """

    diffusion_model: Any
    x: Any
    context: Any
    conds: Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """Joint sequence of a family.

    Attributes:
        family: name to show.
        image_rows: number of rows behind the conditioning.
        queries: under `sinks = auto`, the conditioning's own rows attend exactly as well.
    """

    family: str
    image_rows: Callable[[ModelInputs], int]
    queries: bool = False

    def text_rows(self, tokens: int, inputs: ModelInputs) -> tuple[int, int]:
        """Rows [start, stop) of conditioning in a main block's sequence of `tokens` rows.

        It never ends before the text that the model was given: a patch that adds text (USO) or leaves out
        reference rows (FluxKVCache) widens the range at most.
        """
        text = 0 if inputs.context is None else inputs.context.shape[1]
        return 0, min(max(text, tokens - self.image_rows(inputs)), tokens)


def layout_for(diffusion_model: Any) -> Layout | None:
    """The layout of a model, by the names of its class and their bases.

    None for a model that keeps its text out of the sequence (Wan), or that the table does not know.
    """
    for base in type(uncompiled(diffusion_model)).__mro__:
        if base.__name__ in LAYOUTS:
            return LAYOUTS[base.__name__]
    return None


def _patches(shape: Sequence[int], patch_size: Sequence[int]) -> int:
    """Number of patches of a latent, whose last axes core pads up to whole patches."""
    return math.prod(
        -(-size // patch) for size, patch in zip(shape[-len(patch_size) :], patch_size, strict=True)
    )


def _minimax_h3(inputs: ModelInputs) -> int:
    # [text | first and last frames, references | audio | video]; everything but the video being sampled
    # conditions it, the audio too: speech falls apart where it is approximated.
    video = inputs.conds["latent_shapes"][0]
    return _patches(video, inputs.diffusion_model.patch_size)


def _flux(inputs: ModelInputs) -> int:
    # [text | image | reference images]; Chroma is given references too and ignores them, which the text's own
    # length makes up for.
    side = inputs.diffusion_model.patch_size
    return sum(_patches(x.shape, (side, side)) for x in (inputs.x, *_references(inputs)))


def _qwen_image(inputs: ModelInputs) -> int:
    # [text | image | reference images]; layers and frames are an axis of the latent.
    side = inputs.diffusion_model.patch_size
    return sum(_patches(x.shape, (1, side, side)) for x in (inputs.x, *_references(inputs)))


def _hunyuan_video(inputs: ModelInputs) -> int:
    # [vision | glyphs (ByT5) | text | reference latent | video], glyphs behind the text before 1.5. It also
    # makes images, with a patch size of two axes.
    patch_size = inputs.diffusion_model.patch_size
    reference = inputs.conds.get("ref_latent")
    latents = (inputs.x,) if reference is None else (inputs.x, reference)
    return sum(_patches(x.shape, patch_size) for x in latents)


def _next_dit(inputs: ModelInputs) -> int:
    # [captions | SigLIP features | reference images | image]; Z-Image pads each part to whole multiples.
    model = inputs.diffusion_model
    multiple = model.pad_tokens_multiple or 1
    patches = (
        _patches(x.shape, (model.patch_size, model.patch_size)) for x in (inputs.x, *_references(inputs))
    )
    return sum(-(-count // multiple) * multiple for count in patches)


def _references(inputs: ModelInputs) -> Sequence[Any]:
    return inputs.conds.get("ref_latents") or ()


# By class name in comfy/ldm/*; subclasses (Chroma Radiance, Wan VACE) go by their base.
LAYOUTS: Mapping[str, Layout | None] = {
    "MiniMaxH3Model": Layout("MiniMax-H3", _minimax_h3, queries=True),
    "Flux": Layout("Flux", _flux),
    "Chroma": Layout("Chroma", _flux),
    "QwenImageTransformer2DModel": Layout("Qwen-Image", _qwen_image),
    "HunyuanVideo": Layout("HunyuanVideo", _hunyuan_video),
    "NextDiT": Layout("Lumina 2 / Z-Image", _next_dit),
    "WanModel": None,
}
