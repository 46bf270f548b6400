"""What a linear layer is for, read from its name."""

from __future__ import annotations

import re
from enum import Enum


class Role(Enum):
    """The part a linear layer plays in a DiT; the value is the reason given when it is kept."""

    BLOCK = "block weight"
    NORM = "part of a norm layer"
    MODULATION = "modulation (AdaLN) layer"
    EMBEDDER = "time, label or guidance embedder"
    OUTSIDE = "input or output projection, outside of the blocks"


# Each pattern is searched in the whole dotted name; a "part" is what stands between two dots. Seen in:
_EMBEDDER = re.compile(
    r"""(^|\.)(
        t(ime)?(step)?_?(embed\w*|in|embedder)   # t_embedder, time_embedding(s), time_embedder, time_in
      | time_r_in | tmlp                         # HunyuanVideo 1.5 (mean flow), Krea2
      | timestep\w*                              # timestep_embedder
      | [yp]_embedder | label\w* | pooled\w*     # SD3, HiDream, Kandinsky5
      | (csize|ar)_embedder                      # PixArt: size and aspect ratio of the image
      | vector_in | guidance_in                  # Flux, HunyuanVideo
    )(\.|$)""",
    re.VERBOSE | re.IGNORECASE,
)
_MODULATION = re.compile(
    r"""(^|\.)(
        \w*ada_?ln\w*                            # adaLN_modulation, adaln_proj, adaln_single
      | \w*modulation\w*                         # Flux single blocks, Kandinsky5, Cosmos
      | (\w+_)?mod([A-Z_]\w*)?                   # img_mod, txt_mod, mod_x (Mochi), modC (AuraFlow)
      | \w*scale_shift\w*
      | time_projection | t_block | tproj        # Wan, PixArt/ACE, Krea2: one projection for all blocks
      | distilled_guidance_layer                 # Chroma: computes every block's modulation
    )(\.|$)""",
    re.VERBOSE,
)
_NORM = re.compile(r"(^|\.)(\w+_)?norm\w*(\.|$)", re.IGNORECASE)


def role_of(name: str, in_block: bool) -> Role:
    """Classifies a linear layer.

    Args:
        name: dotted name below the diffusion model, e.g. `blocks.0.attn.qkv_proj`.
        in_block: whether it lies inside a repeated block list.
    """
    if _MODULATION.search(name):
        # LTX: adaln_single.emb.timestep_embedder.* is the embedder in front of the modulation.
        return Role.EMBEDDER if _EMBEDDER.search(name) else Role.MODULATION
    if _EMBEDDER.search(name):
        return Role.EMBEDDER
    if _NORM.search(name):
        return Role.NORM
    return Role.BLOCK if in_block else Role.OUTSIDE
