"""Which blocks stay on the device: decisions from sizes and settings alone.

Right values come from counting over all possible choices, and from the settings' own words in config.py.
"""

from __future__ import annotations

import math
from itertools import combinations
from random import Random
from typing import Any

import pytest
from comfyui import inprocess

plan = inprocess.pack_module("kernels_glue.offload.plan")
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError
Sizes, Wishes = plan.Sizes, plan.Wishes

# Ten blocks of a hundred bytes, and 7 outside of them.
EVEN = Sizes(7, (100,) * 10)
# Flux: few large double blocks, then more of half the size.
FLUX = Sizes(11, (90,) * 3 + (40,) * 5)


def device_bytes(sizes: Any, streamed: tuple[int, ...], prefetch: int) -> int:
    """What lies on the device when these blocks are streamed: each slot holds any of them."""
    resident = sum(size for i, size in enumerate(sizes.blocks) if i not in streamed)
    slots = min(prefetch + 1, len(streamed))
    return sizes.outside + resident + slots * max((sizes.blocks[i] for i in streamed), default=0)


def gaps(streamed: tuple[int, ...], count: int) -> list[int]:
    """Steps from each streamed block to the next; the first follows the last, in the next evaluation."""
    return [b - a for a, b in zip(streamed, (*streamed[1:], streamed[0] + count), strict=True)]


def check_consistent(made: Any, sizes: Any, prefetch: int) -> None:
    """The fields of a plan belong together, whatever was decided."""
    assert sorted((*made.resident, *made.streamed)) == list(range(len(sizes.blocks)))
    assert list(made.streamed) == sorted(made.streamed) and list(made.resident) == sorted(made.resident)
    assert made.slots == min(prefetch + 1, len(made.streamed))
    assert made.slot_bytes == max((sizes.blocks[i] for i in made.streamed), default=0)
    assert made.device_bytes == device_bytes(sizes, made.streamed, prefetch)


@pytest.mark.parametrize("count", [1, 2, 7, 40, 57])
def test_streamed_blocks_are_spread_evenly_over_the_evaluations(count: int) -> None:
    sizes = Sizes(0, (100,) * count)
    for resident in range(count):
        made = plan.make_plan(sizes, math.inf, Wishes(resident, 1))
        found = gaps(made.streamed, count)
        assert len(made.resident) == resident and sum(found) == count
        assert max(found) - min(found) <= 1, (count, resident)
        check_consistent(made, sizes, 1)


def test_blocks_aside_stream_first_and_become_resident_last() -> None:
    aside = frozenset({0, 1, 6})
    sizes = Sizes(0, (10,) * 9, aside)
    for resident in range(10):
        made = plan.make_plan(sizes, math.inf, Wishes(resident, 0))
        streamed = set(made.streamed)
        if len(streamed) <= len(aside):
            assert streamed <= aside
        else:
            assert streamed >= aside
            main = [i for i in range(9) if i not in aside]
            found = gaps(tuple(main.index(i) for i in made.streamed if i not in aside), len(main))
            assert max(found) - min(found) <= 1
        check_consistent(made, sizes, 0)


def test_prefetching_more_than_is_streamed_needs_no_more_slots_than_blocks() -> None:
    made = plan.make_plan(EVEN, math.inf, Wishes(7, 64))
    assert made.slots == 3 and made.device_bytes == 7 + 10 * 100


@pytest.mark.parametrize("prefetch", [0, 1, 2, 64])
def test_the_budget_holds_to_the_byte(prefetch: int) -> None:
    for resident in range(11):
        streamed = 10 - resident
        edge = 7 + resident * 100 + min(prefetch + 1, streamed) * 100
        # With few streamed blocks all of them have a slot, and as much is needed as for all resident.
        most = resident if prefetch + 1 < streamed else 10
        assert len(plan.make_plan(EVEN, edge, Wishes(-1, prefetch)).resident) == most
        if resident == 0:
            with pytest.raises(KitchenSolError):
                plan.make_plan(EVEN, edge - 1, Wishes(-1, prefetch))
        elif most == resident < 10:
            assert len(plan.make_plan(EVEN, edge - 1, Wishes(-1, prefetch)).resident) == resident - 1


def test_everything_is_resident_where_everything_fits() -> None:
    for budget in (EVEN.total, EVEN.total + 0.5, math.inf):
        made = plan.make_plan(EVEN, budget, Wishes(-1, 3))
        assert (made.resident, made.streamed, made.slots) == (tuple(range(10)), (), 0)
        assert made.device_bytes == EVEN.total == 1007


def test_one_block_less_than_all_is_resident_one_byte_below_everything() -> None:
    # Two slots and eight resident blocks are as much as ten, so one resident block goes with a slot.
    made = plan.make_plan(EVEN, EVEN.total - 1, Wishes(-1, 1))
    assert len(made.streamed) == 3 and made.device_bytes == 7 + 7 * 100 + 2 * 100


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_blocks_of_unlike_sizes_fit_every_slot_and_the_budget(prefetch: int) -> None:
    """Against each spread of each number of streamed blocks, for every budget there is."""
    spreads = [plan.make_plan(FLUX, math.inf, Wishes(n, prefetch)) for n in range(9)]
    for made in spreads:
        check_consistent(made, FLUX, prefetch)
        if set(made.streamed) & {0, 1, 2}:
            assert made.slot_bytes == 90
    least = min(made.device_bytes for made in spreads)
    for budget in range(0, FLUX.total + 2):
        fitting = [len(made.resident) for made in spreads if made.device_bytes <= budget]
        if not fitting:
            assert budget < least
            with pytest.raises(KitchenSolError):
                plan.make_plan(FLUX, budget, Wishes(-1, prefetch))
            continue
        made = plan.make_plan(FLUX, budget, Wishes(-1, prefetch))
        assert len(made.resident) == max(fitting) and made.device_bytes <= budget


