"""What is known while the model is evaluated once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .call import AttentionCall
from .layers import LayerCounter, LayerSet
from .routing import Place
from .schedule import Step
from .sinks import SinkRule, Sinks

# Key in transformer_options: the step that an evaluation belongs to.
STEP = "kitchen_sol_step"
# Key in transformer_options: an Observer of the attention of this sampling.
OBSERVER = "kitchen_sol_observer"

# Called with (layer, call, out [B, H, T, D], path) after a self-attention of a main block that is not exact;
# path is as in the tally ("sparse kitchen"). It must neither change a tensor nor wait for the device.
Observer = Callable[[int, AttentionCall, torch.Tensor, str], None]


@dataclass
class Evaluation:
    """One call of the diffusion model.

    Attributes:
        step: where it stands in the sampling.
        dense_layers: layers that are always dense.
        counter: counts the layers of this evaluation.
        rule: what is exact in the sequence.
        text_rows: gives the rows [start, stop) of conditioning tokens in a sequence of so many tokens.
        text_tokens: length of the conditioning; sequences of that length are text alone, or attend to it.
        observer: is told of the attention, where somebody compares.
    """

    step: Step
    dense_layers: LayerSet
    counter: LayerCounter
    rule: SinkRule
    text_rows: Callable[[int], tuple[int, int]]
    text_tokens: int
    observer: Observer | None = None
    _sinks: dict[int, Sinks] = field(default_factory=dict)

    def place(self, transformer_options: Mapping[str, Any], call: AttentionCall) -> Place:
        """Where a call stands; cross-attention and text blocks are in no layer and do not count as one."""
        layer = None
        if call.is_self_attention and call.tokens != self.text_tokens:
            layer = self.counter.layer_of(transformer_options, call.heads, call.head_dim)
        return Place(layer, layer is not None and layer in self.dense_layers, self.step)

    def sinks(self, tokens: int) -> Sinks:
        """The exact rows of a sequence of a main block, the same for all blocks of the evaluation."""
        if tokens not in self._sinks:
            self._sinks[tokens] = self.rule.rows(tokens, lambda: self.text_rows(tokens))
        return self._sinks[tokens]
