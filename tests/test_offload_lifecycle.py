"""Whatever ends a run or comes between two, the next one is right and no memory stays behind."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from comfyui.lora import write_lora
from int8_node import LORA_A, static
from offload_node import GIB, bits, in_host_memory, offload, on_gpu, placed, same, sizes, unload
from stand_in_lane import HostLane
from torch.multiprocessing.reductions import StorageWeakRef

pytestmark = pytest.mark.usefixtures("inference")

MakeTiny = Callable[..., TinyModel]
# Four blocks of one size, of which one is resident and three rotate through two slabs.
SMALL = {"dim": 128, "ffn_dim": 128, "num_layers": 4}
SETTINGS = {"resident_blocks": 1, "vram_budget_gb": 64.0, "strategy": "stream"}
FIRST_STREAMED, LAST_STREAMED = 0, 3
STEPS = 2


# The slabs of the running test, also those that should be gone.
_slabs: list[tuple[StorageWeakRef, int]] = []


def on_device() -> int:
    """Bytes of the slabs whose memory is in use."""
    return sum(size for storage, size in _slabs if not storage.expired())


def lane_class() -> type:
    return inprocess.pack_module("kernels_glue.offload.lane").CudaLane if on_gpu() else HostLane


@pytest.fixture(autouse=True)
def slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps account of what is allocated."""
    lane, real = lane_class(), lane_class().allocate
    _slabs.clear()

    def allocate(self: Any, size: int) -> torch.Tensor:
        slab = real(self, size)
        _slabs.append((StorageWeakRef(slab.untyped_storage()), size))
        return slab

    monkeypatch.setattr(lane, "allocate", allocate)


class Bench:
    """A model, what core makes of it, and its LoRA."""

    def __init__(self, comfy: ModuleType, model: TinyModel, folder: Path) -> None:
        self.comfy, self.model = comfy, model
        self.path = folder / f"lora_{model.path.stem}.safetensors"
        write_lora(self.path, model, LORA_A["wan"])
        self.source = static(comfy.load_unet(model.path))
        self.bits = bits(self.source)
        self.expected = self.sample(self.source)
        self.expected_with_lora = self.sample(self.lora(self.source))
        assert not torch.equal(self.expected, self.expected_with_lora)
        unload()

    def lora(self, patcher: Any) -> Any:
        return self.comfy.apply_lora(patcher, self.path, 1.0)

    def sample(self, patcher: Any, **options: Any) -> torch.Tensor:
        return self.comfy.sample(patcher, self.model, **{"steps": STEPS, **options})

    def check_after(self, patcher: Any) -> None:
        """The next run of a streamed model with the LoRA, and what is left when it is unloaded."""
        assert torch.equal(self.sample(patcher), self.expected_with_lora)
        check_sizes(patcher)
        self.check_unloaded(patcher)
        assert torch.equal(self.sample(self.source), self.expected)

    def check_unloaded(self, patcher: Any) -> None:
        unload()
        self.check_nothing_loaded(patcher)

    def check_nothing_loaded(self, patcher: Any) -> None:
        assert placed(patcher) is None and patcher.loaded_size() == on_device() == 0 and not patcher.backup
        assert same(bits(self.source), self.bits)


