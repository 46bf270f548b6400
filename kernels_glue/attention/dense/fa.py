"""The backend `fa`: the fastest exact attention that is here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...failures import first_line, is_out_of_memory
from ..call import AttentionCall
from ..devices import described
from ..timings import TIMED_HEADS, Timing, TimingKey, TimingStore, cuda_milliseconds, default_path
from .base import DenseResult
from .candidate import Candidate
from .flash_packages import FLASH_ATTENTION
from .sdpa import CUDNN, FLASH, PLAIN

_log = logging.getLogger(__name__)

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
        self._store = store
        self._milliseconds = milliseconds
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
        timing = self._timings().get(key)
        if not self._holds(timing, fitting, call.q.device):
            if call.q.is_cuda and torch.cuda.is_current_stream_capturing():
                return everything  # a graph that is being recorded cannot be waited for
            timing = self._time(call, fitting, timing)
            self._timings().put(key, timing)
        assert timing is not None
        usable = {c.name: c for c in fitting if c.name in timing.ms and (key, c.name) not in self._gave_up}
        if timing.chosen in usable:
            return usable[timing.chosen]
        return usable[min(usable, key=timing.ms.__getitem__)] if usable else everything

    def timing_text(self, call: AttentionCall) -> str:
        """The timing that decided about calls like this one, to be shown; empty if none was needed."""
        if call.mask is not None:
            return ""
        key = self._key(call)
        timing = self._timings().get(key)
        return "" if timing is None else timing.text(self.name, key)

    # --- timing ---------------------------------------------------------------------------------

    def _holds(self, timing: Timing | None, fitting: Sequence[Candidate], device: torch.device) -> bool:
        if timing is None or timing.candidates != self._names(device):
            return False
        return all(timing.measured(candidate.name) for candidate in fitting)

    def _time(self, call: AttentionCall, fitting: Sequence[Candidate], earlier: Timing | None) -> Timing:
        """Measures the kernels that take this call.

        What an earlier call measured of the others stays, or two kinds of calls that share a key (with and
        without grouped heads) would time each other out for ever.
        """
        names = self._names(call.q.device)
        same = earlier is not None and earlier.candidates == names
        ms = dict(earlier.ms) if same else {}
        errors = dict(earlier.errors) if same else {}
        few = _few_heads(call)
        expected = self._candidates[-1].run(few)
        for candidate in fitting:
            ms.pop(candidate.name, None)
            errors.pop(candidate.name, None)
            try:
                if fault := _fault(candidate.run(few), expected):
                    errors[candidate.name] = fault
                else:
                    ms[candidate.name] = self._milliseconds(lambda c=candidate: c.run(few), few.q.device)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                errors[candidate.name] = first_line(error)
        if not ms:
            raise RuntimeError(f"no attention kernel runs: {errors}")
        timing = Timing(min(ms, key=ms.__getitem__), names, ms, errors)
        _log.info("%s", timing.text(self.name, self._key(call)))
        return timing

    def _timings(self) -> TimingStore:
        if self._store is None:
            self._store = TimingStore(default_path("attention_timings"))
        return self._store

    # --- what is here ---------------------------------------------------------------------------

    def _on(self, device: torch.device) -> tuple[Candidate, ...]:
        if device not in self._here:
            self._here[device] = tuple(c for c in self._candidates if not c.missing(device))
        return self._here[device]

    def _names(self, device: torch.device) -> tuple[str, ...]:
        return tuple(sorted(candidate.name for candidate in self._on(device)))

    def _key(self, call: AttentionCall) -> TimingKey:
        q, k = call.q, call.k
        return TimingKey.of(
            described(q.device),
            torch.__version__,
            str(q.dtype).removeprefix("torch."),
            q.shape[3],
            q.shape[2],
            k.shape[2],
        )


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
