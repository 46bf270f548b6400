"""Kitchen INT8 Quantize Model."""

from __future__ import annotations

from comfy_api.latest import io

from ..kernels_glue.quantization.config import (
    DEVICE_OPTIONS,
    GROUP_SIZE_OPTIONS,
    LAYERS_OPTIONS,
    LORA_OPTIONS,
    NODE,
    QuantizeConfig,
)
from .node_text import text_on


class KitchenInt8QuantizeModel(io.ComfyNode):
    """MODEL in, MODEL out: the linear layers of a diffusion transformer become INT8 ConvRot."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="KitchenInt8QuantizeModel",
            display_name=NODE,
            category="model/patch",
            description=(
                "Quantizes the linear layers of a loaded diffusion transformer to INT8 (ConvRot) with"
                " comfy_kitchen: half the size of bf16 and faster on GPUs from RTX 20 on. LoRA, saving,"
                " partial loading and cloning work as with any other model."
            ),
            search_aliases=["int8", "quantize", "quantization", "convrot", "w8a8", "vram", "kitchen"],
            inputs=[
                io.Model.Input("model", tooltip="A diffusion transformer in bf16, fp16, fp32 or fp8."),
                io.Combo.Input(
                    "group_size",
                    options=list(GROUP_SIZE_OPTIONS),
                    default=GROUP_SIZE_OPTIONS[0],
                    tooltip=(
                        "How many inputs ConvRot rotates together. auto takes, for each layer, the largest of"
                        " 256, 64 and 16 that divides it; 256 is the fastest."
                    ),
                ),
                io.Combo.Input(
                    "layers",
                    options=list(LAYERS_OPTIONS),
                    default=LAYERS_OPTIONS[0],
                    tooltip=(
                        "blocks: the linear layers of the transformer blocks. blocks+modulation: the"
                        " modulation (AdaLN) layers too, which are large in MiniMax-H3. all: the input and"
                        " output projections too, but no modulation."
                    ),
                ),
                io.String.Input(
                    "ignored_layers",
                    default="",
                    multiline=True,
                    tooltip=(
                        "Layers to leave alone, one entry a line: a name or a prefix (blocks.0), a glob"
                        " (blocks.*.mlp.fc2, blocks.[0-3].attn), or re: and a regular expression. The report"
                        " lists all names in this form."
                    ),
                ),
                io.Combo.Input(
                    "lora",
                    options=list(LORA_OPTIONS),
                    default=LORA_OPTIONS[0],
                    tooltip=(
                        "What happens to LoRA that are loaded before this node. keep: they stay patches, and"
                        " changing their strength quantizes nothing again. bake: they are merged at full"
                        " precision before quantizing."
                    ),
                ),
                io.Combo.Input(
                    "device",
                    options=list(DEVICE_OPTIONS),
                    default=DEVICE_OPTIONS[0],
                    tooltip="Where the weights are quantized. auto: on the GPU, streamed layer by layer.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The quantized model."),
                io.String.Output(display_name="report", tooltip="What was quantized, what was not, and why."),
            ],
            # Its text belongs to this node, not to another one with the same inputs.
            not_idempotent=True,
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, model, group_size: str, layers: str, ignored_layers: str, lora: str, device: str
    ) -> io.NodeOutput:
        from ..kernels_glue.probe import require_kitchen
        from ..kernels_glue.quantization.requirements import require_comfyui

        config = QuantizeConfig(group_size, layers, ignored_layers, lora, device)
        require_kitchen(NODE)
        require_comfyui()
        from ..kernels_glue.quantization.apply import quantize_model

        node_id = cls.hidden.unique_id
        show = text_on(node_id)
        quantized, report = quantize_model(model, config, show, node_id)
        show(report)
        return io.NodeOutput(quantized, report.text)
