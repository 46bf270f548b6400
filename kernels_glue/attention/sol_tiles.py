"""How the Triton kernel is cut for a device: a short list for each generation of GPUs, then a timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch

from .devices import sm_of
from .measured import MeasuredChoice, timing_key
from .timings import first_sample


@dataclass(frozen=True)
class Tile:
    """How `attend` is compiled and launched.

    Attributes:
        group: key blocks that are routed at a time, a power of two from 16 on.
        halves: 2 cuts the products with the values in two, which an older GPU's warps share better.
        pooled_stages, exact_stages: of Triton's pipelining in the loops over block means and over keys.
        descriptors: copies whole blocks by tensor descriptors, from SM 9.0 on, where the tensors allow it.
        warps: of a program.
    """

    group: int
    halves: int
    pooled_stages: int
    exact_stages: int
    descriptors: bool = False
    warps: int = 4

    def __str__(self) -> str:
        return "-".join(str(int(part)) for part in astuple(self))


# The first is taken where nothing can be timed. The tensor cores of Hopper and of the large Blackwells read
# their operands from shared memory, of which a multiprocessor has 227 KiB. The others read them from
# registers, and all but A100 have 99 KiB. What no descriptor can describe is read by pointers.
_HOPPER = (Tile(64, 1, 2, 3, True), Tile(32, 1, 2, 3, True), Tile(32, 1, 2, 3))
_BLACKWELL = (Tile(64, 1, 2, 2, True), Tile(32, 1, 2, 3, True), Tile(32, 1, 2, 3))
_OTHERS = (Tile(32, 2, 1, 2), Tile(32, 2, 1, 3), Tile(32, 2, 1, 1))
_WITH_DESCRIPTORS = (*_OTHERS, Tile(32, 2, 1, 2, True), Tile(32, 1, 1, 2, True))
_BY_SM = {
    (9, 0): _HOPPER,
    **dict.fromkeys([(10, 0), (10, 3)], _BLACKWELL),
    **dict.fromkeys([(12, 0), (12, 1)], _WITH_DESCRIPTORS),
}


def tiles_for(sm: tuple[int, int] | None) -> tuple[Tile, ...]:
    """What is worth a timing on a generation of GPUs.

    Args:
        sm: compute capability; None for Triton's interpreter on a CPU.
    """
    return _OTHERS if sm is None else _BY_SM.get(sm, _OTHERS)


class TileChooser:
    """Chooses the tile of a call: one timing per device, versions, dtype, head_dim and rounded length."""

    def __init__(self, choice: MeasuredChoice | None = None):
        self._choice = choice or MeasuredChoice("tiles of builtin", "sol_tiles")

    def choose(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Callable[..., Any], versions: str
    ) -> Tile:
        """The tile for a call; times the tiles if that was not done yet, which waits for the device.

        Args:
            q, k, v: [B, T, H, D].
            run: run(q, k, v, tile) computes the attention.
            versions: of what compiles; with others a timing does not hold.

        Raises:
            NothingRuns: the kernel runs with no tile.
        """
        key = timing_key(q, versions, q.shape[1], k.shape[1])
        tiles = {str(tile): tile for tile in tiles_for(sm_of(q.device))}
        return tiles[
            self._choice.choose(
                key, tuple(tiles), lambda name: run(*first_sample(q, k, v), tiles[name]), q.device, tiles
            )
        ]