def test_no_other_choice_of_equal_blocks_has_more_resident_ones() -> None:
    sizes = Sizes(3, (10,) * 6)
    for prefetch in range(4):
        for budget in range(sizes.outside, sizes.total + 2):
            best = max(
                (
                    6 - streamed
                    for streamed in range(7)
                    for chosen in combinations(range(6), streamed)
                    if device_bytes(sizes, chosen, prefetch) <= budget
                ),
                default=None,
            )
            if best is None:
                with pytest.raises(KitchenSolError):
                    plan.make_plan(sizes, budget, Wishes(-1, prefetch))
            else:
                assert len(plan.make_plan(sizes, budget, Wishes(-1, prefetch)).resident) == best


def test_no_plan_is_above_the_budget() -> None:
    random = Random(3)
    made_plans = refused = 0
    for _ in range(1500):
        count = random.randint(1, 12)
        blocks = tuple(random.randint(0, 50) for _ in range(count))
        aside = frozenset(random.sample(range(count), random.randint(0, count)))
        sizes = Sizes(random.randint(0, 60), blocks, aside)
        wishes = Wishes(random.choice((-1, -1, 0, 1, count, 99)), random.randint(0, count + 2))
        budget = random.randint(0, sizes.total + 20)
        try:
            made = plan.make_plan(sizes, budget, wishes)
        except KitchenSolError:
            refused += 1
            least = min(plan._place(sizes, resident, wishes).device_bytes for resident in range(count + 1))
            assert least > budget or wishes.resident_blocks >= 0
            continue
        made_plans += 1
        assert made.device_bytes <= budget
        check_consistent(made, sizes, wishes.prefetch_blocks)
        if wishes.resident_blocks >= 0:
            assert len(made.resident) == min(wishes.resident_blocks, count)
    assert made_plans > 200 and refused > 200


def test_more_resident_blocks_than_the_budget_holds_is_an_error_with_both_numbers() -> None:
    sizes = Sizes(2**29, (2**30,) * 8)
    with pytest.raises(KitchenSolError) as refusal:
        plan.make_plan(sizes, 6 * 2**30, Wishes(5, 1))
    # 0.5 outside, 5 resident and 2 slots.
    assert refusal.value.problem == (
        "resident_blocks is 5, which needs 7.50 GiB of device memory, and the budget is 6.00 GiB."
    )
    assert "resident_blocks" in refusal.value.remedy and "vram_budget_gb" in refusal.value.remedy


def test_too_small_a_budget_is_an_error_that_says_what_is_needed() -> None:
    sizes = Sizes(2**29, (2**30,) * 8)
    with pytest.raises(KitchenSolError) as refusal:
        plan.make_plan(sizes, 2 * 2**30, Wishes(-1, 2))
    assert refusal.value.problem == (
        "the budget is 2.00 GiB, and this model needs at least 3.50 GiB"
        " (0.50 GiB outside of its blocks, 3 slabs of 1.00 GiB)."
    )
    assert "vram_budget_gb" in refusal.value.remedy and "prefetch_blocks" in refusal.value.remedy


def test_more_resident_blocks_than_there_are_is_all_of_them() -> None:
    assert plan.make_plan(EVEN, EVEN.total, Wishes(4096, 1)).streamed == ()


def test_the_smallest_plan_has_no_resident_block_or_as_many_as_were_wished() -> None:
    for resident in (-1, 0):
        made = plan.smallest_plan(FLUX, Wishes(resident, 1))
        assert made.resident == () and made.device_bytes == 11 + 90
    assert len(plan.smallest_plan(FLUX, Wishes(5, 1)).resident) == 5


def test_the_smallest_plan_is_not_larger_than_the_model() -> None:
    # Nine blocks could be streamed through ten slots of 100 bytes, or all be resident in 190.
    sizes = Sizes(0, (100,) + (10,) * 9)
    assert plan.smallest_plan(sizes, Wishes(-1, 9)).device_bytes <= sizes.total


def test_too_small_a_budget_for_none_resident_does_not_tell_to_lower_their_number() -> None:
    with pytest.raises(KitchenSolError) as refusal:
        plan.make_plan(EVEN, 100, Wishes(0, 1))
    assert "Lower resident_blocks" not in refusal.value.remedy


@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_items_are_taken_with_even_gaps(length: int) -> None:
    items = [10 + 3 * i for i in range(length)]
    assert plan.evenly(items, 0) == [] and plan.evenly(items, length) == items
    for count in range(1, length + 1):
        taken = plan.evenly(items, count)
        places = tuple(items.index(item) for item in taken)
        assert len(places) == count and list(places) == sorted(set(places))
        found = gaps(places, length)
        assert max(found) - min(found) <= 1
        # The ends are no special places: as much before the first as behind the last, give or take one.
        assert abs(places[0] - (length - 1 - places[-1])) <= 1
    assert plan.evenly([], 0) == []
