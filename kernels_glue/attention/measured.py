"""A choice among ways to compute the same thing, by one timing on the device that is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..failures import first_line, is_out_of_memory
from .devices import described
from .timings import Timing, TimingKey, TimingStore, cuda_milliseconds, default_path

_log = logging.getLogger(__name__)


def timing_key(q: torch.Tensor, versions: str, queries: int, keys: int) -> TimingKey:
    """What a timing of attention on [..., D] tensors like q holds for; `versions` of what computes it."""
    dtype = str(q.dtype).removeprefix("torch.")
    return TimingKey.of(described(q.device), versions, dtype, q.shape[-1], queries, keys)


class NothingRuns(RuntimeError):
    """None of the ways runs; `errors` has what each of them said."""

    def __init__(self, errors: Mapping[str, str]):
        names: dict[str, list[str]] = {}
        for name, said in errors.items():
            names.setdefault(said, []).append(name)
        super().__init__("; ".join(f"{', '.join(same)} failed ({said})" for said, same in names.items()))
        self.errors = errors


class MeasuredChoice:
    """Chooses the fastest way by a timing, which is stored, so that the next process computes the same bits.

    Args:
        what: names the choice in a text.
        file: name of the timings' file in ComfyUI's user folder.
        store: where timings are kept instead.
        milliseconds: measures a function on a device.
    """

    def __init__(
        self,
        what: str,
        file: str,
        store: TimingStore | None = None,
        milliseconds: Callable[[Callable[[], Any], torch.device], float] = cuda_milliseconds,
    ):
        self._what = what
        self._file = file
        self._store = store
        self._milliseconds = milliseconds
        self._tried: set[tuple[TimingKey, str]] = set()

    def choose(
        self,
        key: TimingKey,
        ways: Sequence[str],
        run: Callable[[str], Any],
        device: torch.device,
        candidates: Iterable[str],
        check: Callable[[Any], str] = lambda result: "",
    ) -> str:
        """The name of the fastest way; times all of them, which waits for the device, if one is new.

        Args:
            ways: names of what can be chosen, the one to take where nothing can be timed first.
            run: runs one of them; called only for a timing.
            candidates: names of all ways that exist here; a timing among others does not hold.
            check: what is wrong with the result of a way; empty if nothing is.

        Raises:
            NothingRuns: none of them runs.
        """
        names = tuple(sorted(candidates))
        timing = self._timings().get(key)
        if timing is not None and timing.candidates != names:
            timing = None
        new = [name for name in ways if timing is None or not timing.measured(name)]
        # What failed in another process, perhaps for want of a compiler, is tried once more in this one.
        again = [name for name in ways if name not in new and self._failed_before(key, name, timing)]
        if new or again:
            if _capturing(device):
                return ways[0]  # a graph that is being recorded cannot be waited for
            self._tried.update((key, name) for name in ways)
            if new or any([_runs(partial(run, name), check) for name in again]):
                timing = self._time(ways, run, names, device, timing, check)
                self._timings().put(key, timing)
                _log.info("%s", timing.text(self._what, key))
        usable = [name for name in ways if name in timing.ms]
        if not usable:
            raise NothingRuns(timing.errors)
        return timing.chosen if timing.chosen in usable else min(usable, key=timing.ms.__getitem__)

    def text(self, key: TimingKey) -> str:
        """The timing that decided, to be shown; empty if there was none."""
        timing = self._timings().get(key)
        return "" if timing is None else timing.text(self._what, key)

    def _failed_before(self, key: TimingKey, name: str, timing: Timing) -> bool:
        return name not in timing.ms and (key, name) not in self._tried

    def _time(
        self,
        ways: Sequence[str],
        run: Callable[[str], Any],
        candidates: tuple[str, ...],
        device: torch.device,
        earlier: Timing | None,
        check: Callable[[Any], str],
    ) -> Timing:
        """Measures all ways in one go, so that their times compare; what others took stays.

        Two kinds of calls that share a key would time each other out for ever otherwise.
        """
        ms = {} if earlier is None else {n: t for n, t in earlier.ms.items() if n not in ways}
        errors = {} if earlier is None else {n: e for n, e in earlier.errors.items() if n not in ways}
        for name in ways:
            way = partial(run, name)
            try:
                if fault := check(way()):
                    errors[name] = fault
                else:
                    ms[name] = self._milliseconds(way, device)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                errors[name] = first_line(error)
        if not ms:
            raise NothingRuns(errors)
        return Timing(min(ms, key=ms.__getitem__), candidates, ms, errors)

    def _timings(self) -> TimingStore:
        if self._store is None:
            self._store = TimingStore(default_path(self._file))
        return self._store


def _runs(way: Callable[[], Any], check: Callable[[Any], str]) -> bool:
    try:
        return not check(way())
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False


def _capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
