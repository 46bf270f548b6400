"""Kitchen Compare Models."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from comfy_api.latest import io

from ..kernels_glue.compare.config import BOUNDS, LPIPS_OPTIONS, NODE, CompareConfig
from ..kernels_glue.errors import KitchenSolError
from .node_text import text_on

_DEFAULT = CompareConfig()
_SETTINGS = tuple(setting.name for setting in fields(CompareConfig))


class KitchenCompareModels(io.ComfyNode):
    """Samples two MODELs from the same noise and shows what the faster one costs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        low, high = BOUNDS["keep_psnr"]
        return io.Schema(
            node_id="KitchenCompareModels",
            display_name=NODE,
            category="model/sampling",
            description=(
                "Samples a model and its reference from the same noise and shows in numbers and a picture"
                " how close the results are, what they took in time and memory, which layers lose the most,"
                " and which settings keep a quality that you name."
            ),
            search_aliases=[
                "compare",
                "psnr",
                "ssim",
                "lpips",
                "quality",
                "benchmark",
                "evaluate",
                "difference",
                "kitchen",
            ],
            # Its report and its files are what it is for: it runs with nothing behind it.
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model to judge: quantized, sparse, offloaded, ..."),
                io.Boolean.Input(
                    "add_noise",
                    default=True,
                    tooltip=(
                        "Off: the latent is sampled as it is, with the noise that an earlier stage left in"
                        " it."
                    ),
                    advanced=True,
                ),
                io.Int.Input(
                    "noise_seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="Of the noise that both models start from.",
                ),
                io.Float.Input(
                    "cfg",
                    default=8.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="How closely the prompt is followed; 1 evaluates no negative.",
                ),
                io.Conditioning.Input("positive", tooltip="The prompt."),
                io.Conditioning.Input("negative", tooltip="The negative prompt."),
                io.Sampler.Input("sampler", tooltip="From KSamplerSelect, for example."),
                io.Sigmas.Input("sigmas", tooltip="From BasicScheduler, for example."),
                io.Latent.Input("latent_image", tooltip="What is sampled, by both models."),
                io.Boolean.Input(
                    "layers",
                    default=_DEFAULT.layers,
                    tooltip=(
                        "Also measure the error of every INT8 layer and of attention on the same inputs, and"
                        " name the worst ten."
                    ),
                ),
                io.Float.Input(
                    "keep_psnr",
                    default=_DEFAULT.keep_psnr,
                    min=low,
                    max=high,
                    step=0.5,
                    round=0.01,
                    tooltip=(
                        "Recommend settings whose result keeps this PSNR, in dB. Each one that is tried costs"
                        " one more sampling. 0: no recommendation."
                    ),
                ),
                io.Combo.Input(
                    "lpips",
                    options=list(LPIPS_OPTIONS),
                    default=LPIPS_OPTIONS[0],
                    tooltip="LPIPS of the images. auto: where the package lpips and a vae are there.",
                    advanced=True,
                ),
                io.String.Input(
                    "filename_prefix",
                    default="kitchen_compare",
                    tooltip=(
                        "Of the CSV and the JSON in ComfyUI's output folder, as in Save Image. Empty: none."
                    ),
                ),
                io.Model.Input(
                    "reference",
                    optional=True,
                    tooltip="What to compare with. Not connected: the model without this pack's nodes.",
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip="Connect it to score decoded images instead of latents at the end.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="The model's result."),
                io.Latent.Output(display_name="reference_latent", tooltip="The reference's result."),
                io.String.Output(display_name="report", tooltip="What was found; also shown on the node."),
                io.Image.Output(display_name="plot", tooltip="Scores by step, layers and trials."),
            ],
            # Its text belongs to this node, not to another one with the same inputs.
            not_idempotent=True,
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None) -> bool | str:
        """Stops a prefix that leads out of the output folder before anything runs."""
        from ..kernels_glue.compare.files import check_prefix

        try:
            check_prefix(filename_prefix or "")  # None is a link, whose value comes later
        except KitchenSolError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls, model, filename_prefix: str, reference: Any = None, vae: Any = None, **inputs: Any
    ) -> io.NodeOutput:
        from ..kernels_glue.compare.requirements import require_comfyui

        config = CompareConfig(**{name: inputs.pop(name) for name in _SETTINGS if name in inputs})
        require_comfyui()
        from ..kernels_glue.compare.apply import Inputs
        from ..kernels_glue.compare.present import compare_models

        show = text_on(cls.hidden.unique_id)
        latent, reference_latent, report, plot = compare_models(
            model, reference, Inputs(**inputs), config, filename_prefix, show, vae
        )
        return io.NodeOutput(latent, reference_latent, report.text, plot)
