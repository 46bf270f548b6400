"""Whether a call goes sparse, and if not, why: decided without touching a value of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .call import AttentionCall
from .measured import NothingRuns
from .providers.base import Provider
from .providers.fastest import FastestProvider
from .schedule import Step
from .sol import SolOptions


@dataclass(frozen=True)
class Reason:
    """Why a call is dense.

    Attributes:
        text: as it is counted and shown.
        expected: it follows from the settings or from what the call is; `strict` lets it pass.
    """

    text: str
    expected: bool = False


OUTSIDE = Reason("text block or outside of the blocks", expected=True)
CROSS = Reason("cross-attention", expected=True)
FIRST_STEPS = Reason("dense step", expected=True)
DENSE_LAYER = Reason("dense layer", expected=True)
GROUPED = Reason("grouped heads")
MASKED = Reason("mask")
CAUSAL = Reason("causal")
EXACT = Reason("the model asks for full precision")


def too_short(least: int) -> Reason:
    return Reason(f"fewer than {least} tokens", expected=True)


@dataclass(frozen=True)
class Place:
    """Where in the model and in the sampling a call is made.

    Attributes:
        layer: index over the model's main blocks, or None for a call that is in none of them.
        dense_layer: the settings keep this layer dense.
        step: step of the sampling.
    """

    layer: int | None
    dense_layer: bool
    step: Step


def why_dense(call: AttentionCall, place: Place | None) -> Reason | None:
    """What keeps a call dense whichever kernels are here; None if nothing does.

    Args:
        place: None for a call outside of an evaluation of the model.
    """
    if place is None:
        return OUTSIDE
    if not call.is_self_attention:
        same_but_heads = call.q.shape[2:] == call.k.shape[2:]
        return GROUPED if call.enable_gqa and same_but_heads else CROSS
    if place.layer is None:
        return OUTSIDE
    checks = (
        # What the settings keep dense is no surprise, whatever it is.
        (place.step.dense, FIRST_STEPS),
        (place.dense_layer, DENSE_LAYER),
        (call.mask is not None, MASKED),
        (call.causal, CAUSAL),
        (call.exact, EXACT),
    )
    return next((reason for holds, reason in checks if holds), None)


class Router:
    """Chooses the Sol kernel of a call.

    Args:
        providers: the kernels to try, in order.
        min_tokens: shortest sequence that is sparse; 0 goes by provider.
        fastest: chooses among several that can run a call; None takes the first.
    """

    def __init__(
        self, providers: Sequence[Provider], min_tokens: int, fastest: FastestProvider | None = None
    ):
        self._providers = tuple(providers)
        self._fastest = fastest
        self._min_tokens = min_tokens
        self._missing: dict[tuple[str, torch.device], str] = {}
        self._failed: dict[str, str] = {}
        self._answers: dict[Hashable, str] = {}

    def choose(
        self, call: AttentionCall, options: Callable[[Provider], SolOptions]
    ) -> tuple[Provider, SolOptions] | Reason:
        """The kernel for a call that nothing else keeps dense, or why none can run it.

        Args:
            options: what to ask of a kernel; called only for sequences that are long enough.
        """
        q, k, v = (tensor.transpose(1, 2) for tensor in (call.q, call.k, call.v))
        reasons: list[Reason] = []
        fits: list[tuple[Provider, SolOptions]] = []
        for provider in self._providers:
            if self.missing(provider, q.device):
                continue
            least = self._min_tokens or provider.min_tokens
            if unfit := self._once("unfit", provider, q, k, v):
                reasons.append(Reason(f"{provider.name}: {unfit}"))
            elif call.tokens < least:
                # It would take the call; that others would not is beside the point.
                reasons.insert(0, too_short(least))
            elif unsupported := self._once("unsupported", provider, asked := options(provider)):
                reasons.append(Reason(f"{provider.name}: {unsupported}"))
            else:
                fits.append((provider, asked))
                if self._fastest is None:
                    break
        if fits and self._fastest is None:
            return fits[0]
        if fits:
            try:
                here = (p.name for p in self._providers if self._missing.get((p.name, q.device)) == "")
                return self._fastest.choose(q, k, v, fits, here)
            except NothingRuns as error:
                for provider, _ in fits:
                    self.give_up(provider, error.errors[provider.name])
                reasons.insert(0, Reason(str(error)))
        return reasons[0] if reasons else Reason(f"no Sol kernel for {q.device.type}")

    def timing_text(self, call: AttentionCall) -> str:
        """The timing by which the kernel of a call was chosen, to be shown; empty if there was none."""
        return "" if self._fastest is None else self._fastest.text(call.q.transpose(1, 2))

    def _once(self, question: str, provider: Provider, *about: Any) -> str:
        """Why a kernel cannot run a call; asked once for each kind of call, of which a model has few."""
        kinds = tuple(
            (item.shape, item.dtype, item.device) if isinstance(item, torch.Tensor) else item
            for item in about
        )
        key = (question, provider.name, *kinds)
        if key not in self._answers:
            self._answers[key] = getattr(provider, question)(*about)
        return self._answers[key]

    def missing(self, provider: Provider, device: torch.device) -> str:
        """Why a kernel is out of the question on a device; asked once."""
        if provider.name in self._failed:
            return self._failed[provider.name]
        key = (provider.name, device)
        if key not in self._missing:
            self._missing[key] = provider.missing(device)
        return self._missing[key]

    def give_up(self, provider: Provider, why: str) -> None:
        """Leaves a kernel alone that raised, for as long as this patch lives."""
        self._failed[provider.name] = why
