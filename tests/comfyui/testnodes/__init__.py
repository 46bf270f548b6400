"""Test-only ComfyUI nodes: conditioning without a text encoder, latents as files, the model of shapes.

The harness links this folder into custom_nodes; imports are relative, as in any node pack.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import ComfyExtension, io

from .data import make_conditioning
from .shapes_nodes import TestShapesCaption, TestShapesVAE, TestShapesVideo


def _parts(samples: Any) -> list[torch.Tensor]:
    return list(samples.unbind()) if getattr(samples, "is_nested", False) else [samples]


class TestConditioning(io.ComfyNode):
    """Random text conditioning of the given sizes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestConditioning",
            category="testing",
            inputs=[
                io.Int.Input("tokens", default=16, min=1, max=65536),
                io.Int.Input("width", default=4096, min=1, max=65536),
                io.Int.Input("pooled_width", default=0, min=0, max=65536),
                io.Int.Input("seed", default=3, min=0, max=2**31),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, tokens: int, width: int, pooled_width: int, seed: int) -> io.NodeOutput:
        return io.NodeOutput(make_conditioning(tokens, width, pooled_width, seed))


class TestSaveLatent(io.ComfyNode):
    """Writes a latent as <output folder>/<filename>.safetensors, one tensor a stream."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSaveLatent",
            category="testing",
            is_output_node=True,
            inputs=[io.Latent.Input("samples"), io.String.Input("filename", default="latent")],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any], filename: str) -> io.NodeOutput:
        import folder_paths
        from safetensors.torch import save_file

        tensors = {
            f"samples_{i}": part.detach().cpu().contiguous()
            for i, part in enumerate(_parts(samples["samples"]))
        }
        path = Path(folder_paths.get_output_directory()) / f"{filename}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(path))
        return io.NodeOutput(ui={"latent_file": [path.name]})


class TestTensorStats(io.ComfyNode):
    """Mean and standard deviation over all streams of a latent, and whether it is finite.

    They are outputs, text in `ui`, and a progress text on the node.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestTensorStats",
            category="testing",
            is_output_node=True,
            inputs=[io.Latent.Input("samples")],
            outputs=[
                io.Float.Output(display_name="mean"),
                io.Float.Output(display_name="std"),
                io.Boolean.Output(display_name="finite"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any]) -> io.NodeOutput:
        from server import PromptServer

        flat = torch.cat([part.reshape(-1).double().cpu() for part in _parts(samples["samples"])])
        mean, std = flat.mean().item(), flat.std().item()
        finite = bool(torch.isfinite(flat).all())
        # A browser's JSON has no NaN, so what is shown is text.
        text = f"mean {mean:.6g}, std {std:.6g}, finite {finite}"
        PromptServer.instance.send_progress_text(text, cls.hidden.unique_id)
        return io.NodeOutput(mean, std, finite, ui={"stats": [text]})


class TestNodes(ComfyExtension):
    """Registers the nodes of this folder."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            TestConditioning,
            TestSaveLatent,
            TestTensorStats,
            TestShapesCaption,
            TestShapesVideo,
            TestShapesVAE,
        ]


async def comfy_entrypoint() -> TestNodes:
    """Called by ComfyUI."""
    return TestNodes()
