"""Page-locked memory, with an exact double of CUDA: what is locked, what is told, what is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import comfy.model_management as management
import pytest
import torch
from comfyui import inprocess

pinning = inprocess.pack_module("kernels_glue.offload.pinning")
slab = inprocess.pack_module("kernels_glue.offload.slab")
can_pin = pinning.can_pin

PAGE = 4096
OTHERS = 3 * PAGE  # what ComfyUI itself has locked
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY = 0, 1, 2
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713


@dataclass
class Cudart:
    """Locks and unlocks as the CUDA runtime does; the numbers are those of its errors."""

    locked: dict[int, int] = field(default_factory=dict)
    calls: int = 0
    refuse: int = SUCCESS
    discarded: list[None] = field(default_factory=list)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        assert isinstance(address, int) and isinstance(size, int)
        if flags not in (0, 1, 2, 3) or not address or size <= 0:
            return INVALID_VALUE
        if self.refuse:
            return self.refuse
        pages = range(address // PAGE, -(-(address + size) // PAGE))
        for other, length in self.locked.items():
            if pages.start < -(-(other + length) // PAGE) and other // PAGE < pages.stop:
                return ALREADY_REGISTERED
        self.locked[address] = size
        return SUCCESS

    def cudaHostUnregister(self, address: int) -> int:
        self.calls += 1
        if self.refuse:
            return self.refuse
        return SUCCESS if self.locked.pop(address, None) is not None else NOT_REGISTERED

    @property
    def bytes(self) -> int:
        return sum(self.locked.values())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudart]:
    """The double, with room for a hundred pages, of which ComfyUI has three."""
    double = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: double)
    monkeypatch.setattr(management, "MAX_PINNED_MEMORY", 100 * PAGE)
    monkeypatch.setattr(management, "TOTAL_PINNED_MEMORY", OTHERS)
    monkeypatch.setattr(management, "discard_cuda_async_error", lambda: double.discarded.append(None))
    yield double
    double.refuse = SUCCESS
    truth = told() == double.bytes
    # A test that failed holds on to what it had; none of it may outlive the double.
    for pins in list(_made):
        pins.release()
    assert truth, "ComfyUI is told something else than what is locked"


_made: weakref.WeakSet[Any] = weakref.WeakSet()


def Pins(limit: int | None = None) -> Any:
    pins = pinning.Pins(limit)
    _made.add(pins)
    return pins


def told() -> int:
    return management.TOTAL_PINNED_MEMORY - OTHERS


def memory(pages: int) -> torch.Tensor:
    return slab.host_memory(pages * PAGE)


def test_a_slab_is_locked_and_told_and_unlocked(cuda: Cudart) -> None:
    pins, host = Pins(), memory(4)
    assert (pins.bytes, told(), cuda.locked) == (0, 0, {})
    assert pins.pin(host)
    assert cuda.locked == {host.data_ptr(): 4 * PAGE} and told() == pins.bytes == 4 * PAGE
    calls = cuda.calls
    assert pins.pin(host) and cuda.calls == calls  # locked already
    pins.release()
    assert (pins.bytes, told(), cuda.locked) == (0, 0, {})
    pins.release()
    assert cuda.calls == calls + 1
    assert pins.pin(host) and told() == 4 * PAGE  # and again
    pins.release()


def test_neighbours_share_no_page(cuda: Cudart) -> None:
    pins = Pins(90 * PAGE)
    slabs = [memory(1) for _ in range(20)]
    modules = [torch.nn.Linear(5, 5) for _ in range(20)]
    slabs += [slab.Block(f"b.{i}", module).host for i, module in enumerate(modules)]
    assert all(map(pins.pin, slabs)) and len(cuda.locked) == 40
    pins.release()


def test_the_users_limit_holds_to_the_byte(cuda: Cudart) -> None:
    pins, slabs = Pins(10 * PAGE), [memory(4), memory(6), memory(1)]
    assert pins.limit() == 10 * PAGE
    assert [pins.pin(s) for s in slabs] == [True, True, False]
    assert pins.limit() == 10 * PAGE and told() == 10 * PAGE
    pins = Pins(10 * PAGE - 1)
    assert [pins.pin(s) for s in [memory(4), memory(6)]] == [True, False]


def test_comfyuis_limit_holds_with_what_others_have_locked(cuda: Cudart) -> None:
    pins, slabs = Pins(10**15), [memory(90), memory(8), memory(7)]
    # All of it: core gives back what it has locked for idle models. Here there are none.
    assert pins.limit() == 100 * PAGE
    assert [pins.pin(s) for s in slabs] == [True, False, True]
    assert management.TOTAL_PINNED_MEMORY == management.MAX_PINNED_MEMORY
    assert pins.bytes == 97 * PAGE and not pins.pin(memory(1))
    management.TOTAL_PINNED_MEMORY -= 2 * PAGE
    assert pins.pin(last := memory(1)) and not pins.pin(memory(2))
    management.TOTAL_PINNED_MEMORY += 2 * PAGE
    assert pins.bytes == 98 * PAGE and last is not None


def test_half_of_the_free_memory_may_be_locked_where_no_limit_is_set(
    cuda: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning.psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * PAGE + 1))
    pins, slabs = Pins(), [memory(11), memory(10)]
    assert pins.limit() == 10 * PAGE
    assert [pins.pin(s) for s in slabs] == [False, True]
    pins.release()
    assert pins.limit() == 10 * PAGE
    assert Pins(30 * PAGE).limit() == 30 * PAGE  # the user's own is not halved


def test_no_more_than_half_of_the_free_memory_is_locked_in_all(
    cuda: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs are allocated and written before they are locked: what is free stays what it was."""
    monkeypatch.setattr(pinning.psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * PAGE))
    pins, slabs = Pins(), [memory(4) for _ in range(8)]
    assert sum(map(pins.pin, slabs)) == 2
    assert pins.bytes <= 10 * PAGE
    # What ComfyUI and others use in the meantime changes nothing while something is locked.
    monkeypatch.setattr(pinning.psutil, "virtual_memory", lambda: SimpleNamespace(available=90 * PAGE))
    assert pins.limit() == 10 * PAGE
    pins.release()
    assert pins.limit() == 45 * PAGE


