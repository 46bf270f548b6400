"""Page-locks slabs, so that copies from them run beside the compute, and tells ComfyUI how much that is."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable

import comfy.model_management as management
import psutil
import torch

from .slab import owner_of

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices


class Pins:
    """The page-locked slabs of one application of the node to one model.

    A slab is released when every application that locked it lets it go, when its memory goes, or when it is
    told so: whichever comes first, so that no page stays locked that nobody streams from.

    Args:
        limit: bytes that may be locked at a time; None is half of the memory that is free before.
    """

    def __init__(self, limit: int | None = None):
        self._limit = limit
        self._half = 0
        self._held: dict[int, _Locked] = {}

    @property
    def bytes(self) -> int:
        """Host memory that is locked now."""
        return sum(locked.size for locked in self._held.values() if locked.alive)

    def limit(self) -> int:
        """Bytes that may be locked in all: the user's limit, and ComfyUI's."""
        if self._limit is None and not self.bytes:
            # Read while nothing is locked: what is in use already does not become less free by locking it.
            self._half = psutil.virtual_memory().available // 2
        own = self._half if self._limit is None else self._limit
        return max(0, int(min(own, management.MAX_PINNED_MEMORY)))

    def pin(self, slab: torch.Tensor) -> bool:
        """Whether a slab is locked now; it is not where the limit or the system forbids it."""
        address, size = slab.data_ptr(), slab.nbytes
        held = self._held.get(address)
        if held is not None and held.alive:
            return True
        if not size:
            return True
        if self.bytes + size > self.limit() or (locked := _lock(slab)) is None:
            return False
        self._held[address] = locked
        return True

    def release(self) -> None:
        """Lets everything go."""
        self._held.clear()

    def keep_only(self, slabs: Iterable[torch.Tensor]) -> None:
        """Lets all slabs go but these."""
        kept = {slab.data_ptr() for slab in slabs}
        self._held = {address: locked for address, locked in self._held.items() if address in kept}


def unlock(slabs: Iterable[torch.Tensor]) -> None:
    """Unlocks slabs, whoever holds them."""
    for slab in slabs:
        if (locked := _locked.get(slab.data_ptr())) is not None:
            locked.unlock()


class _Locked:
    """One slab that is locked, for as long as this object or the slab's memory lives."""

    def __init__(self, owner: object, address: int, size: int):
        self.size = size
        self.unlock = weakref.finalize(owner, _unlock, address, size)
        # The end of the process unlocks everything by itself.
        self.unlock.atexit = weakref.finalize(self, self.unlock).atexit = False

    @property
    def alive(self) -> bool:
        return self.unlock.alive


# By address: CUDA locks no page twice, and applications of the node to one model share its slabs.
_locked: weakref.WeakValueDictionary[int, _Locked] = weakref.WeakValueDictionary()


def can_pin() -> bool:
    """Whether ComfyUI page-locks memory here at all (not on a CPU, and not with --disable-pinned-memory)."""
    return management.MAX_PINNED_MEMORY > 0


def _lock(slab: torch.Tensor) -> _Locked | None:
    address, size, owner = slab.data_ptr(), slab.nbytes, owner_of(slab)
    known = _locked.get(address)
    if known is not None and known.alive:
        return known
    # Takes what ComfyUI has locked for models that are not in use.
    if owner is None or not management.ensure_pin_registerable(size):
        return None
    if torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE) != 0:
        management.discard_cuda_async_error()
        return None
    # Core's own count, by which it limits what it locks itself.
    management.TOTAL_PINNED_MEMORY += size
    locked = _locked[address] = _Locked(owner, address, size)
    return locked


def _unlock(address: int, size: int) -> None:
    if torch.cuda.cudart().cudaHostUnregister(address) != 0:
        logging.warning("Layerwise Offload: host memory could not be unlocked")
        management.discard_cuda_async_error()
        return
    management.TOTAL_PINNED_MEMORY -= size
