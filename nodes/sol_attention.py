"""Sol Attention Patch."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..kernels_glue.attention.config import (
    BOUNDS,
    CURVE_OPTIONS,
    DENSE_OPTIONS,
    KV_SPLITS_OPTIONS,
    NODE,
    PROVIDER_OPTIONS,
    SINKS_OPTIONS,
    THRESH_OPTIONS,
    TOKEN_AUG_STEP,
    SolConfig,
    choice,
)
from ..kernels_glue.errors import KitchenSolError
from .node_text import text_on

_DEFAULT = SolConfig()


def _combo(name: str, options: tuple[str, ...], tooltip: str, advanced: bool = True) -> io.Combo.Input:
    return io.Combo.Input(
        name, options=list(options), default=options[0], tooltip=tooltip, advanced=advanced or None
    )


def _float(name: str, step: float, tooltip: str, advanced: bool = True) -> io.Float.Input:
    low, high = BOUNDS[name]
    return io.Float.Input(
        name,
        default=getattr(_DEFAULT, name),
        min=low,
        max=high,
        step=step,
        round=0.001,
        tooltip=tooltip,
        advanced=advanced or None,
    )


def _int(name: str, tooltip: str, step: int = 1) -> io.Int.Input:
    low, high = BOUNDS[name]
    return io.Int.Input(
        name,
        default=getattr(_DEFAULT, name),
        min=int(low),
        max=int(high),
        step=step,
        tooltip=tooltip,
        advanced=True,
    )


class KitchenSolAttentionPatch(io.ComfyNode):
    """MODEL in, MODEL out: self-attention goes through Sol where that is right, and is dense elsewhere."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="KitchenSolAttentionPatch",
            display_name=NODE,
            category="model/patch",
            description=(
                "Sol sparse attention for long sequences (video, large images). The first steps, the first"
                " layer, text and everything unfit stay dense on a backend of your choice, and the node shows"
                " which calls ran where and why."
            ),
            search_aliases=[
                "sol",
                "sparse attention",
                "sage",
                "flash attention",
                "attention",
                "speed",
                "kitchen",
            ],
            inputs=[
                io.Model.Input("model", tooltip="A diffusion transformer, quantized or not."),
                _combo(
                    "provider",
                    PROVIDER_OPTIONS,
                    "The Sol kernel. auto: the fastest that is installed and can run a call. reference: slow,"
                    " in PyTorch, for tests.",
                    advanced=False,
                ),
                _combo(
                    "dense_backend",
                    DENSE_OPTIONS,
                    "What computes the dense calls. fa: the fastest exact attention that is here. sage_attn,"
                    " kitchen_int8: quantized. current: what the model would have used.",
                    advanced=False,
                ),
                _float(
                    "tau",
                    0.05,
                    "Higher is sparser: 1 computes about 15% of the blocks exactly, 1.5 8%, 2 5%.",
                    advanced=False,
                ),
                _combo(
                    "curve",
                    CURVE_OPTIONS,
                    "How tau goes to tau_end over the sparse steps. constant: it stays.",
                ),
                _float("tau_end", 0.05, "tau at the last step. Unused with the curve constant."),
                _combo("thresh_type", THRESH_OPTIONS, "How the spread of a block's scores is computed."),
                _combo(
                    "kv_splits",
                    KV_SPLITS_OPTIONS,
                    "Parts of the keys that are computed side by side (H100, H200 with the nvlabs kernel).",
                ),
                _float(
                    "dense_percent",
                    0.01,
                    "The part of the sampling that is dense at the start, as ComfyUI counts start_percent.",
                    advanced=False,
                ),
                _int(
                    "dense_steps",
                    "Number of dense steps at the start, instead of dense_percent. -1: by percent.",
                ),
                io.String.Input(
                    "dense_layers",
                    default=_DEFAULT.dense_layers,
                    tooltip="Layers that are always dense, such as 0,1,-1,10-12; -1 is the last one.",
                    advanced=True,
                ),
                _combo(
                    "sinks",
                    SINKS_OPTIONS,
                    "How the text in the sequence stays exact. keys: everything sees it exactly."
                    " keys_and_queries: it also sees everything exactly. auto: the latter for MiniMax-H3.",
                ),
                _int("sink_start", "First row of a range by hand; used if sink_tokens is not 0."),
                _int("sink_tokens", "Rows in the range by hand. 0: the text rows of the model's layout."),
                _int("min_tokens", "Sequences shorter than this stay dense. 0: by provider."),
                _int(
                    "token_aug",
                    "Single keys that are exact besides the blocks, closer and slower (kitchen).",
                    step=TOKEN_AUG_STEP,
                ),
                io.Boolean.Input(
                    "strict",
                    default=_DEFAULT.strict,
                    tooltip=(
                        "Stop where a call is dense for another reason than step, layer, length or"
                        " cross-attention."
                    ),
                    advanced=True,
                ),
                io.Boolean.Input(
                    "profile",
                    default=_DEFAULT.profile,
                    tooltip="Measure the time of the calls.",
                    advanced=True,
                ),
                _int("steps", "Steps for which the schedule is drawn. Nothing else depends on it."),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The patched model."),
                io.String.Output(display_name="report", tooltip="What will run where."),
                io.Image.Output(
                    display_name="schedule", tooltip="tau and the dense steps over the sampling."
                ),
            ],
            # Its text belongs to this node, not to another one with the same inputs.
            not_idempotent=True,
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls,
        provider: Any = None,
        dense_backend: Any = None,
        curve: Any = None,
        thresh_type: Any = None,
        kv_splits: Any = None,
        sinks: Any = None,
    ) -> bool | str:
        """Takes the place of ComfyUI's check of these inputs, which knows no other spelling."""
        given = {
            "provider": provider,
            "dense_backend": dense_backend,
            "curve": curve,
            "thresh_type": thresh_type,
            "kv_splits": kv_splits,
            "sinks": sinks,
        }
        try:
            for name, value in given.items():
                if value is not None:  # a link, whose value comes later
                    choice(name, value)
        except KitchenSolError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, model, **inputs: Any) -> io.NodeOutput:
        from ..kernels_glue.attention.requirements import require_comfyui

        config = SolConfig.of(inputs)
        require_comfyui()
        from ..kernels_glue.attention.apply import patch_attention

        show = text_on(cls.hidden.unique_id)
        patched, report, schedule = patch_attention(model, config, show)
        show(report)
        return io.NodeOutput(patched, report.text, schedule)