@pytest.fixture
def case(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> Iterator[Bench]:
    unload()
    yield Bench(comfy, tiny("wan", **SMALL), tmp_path)
    comfy.unload_all()


@contextlib.contextmanager
def in_block(patcher: Any, index: int, act: Callable[[], None], call: int = 2) -> Iterator[None]:
    """`act` happens within the given call of a block, behind the hooks of the node."""
    calls: list[int] = []

    def count(*_: Any) -> None:
        calls.append(index)
        if len(calls) == call:
            act()

    handle = patcher.model.diffusion_model.blocks[index].norm1.register_forward_hook(count)
    try:
        yield
    finally:
        handle.remove()
    assert len(calls) == call, "the run went on"


def check_sizes(*patchers: Any) -> None:
    """What core is told is on the device: the slabs that are, and what is outside of the blocks."""
    slabs = 0
    for patcher in patchers:
        model, blocks = patcher.model, placed(patcher).streaming.blocks
        inside = {p.data_ptr() for block in blocks for p in block.module.parameters()}
        tensors = (*model.parameters(), *model.buffers())
        outside = sum(t.nbytes for t in tensors if t.data_ptr() not in inside)
        slabs += patcher.loaded_size() - outside
        assert patcher.loaded_size() == model.model_loaded_weight_memory
        assert patcher.model_size() == sum(t.nbytes for t in tensors)
    assert slabs == on_device()


# --- a run that ends early ------------------------------------------------------------------------


def interrupt() -> None:
    import comfy.model_management as management

    management.interrupt_current_processing()
    management.throw_exception_if_processing_interrupted()  # as the next block that loads, or the sampler


def refuse() -> None:
    raise RuntimeError("from a block")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("from a block")


ENDINGS: dict[str, tuple[Callable[[], None], str]] = {
    "interrupt": (interrupt, "InterruptProcessingException"),
    "exception": (refuse, "RuntimeError"),
    "out of memory": (out_of_memory, "OutOfMemoryError"),
}


@pytest.mark.core
@pytest.mark.parametrize("unloaded", [False, True], ids=["kept", "unloaded"])
@pytest.mark.parametrize("what", ENDINGS)
def test_in_the_middle_of_a_step(case: Bench, what: str, unloaded: bool) -> None:
    # Late copies: those that were started for the blocks behind the failure have not been made yet.
    streamed, _, texts = offload(case.source, late=True, **SETTINGS)
    patched = case.lora(streamed)

    act, kind = ENDINGS[what]
    for block in (FIRST_STREAMED, LAST_STREAMED, 1):
        with in_block(patched, block, act), pytest.raises(BaseException) as caught:
            case.sample(patched)
        assert caught.typename == kind
        loaded = patched.loaded_size()
        assert loaded > 0
        running = placed(patched).streaming
        assert all(in_host_memory(running.blocks[i]) for i in running.plan.streamed)
        if unloaded:
            case.check_unloaded(patched)
        assert torch.equal(case.sample(patched), case.expected_with_lora)
        assert patched.loaded_size() == loaded
    assert len(texts) >= 3
    case.check_after(patched)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_out_of_memory_while_loading(case: Bench, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """At the resident block, the first slab, and the second one."""
    streamed, *_ = offload(case.source, **SETTINGS)
    patched = case.lora(streamed)
    lane, real, calls = lane_class(), lane_class().allocate, []

    def allocate(self: Any, size: int) -> torch.Tensor:
        calls.append(size)
        if len(calls) == at + 1:
            raise torch.OutOfMemoryError("while loading")
        return real(self, size)

    monkeypatch.setattr(lane, "allocate", allocate)
    with pytest.raises(torch.OutOfMemoryError, match="while loading"):
        case.sample(patched)
    case.check_nothing_loaded(patched)
    case.check_after(patched)
    assert len(calls) == at + 1 + 3


def test_interrupted_at_every_point_of_loading(case: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management as management

    streamed, *_ = offload(case.source, **SETTINGS)
    patched = case.lora(streamed)
    real, left = management.throw_exception_if_processing_interrupted, [0]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            management.interrupt_current_processing()
        real()

    def load(point: int) -> bool:
        left[0] = point
        try:
            management.load_models_gpu([patched])
        except management.InterruptProcessingException:
            return False
        return True

    points = 0
    with monkeypatch.context() as patch:
        patch.setattr(management, "throw_exception_if_processing_interrupted", count)
        while not load(points + 1):
            case.check_nothing_loaded(patched)
            points += 1
    # Each of four blocks is moved into a slab, the LoRA's weights are patched, a block is uploaded.
    assert points >= 4 + len(LORA_A["wan"]) + 1
    case.check_after(patched)


# --- core takes the memory back -------------------------------------------------------------------


@pytest.mark.core
def test_core_unloads_between_runs(case: Bench) -> None:
    import comfy.model_management as management

    streamed, *_ = offload(case.source, **{**SETTINGS, "resident_blocks": -1})
    patched = case.lora(streamed)
    block = max(sizes(case.source).blocks)
    assert torch.equal(case.sample(patched), case.expected_with_lora)
    whole = patched.loaded_size()
    assert whole >= sizes(case.source).total and not placed(patched).streaming.plan.streamed

    # One byte needs as much as it takes to leave two slabs in the place of three blocks.
    freed = patched.partially_unload(patched.offload_device, 1)
    assert freed == block and patched.loaded_size() == whole - block
    check_sizes(patched)
    assert len(placed(patched).streaming.plan.streamed) == 3
    assert torch.equal(case.sample(patched, seed=8), case.sample(case.lora(case.source), seed=8))
    assert torch.equal(case.sample(patched), case.expected_with_lora)

    # More than there is to give: core then unloads the whole model.
    assert patched.partially_unload(patched.offload_device, 1e32) == 0
    check_sizes(patched)
    [loaded] = [x for x in management.current_loaded_models if x.model is patched]
    assert loaded.model_unload(1e32)
    management.current_loaded_models.remove(loaded)
    case.check_unloaded(patched)

    assert torch.equal(case.sample(patched), case.expected_with_lora)
    patched.detach()
    management.current_loaded_models.clear()
    case.check_nothing_loaded(patched)
    case.check_after(patched)


@pytest.mark.core
@pytest.mark.parametrize("wanted", [0.3, 1.5, 2.0])
def test_a_part_of_the_memory_is_given_back(case: Bench, wanted: float) -> None:
    """`wanted` in blocks; what is given is at least that, and the sizes are true."""
    streamed, *_ = offload(case.source, vram_budget_gb=64.0, prefetch_blocks=0, strategy="stream")
    patched = case.lora(streamed)
    case.sample(patched)
    before, block = patched.loaded_size(), max(sizes(case.source).blocks)
    freed = patched.partially_unload(patched.offload_device, int(wanted * block))
    assert freed == before - patched.loaded_size() >= int(wanted * block)
    check_sizes(patched)
    case.check_after(patched)


def test_the_patcher_goes_while_it_is_loaded(case: Bench) -> None:
    import comfy.model_management as management

    streamed, *_ = offload(case.source, **SETTINGS)
    patched = case.lora(streamed)
    case.sample(patched)
    gone = weakref.ref(patched)
    del patched
    gc.collect()
    assert gone() is None
    case.check_nothing_loaded(case.source)
    assert torch.equal(case.sample(streamed), case.expected)
    del streamed
    management.cleanup_models_gc()
    case.check_unloaded(case.source)


# --- two models, two branches -----------------------------------------------------------------------


def test_two_models_take_turns(case: Bench, comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> None:
    other = Bench(comfy, tiny("wan", **SMALL, seed=1), tmp_path)
    a, b = (x.lora(offload(x.source, **SETTINGS)[0]) for x in (case, other))
    for run in range(3):
        assert torch.equal(case.sample(a), case.expected_with_lora)
        assert torch.equal(other.sample(b), other.expected_with_lora)
        check_sizes(a, b)
        if run == 1:
            unload()
    unload()
    case.check_nothing_loaded(a)
    other.check_nothing_loaded(b)


@pytest.mark.core
@pytest.mark.parametrize("first", ["streamed", "plain"])
def test_a_branch_with_the_node_and_one_without(case: Bench, first: str) -> None:
    streamed, _, texts = offload(case.source, **SETTINGS)
    patched, plain = case.lora(streamed), case.lora(case.source)
    runs = [streamed, case.source, patched, plain, streamed, plain, patched, case.source, streamed]
    for patcher in runs if first == "streamed" else reversed(runs):
        with_lora = patcher in (patched, plain)
        assert torch.equal(case.sample(patcher), case.expected_with_lora if with_lora else case.expected)
        if patcher in (streamed, patched):
            check_sizes(patcher)
            assert len(placed(patcher).streaming.plan.streamed) == 3
        else:
            assert placed(patcher) is None
    assert len(texts) == 5
    case.check_unloaded(streamed)


# --- what is pinned ---------------------------------------------------------------------------------


def test_pinned_memory_returns_to_the_start(case: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs, then unload. Without a GPU a double counts what would be locked."""
    import comfy.model_management as management

    held = count_locked(monkeypatch)
    streamed, _, texts = offload(case.source, **SETTINGS)
    start, block = management.TOTAL_PINNED_MEMORY, max(sizes(case.source).blocks)
    for patcher, has_lora in ((streamed, False), (case.lora(streamed), True), (streamed, False)):
        case.sample(patcher)
        pinned = management.TOTAL_PINNED_MEMORY - start
        assert pinned > 3 * block if has_lora else pinned == 3 * block
        assert held is None or sum(held.values()) == pinned
        assert f"pinned host memory {pinned / 2**20:.2f} MiB" in texts[-1] and "not pinned" not in texts[-1]
    unload()
    assert start == management.TOTAL_PINNED_MEMORY and not held
    case.sample(streamed)
    del patcher, streamed
    gc.collect()
    assert start == management.TOTAL_PINNED_MEMORY and not held


def count_locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, int] | None:
    """Bytes that are locked, by address, where a double takes the place of the driver."""
    import comfy.model_management as management

    if on_gpu():
        return None
    held: dict[int, int] = {}
    runtime = type("Runtime", (), {})()
    runtime.cudaHostRegister = lambda address, size, flags: held.update({address: size}) or 0
    runtime.cudaHostUnregister = lambda address: 0 if held.pop(address, None) else 1
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(management, "MAX_PINNED_MEMORY", GIB)
    monkeypatch.setattr(management, "ensure_pin_registerable", lambda size, *_: True)
    return held
