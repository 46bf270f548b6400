"""Streaming over small torch modules: at every call the right weights, between calls all of them at home."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import offload_modules as modules
import pytest
import torch
from offload_blocks import COUNT, build, right
from offload_modules import Scale
from stand_in_lane import HostCopy, HostLane, Sources

lateness = pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])


# --- right weights ----------------------------------------------------------------------------------


@lateness
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5, 64])
@pytest.mark.parametrize("resident", [0, 1, 3, 6, 7])
def test_every_block_runs_with_its_own_weights(resident: int, prefetch: int, late: bool) -> None:
    model = build(HostLane(late=late))
    plan = model.place(resident, prefetch)
    assert len(plan.resident) == resident
    for order in (None, None, [6, 5, 4, 3, 2, 1, 0], [0, 2, 2, 4], [0, 2, 2, 4], [5, 1, 1, 6, 3], None):
        assert torch.equal(model(order), right(order))
        model.check_home(plan.streamed)
    slots = min(prefetch + 1, COUNT - resident)
    page = model.streaming.blocks[0].bytes
    assert model.streaming.device_bytes == plan.device_bytes == (resident + slots) * page
    assert sum(model.lane.allocated) == plan.device_bytes
    model.streaming.release()
    model.check_home()
    assert model.streaming.device_bytes == 0 and model.streaming.plan is None
    assert torch.equal(model(), right())


@lateness
def test_blocks_of_every_form_compute_the_same_in_slots_of_the_largest(late: bool) -> None:
    torch.manual_seed(1)
    small, large = torch.nn.Linear(32, 32), modules.Quantized()
    small.requires_grad_(False)
    large.forward = lambda x: torch.nn.functional.linear(x, large.int8.weight.dequantize().float())
    blocks = [small, large, modules.Quantized(), Scale(1, 16)]
    blocks[2].forward = lambda x: x + blocks[2].inner.p0.sum() + blocks[2].modulation.sum()
    xs = torch.randn(4, 32)
    with torch.inference_mode():
        expected = blocks[3](blocks[2](large(small(xs))))
        model = build(HostLane(late=late), blocks=blocks)
        model.place(0, 1)
        assert len(set(b.bytes for b in model.streaming.blocks)) > 1
        for _ in range(4):
            assert torch.equal(blocks[3](blocks[2](large(small(xs)))), expected)


def test_nothing_is_copied_before_the_first_call_and_residents_never() -> None:
    model = build()
    assert model.streaming.device_bytes == 0 and not model.lane.allocated
    model.check_home()
    plan = model.place(3)
    model.check_home(plan.streamed)
    assert model.lane.started == 0
    where = {i: model.blocks[i].weight.data_ptr() for i in plan.resident}
    for i in plan.resident:
        slab = model.streaming.blocks[i].host
        assert not slab.data_ptr() <= where[i] < slab.data_ptr() + slab.nbytes
        assert model.blocks[i].weight.tolist() == [1.0 + i] * 300
    for _ in range(3):
        model()
        # The very same tensors, which no copy went into.
        assert {i: model.blocks[i].weight.data_ptr() for i in plan.resident} == where
    assert model.streaming.traffic.copies == model.lane.started
    assert model.streaming.traffic.bytes == model.lane.started * model.streaming.blocks[0].bytes
    assert model.streaming.traffic.misses == 1


@dataclass
class OrderedLane(HostLane):
    """Checks that each copy is started after a mark that stands behind the last use of its slab.

    Marks are moments: numbers that grow.
    """

    now: int = 0
    used: dict[int, int] = field(default_factory=dict)
    checked: int = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def allocate(self, size: int) -> torch.Tensor:
        slab = super().allocate(size)
        # Until now the memory may have been somebody else's.
        self.used[slab.data_ptr()] = self.tick()
        return slab

    def mark(self) -> object:
        return self.tick()

    def copy(
        self, target: torch.Tensor, sources: Sources, after: object, previous: object, pinned: bool
    ) -> HostCopy:
        assert after > self.used[target.data_ptr()], "the slab may still be in use"
        self.checked += 1
        return super().copy(target, sources, after, previous, pinned)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_slab_is_overwritten_after_the_block_that_used_it_last(prefetch: int) -> None:
    lane = OrderedLane()
    model = build(lane)

    def use(module: torch.nn.Module, args: Any, output: Any) -> None:
        lane.used[module.weight.data_ptr()] = lane.tick()

    for block in model.blocks:
        block.register_forward_hook(use)
    model.place(2, prefetch)
    for order in (None, [1, 1, 3], None, [6, 4, 2, 0], None):
        model(order)
    assert lane.checked > 10


# --- changes ----------------------------------------------------------------------------------------


@lateness
def test_every_plan_may_follow_every_other(late: bool) -> None:
    model = build(HostLane(late=late))
    steps = [(0, 0), (3, 1), (7, 1), (2, 5), (2, 1), (0, 64), (6, 0), (0, 1)]
    for resident, prefetch in steps:
        plan = model.place(resident, prefetch)
        assert model.streaming.device_bytes == plan.device_bytes
        assert torch.equal(model(), right()) and torch.equal(model([3, 1, 2]), right([3, 1, 2]))
        model.check_home(plan.streamed)
        # Each block has its views in the slots that it was in, and none in earlier ones.
        for i in plan.streamed:
            assert len(model.streaming.blocks[i]._bound) <= plan.slots
        hooks = [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in model.blocks]
        assert hooks == [2 if i in plan.streamed else 0 for i in range(COUNT)]


def test_blocks_that_stay_resident_are_not_uploaded_again() -> None:
    model = build()
    first = model.place(7)
    where = [block.weight.data_ptr() for block in model.blocks]
    model.lane.allocated.clear()
    plan = model.place(4)
    assert model.lane.allocated == [plan.slot_bytes] * 2  # the slots alone
    assert [model.blocks[i].weight.data_ptr() for i in plan.resident] == [where[i] for i in plan.resident]
    model.lane.allocated.clear()
    model.place(4)
    assert model.lane.allocated == []  # the same plan
    model.place(7)
    assert model.lane.allocated == [model.streaming.blocks[0].bytes] * 3
    assert first == model.streaming.plan


def test_released_device_memory_is_free() -> None:
    made: list[weakref.ref] = []

    class Watched(HostLane):
        def allocate(self, size: int) -> torch.Tensor:
            slab = super().allocate(size)
            made.append(weakref.ref(slab))
            return slab

    model = build(Watched())
    model.place(3, 1)
    model()
    assert len(made) == 5
    model.streaming.release()
    assert not [slab for slab in made if slab() is not None]
    assert not any(block._bound for block in model.streaming.blocks)


@lateness
def test_weights_that_changed_are_copied_again(late: bool) -> None:
    model = build(HostLane(late=late))
    model.place(0, 64)  # a slot for each block: nothing else would copy one again
    model()
    model()
    assert model.lane.started == COUNT
    for block in model.streaming.blocks:
        [weight] = [part for part in block.parts if part.name == "weight"]
        weight.leaves[0].view(block.host).add_(1.0)
    model.streaming.changed()
    x = torch.ones(300)
    with torch.inference_mode():
        for i, block in enumerate(model.blocks):
            x = block(x)
            assert block.seen.pop().tolist() == [2.0 + i] * 300
    assert model.lane.started == 2 * COUNT


def test_changing_before_anything_is_placed_and_releasing_twice_do_nothing() -> None:
    model = build()
    model.streaming.changed()
    model.streaming.release()
    model.place(2)
    model.streaming.release()
    model.streaming.release()
    model.check_home()


@lateness
@pytest.mark.parametrize("resident", [0, 3, 7])
def test_blocks_with_other_values_run_with_these_and_go_home_with_their_own(
    resident: int, late: bool
) -> None:
    model = build(HostLane(late=late))
    blocks = model.streaming.blocks
    held = [block.module.weight for block in blocks]
    values = [20.0 + i if i % 3 else 1.0 + i for i in range(COUNT)]
    for i, value in enumerate(values):
        if i % 3:
            blocks[i].patch({f"blocks.{i}.weight": torch.full((300,), value)})
    plan = model.place(resident)
    for order in (range(COUNT), range(COUNT), (5, 1, 1, 0, 4), range(COUNT)):
        x, expected = torch.ones(300), torch.ones(300)
        with torch.inference_mode():
            for i in order:
                x = model.blocks[i](x)
                assert model.blocks[i].seen.pop().tolist() == [values[i]] * 300
                expected = expected * values[i] + 0.5 * i
        assert torch.equal(x, expected)
    # A copy's bytes are those of the block, in however many pieces.
    assert model.streaming.traffic.bytes == model.streaming.traffic.copies * blocks[0].bytes
    assert model.streaming.device_bytes == plan.device_bytes
    model.streaming.release()
    assert [block.module.weight[0].item() for block in blocks] == values
    for block in blocks:
        block.unpatch()
    model.check_home()
    assert [weight[299].item() for weight in held] == [1.0 + i for i in range(COUNT)]
    model.place(resident)
    assert torch.equal(model(), right())
