"""Nodes of the shipped video model: its captions, its frames, and a VAE for nodes that want one."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from .shapes import COLOURS, SHAPES, caption_conditioning, frames_of, latent_of

_CATEGORY = "testing/shapes"


class TestShapesCaption(io.ComfyNode):
    """CONDITIONING of a caption such as `red circle` or `red circle, blue square`; empty text is none."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestShapesCaption",
            display_name="Caption (model of shapes)",
            category=_CATEGORY,
            inputs=[
                io.String.Input(
                    "text",
                    default="red circle",
                    tooltip=(
                        f"One or two objects, with a comma between: a colour ({', '.join(COLOURS)}) and a"
                        f" shape ({', '.join(SHAPES)})."
                    ),
                )
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        return io.NodeOutput(caption_conditioning(text))


class TestShapesVideo(io.ComfyNode):
    """The frames of a LATENT as IMAGE [batch * frames, H, W, 3]."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestShapesVideo",
            display_name="Frames (model of shapes)",
            category=_CATEGORY,
            inputs=[io.Latent.Input("samples")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any]) -> io.NodeOutput:
        return io.NodeOutput(frames_of(samples["samples"]).flatten(0, 1))


class ShapesVAE:
    """What core's VAE Decode and VAE Encode and the pack ask of a VAE; it loses nothing."""

    def decode(self, samples: torch.Tensor) -> torch.Tensor:
        """Samples [B, 16, T, h, w] to [B, T, 2h, 2w, 3], as core's VAE gives a video."""
        return frames_of(samples)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """The frames [T, H, W, 3] of one video to samples [1, 16, T, H/2, W/2]."""
        return latent_of(pixels[None])


class TestShapesVAE(io.ComfyNode):
    """A VAE for the latents of the model of shapes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestShapesVAE",
            display_name="VAE (model of shapes)",
            category=_CATEGORY,
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(ShapesVAE())
