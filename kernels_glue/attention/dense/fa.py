"""The backend `fa`: the fastest exact attention that is here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from ...failures import first_line, is_out_of_memory
from ..call import AttentionCall
from ..measured import MeasuredChoice, timing_key
from ..timings import TimingKey, TimingStore, cuda_milliseconds
from .base import DenseResult
from .candidate import Candidate
from .flash_packages import FLASH_ATTENTION
from .sdpa import CUDNN, FLASH, PLAIN

_log = logging.getLogger(__name__)

# A timing sees this much of a call: enough to fill a GPU, little enough to cost nothing.
TIMED_HEADS = 8
# Exact kernels in bf16 are within 1% of each other; one that is further away computes something else.
_WRONG_NUMBERS = 0.05


class FaBackend:
    """Exact attention by the fastest kernel that takes the call.

    Where several take it, which they do on CUDA only, one timing decides per device, torch, dtype, head_dim
    and rounded lengths. It is stored, so that the next process computes the same bits.

    Args:
        candidates: kernels to choose from, the one that takes everything last.
        store: where timings are kept; None is ComfyUI's user folder.
        milliseconds: measures a function on a device.
    """

    name = "fa"
    exact = True

    def __init__(
        self,
        candidates: Sequence[Candidate] = (*FLASH_ATTENTION, CUDNN, FLASH, PLAIN),
        store: TimingStore | None = None,
        milliseconds: Callable[[Callable[[], torch.Tensor], torch.device], float] = cuda_milliseconds,
    ):
        self._candidates = tuple(candidates)
        self._choice = MeasuredChoice("fa", "attention_timings", store, milliseconds)
        self._here: dict[torch.device, tuple[Candidate, ...]] = {}
        self._gave_up: set[tuple[TimingKey, str]] = set()

    def missing(self, device: torch.device) -> str:
        return ""

    def unfit(self, call: AttentionCall) -> str:
        return ""

    def run(self, call: AttentionCall) -> DenseResult:
        chosen = self.choose(call)
        note = "" if call.q.device.type == "cpu" else self.timing_text(call)
        if chosen is self._candidates[-1]:
            return DenseResult(chosen.run(call), chosen.name, note)
        try:
            return DenseResult(chosen.run(call), chosen.name, note)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # It ran when it was timed, on fewer heads: what this call has beyond that is too much for it.
            self._gave_up.add((self._key(call), chosen.name))
            _log.warning("fa: %s failed and is left alone at this size: %s", chosen.name, first_line(error))
        return self.run(call)

    def choose(self, call: AttentionCall) -> Candidate:
        """The kernel for a call; times the kernels if that was not done yet."""
        everything = self._candidates[-1]
        if call.mask is not None:
            return everything
        fitting = [candidate for candidate in self._on(call.q.device) if not candidate.unfit(call)]
        if len(fitting) == 1:
            return fitting[0]
        key = self._key(call)
        usable = {c.name: c for c in fitting if (key, c.name) not in self._gave_up}
        few = cache(lambda: _few_heads(call))
        expected = cache(lambda: everything.run(few()))
        chosen = self._choice.choose(
            key,
            tuple(dict.fromkeys((everything.name, *usable))),
            lambda name: usable[name].run(few()),
            call.q.device,
            (candidate.name for candidate in self._on(call.q.device)),
            lambda out: _fault(out, expected()),
        )
        return usable[chosen]

    def timing_text(self, call: AttentionCall) -> str:
        """The timing that decided about calls like this one, to be shown; empty if none was needed."""
        if call.mask is not None:
            return ""
        return self._choice.text(self._key(call))

    # --- what is here ---------------------------------------------------------------------------

    def _on(self, device: torch.device) -> tuple[Candidate, ...]:
        if device not in self._here:
            self._here[device] = tuple(c for c in self._candidates if not c.missing(device))
        return self._here[device]

    def _key(self, call: AttentionCall) -> TimingKey:
        return timing_key(call.q, torch.__version__, call.q.shape[2], call.k.shape[2])


def _few_heads(call: AttentionCall) -> AttentionCall:
    """The call on views of its first sample and at most TIMED_HEADS of its heads, in whole groups."""
    group = max(call.q.shape[1] // call.k.shape[1], 1)
    key_heads = min(max(TIMED_HEADS // group, 1), call.k.shape[1])
    heads = min(key_heads * group, TIMED_HEADS, call.q.shape[1])
    return replace(
        call, q=call.q[:1, :heads], k=call.k[:1, :key_heads], v=call.v[:1, :key_heads], heads=heads
    )


def _fault(out: torch.Tensor, expected: torch.Tensor) -> str:
    """What is wrong with a result; empty if nothing is, or if the exact one is zero or not finite."""
    if out.shape != expected.shape:
        return f"wrong shape {tuple(out.shape)}"
    exact = expected.float()
    error = float((out.float() - exact).norm() / exact.norm())
    if error < _WRONG_NUMBERS or not exact.isfinite().all() or not exact.any():
        return ""
    return f"wrong numbers (relative error {error:.2g})"
