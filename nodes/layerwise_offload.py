"""Layerwise Offload."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..kernels_glue.offload.config import BOUNDS, NODE, PIN_OPTIONS, STRATEGY_OPTIONS, OffloadConfig
from .node_text import text_on

_DEFAULT = OffloadConfig()


def _number(name: str) -> dict[str, float]:
    """The default and the range of a number, of the type that the default has."""
    default = getattr(_DEFAULT, name)
    low, high = map(type(default), BOUNDS[name])
    return {"default": default, "min": low, "max": high}


class KitchenLayerwiseOffload(io.ComfyNode):
    """MODEL in, MODEL out: block weights stream from host memory within a VRAM budget."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="KitchenLayerwiseOffload",
            display_name=NODE,
            category="model/patch",
            description=(
                "Runs a diffusion transformer whose weights are larger than the VRAM they may use. Blocks"
                " stream from RAM, each copied to the GPU while the one before it computes. After sampling"
                " the node shows what was copied and whether the GPU had to wait for it."
            ),
            search_aliases=[
                "offload",
                "block swap",
                "low vram",
                "vram",
                "memory",
                "stream",
                "prefetch",
                "pinned",
                "kitchen",
            ],
            inputs=[
                io.Model.Input("model", tooltip="A diffusion transformer, quantized or not."),
                io.Float.Input(
                    "vram_budget_gb",
                    **_number("vram_budget_gb"),
                    step=0.5,
                    round=0.01,
                    tooltip=(
                        "The most GPU memory that the weights may take, in GiB (1 GiB = 2^30 bytes). The"
                        " activations come on top. 0: auto, what is free when sampling starts, less what the"
                        " activations need."
                    ),
                ),
                io.Int.Input(
                    "resident_blocks",
                    **_number("resident_blocks"),
                    tooltip=(
                        "How many blocks stay on the GPU all the time. -1: as many as the budget holds. More"
                        " than that is an error."
                    ),
                ),
                io.Int.Input(
                    "prefetch_blocks",
                    **_number("prefetch_blocks"),
                    tooltip=(
                        "How many blocks are copied ahead of the one that computes. Each takes the room of a"
                        " block out of the budget. 0: one slab, filled only while resident blocks compute."
                    ),
                    advanced=True,
                ),
                io.Combo.Input(
                    "pin_memory",
                    options=list(PIN_OPTIONS),
                    default=_DEFAULT.pin_memory,
                    tooltip=(
                        "Pinned (page-locked) RAM is copied faster, and while the GPU computes. auto: as much"
                        " as the limit and the system allow. on: all that streams, or an error. off: none."
                    ),
                    advanced=True,
                ),
                io.Float.Input(
                    "max_pinned_gb",
                    **_number("max_pinned_gb"),
                    step=0.5,
                    round=0.01,
                    tooltip="The most RAM that may be pinned, in GiB. 0: auto, half of the RAM that is free.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "strategy",
                    options=list(STRATEGY_OPTIONS),
                    default=_DEFAULT.strategy,
                    tooltip=(
                        "Who moves the weights. stream: this node. core: ComfyUI's dynamic VRAM, with what it"
                        " lacks. auto: the better of the two here; the text on the node says which and why."
                    ),
                    advanced=True,
                ),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The model that streams its blocks."),
                io.String.Output(
                    display_name="report", tooltip="Which blocks were found and what will be done with them."
                ),
            ],
            # Its text belongs to this node, not to another one with the same inputs.
            not_idempotent=True,
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, **inputs: Any) -> io.NodeOutput:
        from ..kernels_glue.offload.requirements import require_comfyui

        config = OffloadConfig(**inputs)
        require_comfyui()
        from ..kernels_glue.offload.apply import offload_model

        show = text_on(cls.hidden.unique_id)
        offloaded, report = offload_model(model, config, show)
        show(report)
        return io.NodeOutput(offloaded, report.text)
