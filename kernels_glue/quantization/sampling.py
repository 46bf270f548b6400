"""What the quantized model does when it is sampled: shows its text, and refuses what core would get wrong."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comfy.patcher_extension import CallbacksMP

from ..callbacks import set_callbacks
from ..errors import KitchenSolError
from ..names import MODEL_PREFIX
from ..report import Line, Report, Show
from .config import NODE
from .patch_count import count_patches
from .patcher import KEY
from .report import assemble, dequantized_line, lora_lines, recast_line

if TYPE_CHECKING:
    import torch
    from comfy.model_patcher import ModelPatcher


@dataclass(frozen=True)
class SamplingText:
    """What a quantized patcher shows when it is sampled. Holds names and text, no modules.

    Attributes:
        lines: what the node reported when it ran.
        int8_layers: names of the INT8 layers below the diffusion model.
        merged: number of weights into which a LoRA was merged before quantizing.
        show: puts a report on the node.
    """

    lines: tuple[Line, ...]
    int8_layers: Collection[str]
    merged: int
    show: Show

    def before(self, patcher: ModelPatcher, *_: Any) -> None:
        """The model is loaded and its sampling begins."""
        refuse_bypass_lora(patcher)
        self._tell(self._state(patcher))

    def after(self, patcher: ModelPatcher, *_: Any) -> None:
        """Its sampling has ended, well or not."""
        layers = (patcher.model.get_submodule(MODEL_PREFIX + name) for name in self.int8_layers)
        if dequantized := sum(map(_is_dequantized, layers)):
            self._tell([*self._state(patcher), dequantized_line(dequantized)])

    def _state(self, patcher: ModelPatcher) -> list[Line]:
        lines = list(lora_lines(count_patches(patcher.patches, self.int8_layers), self.merged))
        if patcher.force_cast_weights:
            lines.append(recast_line())
        return lines

    def _tell(self, state: list[Line]) -> None:
        Report.of(NODE, state).log()
        self.show(assemble(self.lines, state))


def watch(patcher: ModelPatcher, text: SamplingText) -> None:
    """Installs the text and the refusals on a patcher, in place of those of an earlier application.

    Callbacks and not a sampling wrapper: core's guiders for two models call wrappers of the first only.
    """
    callbacks = {
        CallbacksMP.ON_REGISTER_ALL_HOOK_PATCHES: refuse_weight_hooks,
        CallbacksMP.ON_PRE_RUN: text.before,
        CallbacksMP.ON_CLEANUP: text.after,
    }
    set_callbacks(patcher, KEY, callbacks)


def unwatch(patcher: ModelPatcher) -> None:
    """Takes the text and the refusals off a patcher, if they are there."""
    set_callbacks(patcher, KEY, {})


def refuse_weight_hooks(patcher: ModelPatcher, *_: Any) -> None:
    """Stops before core applies a LoRA hook, which it cannot do to quantized weights.

    Raises:
        KitchenSolError: a hook with weight patches was registered for this model.
    """
    if any(patcher.hook_patches.values()):
        raise KitchenSolError(
            NODE,
            "the conditioning carries a LoRA hook, and ComfyUI cannot apply weight hooks to INT8 layers.",
            "Load that LoRA with a LoRA loader before or after this node, or remove this node.",
        )


def refuse_bypass_lora(patcher: ModelPatcher) -> None:
    """Stops before core samples with a LoRA in bypass mode, which some INT8 layers would not run.

    Bypass mode replaces a layer's `forward`; core's fused activation (`comfy.ops.linear_input_act`, in
    MiniMax-H3's mlp.fc2 and others) reads an INT8 weight past it, so that part of the LoRA would be lost
    without a word.

    Raises:
        KitchenSolError: a LoRA in bypass mode was loaded after the node.
    """
    if "bypass_lora" in patcher.injections:
        raise KitchenSolError(
            NODE,
            "a LoRA in bypass mode comes after this node, and ComfyUI does not run it on every INT8 layer.",
            "Use a LoRA loader without bypass mode, before or after this node.",
        )


def _is_dequantized(module: torch.nn.Module) -> bool:
    # Core's quantized Linear takes the dequantized path while it has a weight function.
    return bool(module.weight_function or module.bias_function)
