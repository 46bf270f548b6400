"""How the Triton kernel is cut for a device: a short list for each generation of GPUs, then a timing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch

from ..failures import first_line, is_out_of_memory
from .devices import described, sm_of
from .timings import TIMED_HEADS, Timing, TimingKey, TimingStore, cuda_milliseconds, default_path

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tile:
    """How `attend` is compiled and launched.

    Attributes:
        pair: query blocks of a tile, 1 or 2.
        group: key blocks that are routed at a time, a power of two from 16 on.
        halves: 2 cuts the products with the values in two, which an older GPU's warps share better.
        pooled_stages, exact_stages: software pipelining of the loops over block means and over keys.
        warps: of a program.
    """

    pair: int
    group: int
    halves: int
    pooled_stages: int
    exact_stages: int
    warps: int = 4

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))


# The first is taken where nothing can be timed. Hopper's tensor cores read their operands from shared memory,
# of which a multiprocessor has 227 KiB, and so have registers for two query blocks. The others read them from
# registers, and all but A100 have 99 KiB.
_HOPPER = (Tile(2, 32, 1, 2, 2), Tile(2, 64, 1, 1, 2), Tile(1, 64, 1, 1, 2), Tile(1, 32, 1, 2, 3))
_OTHERS = (Tile(1, 32, 2, 1, 2), Tile(1, 32, 2, 1, 1), Tile(1, 16, 1, 1, 1, warps=8))
_BY_SM = {(9, 0): _HOPPER, (10, 0): _HOPPER, (10, 3): _HOPPER}


def tiles_for(sm: tuple[int, int] | None) -> tuple[Tile, ...]:
    """What is worth a timing on a generation of GPUs.

    Args:
        sm: compute capability; None for Triton's interpreter on a CPU.
    """
    return _OTHERS if sm is None else _BY_SM.get(sm, _OTHERS)


class TileChooser:
    """Chooses the tile of a call: one timing per device, torch, Triton, dtype, head_dim and rounded length.

    It is stored, so that the next process computes the same bits.

    Args:
        store: where timings are kept; None is ComfyUI's user folder.
        milliseconds: measures a function on a device.
    """

    def __init__(
        self,
        store: TimingStore | None = None,
        milliseconds: Callable[[Callable[[], Any], torch.device], float] = cuda_milliseconds,
    ):
        self._store = store
        self._milliseconds = milliseconds

    def choose(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Callable[..., Any], versions: str
    ) -> Tile:
        """The tile for a call; times the tiles if that was not done yet, which waits for the device.

        Args:
            q, k, v: [B, T, H, D].
            run: run(q, k, v, tile) computes the attention.
            versions: of torch and Triton; with others a timing does not hold.

        Raises:
            RuntimeError: the kernel runs with no tile; the message says why.
        """
        tiles = tiles_for(sm_of(q.device))
        names = tuple(sorted(map(str, tiles)))
        dtype = str(q.dtype).removeprefix("torch.")
        key = TimingKey.of(described(q.device), versions, dtype, q.shape[3], q.shape[1], k.shape[1])
        timing = self._timings().get(key)
        if timing is None or timing.candidates != names:
            if q.is_cuda and torch.cuda.is_current_stream_capturing():
                return tiles[0]  # a graph that is being recorded cannot be waited for
            few = tuple(tensor[:1, :, :TIMED_HEADS] for tensor in (q, k, v))
            timing = self._time(tiles, names, lambda tile: run(*few, tile), q.device)
            self._timings().put(key, timing)
            _log.info("%s", timing.text("builtin", key))
        return next(tile for tile in tiles if str(tile) == timing.chosen)

    def _time(
        self,
        tiles: tuple[Tile, ...],
        names: tuple[str, ...],
        run: Callable[[Tile], Any],
        device: torch.device,
    ) -> Timing:
        ms: dict[str, float] = {}
        errors: dict[str, str] = {}
        for tile in tiles:
            try:
                run(tile)  # compiles
                ms[str(tile)] = self._milliseconds(lambda tile=tile: run(tile), device)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                errors[str(tile)] = first_line(error)
        if not ms:
            raise RuntimeError(f"no tile runs: {errors}")
        return Timing(min(ms, key=ms.__getitem__), names, ms, errors)

    def _timings(self) -> TimingStore:
        if self._store is None:
            self._store = TimingStore(default_path("sol_tiles"))
        return self._store
