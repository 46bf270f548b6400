"""Page-locks slabs, so that copies from them run beside the compute, and tells ComfyUI how much that is."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import comfy.model_management as management
import psutil
import torch

from .slab import owner_of

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices


class Pins:
    """The page-locked slabs of one application of the node.

    A slab is released when it is told so, when its memory goes, or when this object goes: whichever comes
    first, so that no page stays locked that nobody streams from.

    Args:
        limit: bytes that may be locked at a time; None is half of the free memory, read when needed.
    """

    def __init__(self, limit: int | None = None):
        self._limit = limit
        self._held: dict[int, weakref.finalize] = {}
        weakref.finalize(self, _release_all, self._held)

    @property
    def bytes(self) -> int:
        """Host memory that is locked now."""
        return sum(held.peek()[2][1] for held in self._alive())

    def limit(self) -> int:
        """Bytes that may be locked in all, with those that are: the user's limit within ComfyUI's."""
        own = self._limit
        if own is None:
            own = self.bytes + psutil.virtual_memory().available // 2
        return max(
            0, int(min(own, self.bytes + management.MAX_PINNED_MEMORY - management.TOTAL_PINNED_MEMORY))
        )

    def pin(self, slab: torch.Tensor) -> bool:
        """Whether a slab is locked now; it is not where the limit or the system forbids it."""
        address, size = slab.data_ptr(), slab.nbytes
        held = self._held.get(address)
        if held is not None and held.alive:
            return True
        owner = owner_of(slab)
        if owner is None or not size or self.bytes + size > self.limit() or not _lock(address, size):
            return False
        self._held[address] = weakref.finalize(owner, _unlock, address, size)
        return True

    def release(self) -> None:
        """Unlocks everything."""
        _release_all(self._held)

    def keep_only(self, slabs: list[torch.Tensor]) -> None:
        """Unlocks all slabs but these."""
        kept = {slab.data_ptr() for slab in slabs}
        _release_all({address: held for address, held in self._held.items() if address not in kept})

    def _alive(self) -> list[weakref.finalize]:
        return [held for held in self._held.values() if held.alive]


def can_pin() -> bool:
    """Whether ComfyUI page-locks memory here at all (not on a CPU, and not with --disable-pinned-memory)."""
    return management.MAX_PINNED_MEMORY > 0


def _release_all(held: dict[int, Callable[[], object]]) -> None:
    for release in held.values():
        release()


def _lock(address: int, size: int) -> bool:
    management.ensure_pin_registerable(size)
    if torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE) != 0:
        management.discard_cuda_async_error()
        return False
    # Core's own count, by which it limits what it locks itself.
    management.TOTAL_PINNED_MEMORY += size
    return True


def _unlock(address: int, size: int) -> None:
    if torch.cuda.cudart().cudaHostUnregister(address) != 0:
        logging.warning("Layerwise Offload: host memory could not be unlocked")
        management.discard_cuda_async_error()
        return
    management.TOTAL_PINNED_MEMORY -= size