def test_nothing_is_locked_where_comfyui_locks_nothing(cuda: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_pin()
    for limit in (-1, 0):
        monkeypatch.setattr(management, "MAX_PINNED_MEMORY", limit)
        assert not can_pin() and Pins(10**9).limit() == 0 and not Pins(10**9).pin(memory(1))
    assert not cuda.calls


def test_memory_that_goes_is_unlocked_first(cuda: Cudart) -> None:
    pins, host, other = Pins(), memory(3), memory(2)
    assert pins.pin(host) and pins.pin(other)
    seen: list[tuple[int, int]] = []
    unlock = cuda.cudaHostUnregister
    owner = weakref.ref(slab.owner_of(host))

    def watched(address: int) -> int:
        seen.append((address, told()))
        return unlock(address)

    cuda.cudaHostUnregister = watched
    view = host[5:9]
    address = host.data_ptr()
    del host
    assert not seen and pins.bytes == 5 * PAGE  # somebody uses it still
    del view
    assert owner() is None and seen == [(address, 5 * PAGE)]
    assert pins.bytes == told() == cuda.bytes == 2 * PAGE
    pins.release()
    assert len(seen) == 2


def test_new_memory_at_an_address_of_old_is_locked_anew(cuda: Cudart) -> None:
    pins = Pins()
    addresses = set()
    for _ in range(50):
        host = memory(2)
        addresses.add(host.data_ptr())
        assert pins.pin(host) and cuda.bytes == told() == pins.bytes == 2 * PAGE
        del host
        assert cuda.bytes == told() == 0
    assert len(addresses) < 50, "no address came again, and the test says nothing"


def test_what_nobody_keeps_a_record_of_is_unlocked(cuda: Cudart) -> None:
    pins, host = Pins(), memory(3)
    assert pins.pin(host) and told() == 3 * PAGE
    del pins
    assert told() == cuda.bytes == 0
    calls = cuda.calls
    del host
    assert cuda.calls == calls


def test_only_the_slabs_that_stream_stay_locked(cuda: Cudart) -> None:
    pins, slabs = Pins(), [memory(n) for n in (1, 2, 3, 4)]
    assert all(map(pins.pin, slabs))
    pins.keep_only([slabs[1], slabs[3], memory(1)])
    assert set(cuda.locked) == {slabs[1].data_ptr(), slabs[3].data_ptr()}
    assert pins.bytes == told() == 6 * PAGE
    assert pins.pin(slabs[0]) and told() == 7 * PAGE
    pins.keep_only([])
    assert told() == cuda.bytes == 0


def test_a_refusal_of_the_system_counts_nothing_and_clears_the_error(cuda: Cudart) -> None:
    pins, host = Pins(), memory(3)
    cuda.refuse = OUT_OF_MEMORY
    assert not pins.pin(host)
    assert (told(), pins.bytes, cuda.locked) == (0, 0, {}) and len(cuda.discarded) == 1
    cuda.refuse = SUCCESS
    assert pins.pin(host) and told() == 3 * PAGE and len(cuda.discarded) == 1


def test_memory_that_could_not_be_unlocked_still_counts(cuda: Cudart) -> None:
    pins, host = Pins(), memory(3)
    assert pins.pin(host)
    cuda.refuse = INVALID_VALUE
    pins.release()
    assert told() == cuda.bytes == 3 * PAGE and len(cuda.discarded) == 1


def test_memory_that_is_no_slab_is_not_locked(cuda: Cudart) -> None:
    pins = Pins()
    assert not pins.pin(torch.zeros(PAGE, dtype=torch.uint8))
    assert pins.pin(memory(0))  # there is nothing to lock
    assert not cuda.calls


def test_two_applications_lock_their_own_slabs(cuda: Cudart) -> None:
    one, two, hosts = Pins(), Pins(), [memory(2), memory(3)]
    assert one.pin(hosts[0]) and two.pin(hosts[1])
    assert (one.bytes, two.bytes, told()) == (2 * PAGE, 3 * PAGE, 5 * PAGE)
    one.release()
    assert (one.bytes, two.bytes, told()) == (0, 3 * PAGE, 3 * PAGE)


def test_one_lock_serves_two_applications_until_both_let_it_go(cuda: Cudart) -> None:
    one, two, hosts = Pins(), Pins(), [memory(2), memory(3)]
    assert all(map(one.pin, hosts)) and two.pin(hosts[1])
    assert cuda.calls == 2 and cuda.bytes == told() == one.bytes == 5 * PAGE and two.bytes == 3 * PAGE
    one.keep_only([])
    assert set(cuda.locked) == {hosts[1].data_ptr()} and (one.bytes, two.bytes) == (0, 3 * PAGE)
    assert one.pin(hosts[1]) and cuda.calls == 3  # one unlocked, none locked again
    two.release()
    assert cuda.bytes == told() == one.bytes == 3 * PAGE
    del one
    assert cuda.bytes == told() == 0


def test_a_shared_lock_counts_for_each_ones_limit(cuda: Cudart) -> None:
    one, two, hosts = Pins(5 * PAGE), Pins(2 * PAGE), [memory(2), memory(3)]
    assert all(map(one.pin, hosts))
    assert [two.pin(host) for host in hosts] == [True, False]
    assert (one.bytes, two.bytes, told()) == (5 * PAGE, 2 * PAGE, 5 * PAGE)


def test_shared_memory_that_goes_is_unlocked_once(cuda: Cudart) -> None:
    one, two, host = Pins(), Pins(), memory(2)
    assert one.pin(host) and two.pin(host)
    del host
    assert (one.bytes, two.bytes, told(), cuda.bytes) == (0, 0, 0, 0)
    calls = cuda.calls
    one.release()
    two.release()
    assert cuda.calls == calls == 2


def test_slabs_are_unlocked_whoever_holds_them(cuda: Cudart) -> None:
    one, two, hosts = Pins(), Pins(), [memory(2), memory(3), memory(4)]
    assert all(map(one.pin, hosts)) and two.pin(hosts[0])
    pinning.unlock(hosts[:2])
    assert set(cuda.locked) == {hosts[2].data_ptr()}
    assert (one.bytes, two.bytes, told()) == (4 * PAGE, 0, 4 * PAGE)
    calls = cuda.calls
    pinning.unlock([*hosts[:2], memory(1)])  # nothing of these is locked
    assert cuda.calls == calls
    # What was unlocked is locked again by who wants it, and let go by who has it then.
    assert two.pin(hosts[0]) and cuda.calls == calls + 1
    assert (one.bytes, two.bytes, told()) == (4 * PAGE, 2 * PAGE, 6 * PAGE)
    assert one.pin(hosts[0]) and cuda.calls == calls + 1
    two.release()
    assert told() == cuda.bytes == one.bytes == 6 * PAGE
    one.release()
    assert told() == cuda.bytes == 0


def test_a_slab_that_another_application_holds_is_locked_for_both(cuda: Cudart) -> None:
    """Two branches of a graph share the slabs of a model, each with settings of its own."""
    one, two, host = Pins(), Pins(), memory(2)
    both = [one.pin(host), two.pin(host)]
    seen = [(told(), cuda.bytes)]
    for pins in (one, two):
        pins.release()
        seen.append((told(), cuda.bytes))
    assert both == [True, True]
    assert seen == [(2 * PAGE, 2 * PAGE), (2 * PAGE, 2 * PAGE), (0, 0)]


def test_core_is_asked_for_what_it_locked_for_idle_models(
    cuda: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that may be locked is, for models that nobody runs; core unlocks those when it is asked."""
    monkeypatch.setattr(management, "TOTAL_PINNED_MEMORY", 100 * PAGE)

    def ensure(size: int, **_: Any) -> bool:
        shortfall = management.TOTAL_PINNED_MEMORY + size - management.MAX_PINNED_MEMORY
        if shortfall > 0:
            management.TOTAL_PINNED_MEMORY = OTHERS
        return True

    monkeypatch.setattr(management, "ensure_pin_registerable", ensure)
    pins, host = Pins(10**9), memory(2)
    locked = pins.pin(host)
    pins.release()
    monkeypatch.setattr(management, "TOTAL_PINNED_MEMORY", OTHERS)
    assert locked


def test_room_is_asked_of_core_before_each_lock(cuda: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        management,
        "ensure_pin_registerable",
        lambda size, **_: asked.append((size, cuda.bytes)) or len(asked) < 3,
    )
    pins, hosts = Pins(), [memory(2), memory(3)]
    assert all(map(pins.pin, hosts))
    assert asked == [(2 * PAGE, 0), (3 * PAGE, 2 * PAGE)]
    calls = cuda.calls
    assert not pins.pin(memory(1)) and asked[2] == (PAGE, 5 * PAGE) and cuda.calls == calls
