"""Blocks are copied before they run, in whatever order they do: learned from one evaluation or two."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice
from random import Random

import pytest
from comfyui import inprocess
from offload_rounds import Rounds

VisitOrder = inprocess.pack_module("kernels_glue.offload.order").VisitOrder
Rotation = inprocess.pack_module("kernels_glue.offload.rotation").Rotation

COUNT = 9
ALL = list(range(COUNT))
SHUFFLED = Random(5).sample(ALL, COUNT)
PREFETCH = (0, 1, 2, 5)


def without(*skipped: int) -> list[int]:
    return [i for i in ALL if i not in skipped]


# The evaluations of one period.
STREAMS: dict[str, list[list[int]]] = {
    "as expected": [ALL],
    "two lists, the second one first": [[*range(5, 9), *range(5)]],
    "two lists that alternate": [[0, 5, 1, 6, 2, 7, 3, 8, 4]],
    "backwards": [ALL[::-1]],
    "any order": [SHUFFLED],
    "some blocks never run": [without(3, 4, 8)],
    "a block repeated at once": [[0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8]],
    "the first block repeated at once": [[0, 0, *ALL[1:]]],
    "the last block repeated at once": [[*ALL, 8]],
    "a block repeated later": [[0, 1, 2, 3, 4, 1, 5, 6, 7, 8]],
    "a block repeated after others each time": [[0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 8]],
    "a run of blocks repeated": [[0, 1, 2, 3, 2, 3, 2, 3, 4, 5, 6, 7, 8]],
    "only one block": [[4]],
    "a block skipped in every second evaluation": [ALL, without(4)],
    "the first block skipped in every second evaluation": [ALL, without(0)],
    "the last block skipped in every second evaluation": [ALL, without(8)],
    "most blocks skipped in every second evaluation": [ALL, [0, 8]],
    "cond and uncond with other skips": [without(2, 3), without(6)],
    "cond and uncond that end with other blocks": [without(8), without(7)],
    "other skips in every second step": [ALL, without(2), without(6, 7), without(0)],
}


@pytest.mark.parametrize("prefetch", PREFETCH)
@pytest.mark.parametrize("name", STREAMS)
def test_an_order_that_repeats_is_known_after_it_was_seen(name: str, prefetch: int) -> None:
    period = list(chain(*STREAMS[name]))
    rounds = Rounds(COUNT, prefetch)
    found = list(rounds.of_each([period] * 12))
    # Where kinds of evaluations alternate, a second period tells them apart. Where there is one, only what
    # follows its end is not known before it was seen.
    assert len(STREAMS[name]) > 1 or found[1] <= 1, found
    assert found[2:] == [0] * 10, found
    # And nothing is copied for nothing: once for each call at most.
    before = len(rounds.lane.copied)
    rounds.misses(period * 3)
    assert len(rounds.lane.copied) - before <= 3 * len(period)


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_the_expected_order_needs_one_copy_to_be_waited_for(prefetch: int) -> None:
    rounds = Rounds(COUNT, prefetch)
    assert list(rounds.of_each([ALL] * 4)) == [1, 0, 0, 0]


def test_with_one_slot_the_next_block_is_copied_right_after_each() -> None:
    rounds = Rounds(COUNT, 0)
    rounds.visit(0)
    for block in islice(cycle(ALL), 1, 30):
        # Copied already, and nothing else since: there is one slot.
        assert rounds.lane.copied[-1] == block
        assert not rounds.visit(block)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_as_many_blocks_as_wanted_are_copied_ahead_while_one_runs(prefetch: int) -> None:
    rounds = Rounds(COUNT, prefetch)
    rounds.misses(ALL)
    rounds.lane.left = 100
    for block in ALL * 2:
        rounds.streaming.before(block)
        ahead = [(block + k) % COUNT for k in range(prefetch + 1)]
        assert all(rounds.streaming._rotation.slot_of(i) is not None for i in ahead)
        rounds.streaming.after(block)


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_where_a_block_was_not_expected_the_next_ones_are_copied_while_it_runs(prefetch: int) -> None:
    rounds = Rounds(COUNT, prefetch)
    rounds.lane.left = 100
    rounds.streaming.before(0)
    assert rounds.lane.copied == list(range(prefetch + 1))


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_a_refiner_that_runs_once_before_each_sampling(prefetch: int) -> None:
    """Block 0 is expected once an evaluation, and runs once a sampling."""
    rounds = Rounds(COUNT, prefetch)
    main = without(0)
    for sampling in range(4):
        first = rounds.misses([0, *main])
        found = list(rounds.of_each([main] * 8))
        if sampling == 0:
            # That it does not run again is seen when it does not.
            assert first == 1 and found[0] <= 1 and not any(found[1:])
        else:
            # Nobody can know that a sampling is over.
            assert first <= 2 and not any(found), (first, found)


@pytest.mark.parametrize("steps", [2, 8, 20])
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_after_a_cancelled_evaluation_the_order_is_known_again_soon(prefetch: int, steps: int) -> None:
    """However many steps there were before."""
    for stop in range(1, COUNT):
        rounds = Rounds(COUNT, prefetch)
        rounds.misses(ALL * steps)
        rounds.misses(ALL[:stop])
        found = list(rounds.of_each([ALL] * 12))
        assert max(found) <= 2 and not any(found[5:]), (stop, found)


@pytest.mark.parametrize("steps", [3, 20])
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_samplings_of_two_kinds_one_after_the_other(prefetch: int, steps: int) -> None:
    rounds = Rounds(COUNT, prefetch)
    for _ in range(3):
        for kind in (ALL, without(1, 7)):
            found = list(rounds.of_each([kind] * steps))
            assert max(found) <= 2 and not any(found[5:]), found


def test_any_stream_runs_with_the_right_weights() -> None:
    random = Random(11)
    for prefetch in PREFETCH:
        rounds = Rounds(COUNT, prefetch)
        visits = [random.randrange(COUNT) for _ in range(1500)]
        assert 0 < rounds.misses(visits) < len(visits)


# --- cost -------------------------------------------------------------------------------------------


class Counted(int):
    """A block whose comparisons are counted."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


def counted(visits: Iterator[int] | list[int]) -> list[Counted]:
    Counted.compared = 0
    return [Counted(i) for i in visits]


@pytest.mark.parametrize(
    "period",
    [ALL, SHUFFLED, without(3), [*ALL, *without(4)]],
    ids=["expected", "any", "skipped", "alternating"],
)
def test_an_order_that_repeats_is_followed_with_one_comparison_a_visit(period: list[int]) -> None:
    order = VisitOrder(ALL)
    # A hundred thousand once; the others only say that their order is no different.
    visits = counted(islice(cycle(period), 100_000 if period is ALL else 10_000))
    longest = 0
    for number, block in enumerate(visits):
        order.visit(block)
        longest = max(longest, len(order._history))
        if number % 997 == 0:
            # What is looked at to foretell is no longer than what repeats.
            assert number < len(period) * 3 or len(order._history) - order._next <= len(period)
    assert Counted.compared < len(visits) * 1.1
    assert longest <= 2 * 16 * COUNT + 1


def test_the_memory_of_an_order_without_rule_is_bounded_and_so_is_the_search() -> None:
    random = Random(2)
    order = VisitOrder(ALL)
    visits = counted([random.randrange(COUNT) for _ in range(4000)])
    for block in visits:
        order.visit(block)
        assert len(order._history) <= 2 * 16 * COUNT + 1
    # Each visit may look at the whole history about once.
    assert Counted.compared <= len(visits) * 2 * (2 * 16 * COUNT)


def test_an_order_of_which_nothing_is_expected_is_learned() -> None:
    order = VisitOrder(())
    assert list(order.upcoming()) == []
    for block in (7, 3, 5) * 3:
        order.visit(block)
    assert list(order.upcoming())[:3] == [7, 3, 5]
    for _ in range(10_000):
        order.visit(1)
    assert len(order._history) <= 64 and list(order.upcoming()) == [1]


def test_after_a_block_that_nobody_has_seen_nothing_is_foretold() -> None:
    order = VisitOrder(range(3))
    order.visit(9)
    assert list(order.upcoming()) == []
    order.visit(0)
    assert list(order.upcoming()) == [1, 2, 9, 0]


def test_what_is_foretold_names_each_block_once_nearest_first() -> None:
    order = VisitOrder(range(3))
    assert list(order.upcoming()) == [0, 1, 2]
    for block in (0, 1, 1, 0, 2, 0):
        order.visit(block)
    # As it went on after the last 2 0, if there was one; else after the last 0.
    foretold = list(order.upcoming())
    assert len(foretold) == len(set(foretold)) and foretold[0] in (1, 2)


# --- the slots --------------------------------------------------------------------------------------


def filled(*contents: int | None) -> Rotation:
    rotation = Rotation(len(contents))
    for slot, block in enumerate(contents):
        rotation.put(block, slot)
    return rotation


def test_the_slot_to_overwrite() -> None:
    assert filled(4, None, 5).victim([4, 5]) == 1
    assert filled(4, 6, 5).victim([4, 5]) == 1  # never expected
    assert filled(4, 5, 6).victim([6, 4, 5]) == 1  # expected last
    assert filled(4, 5, 6).victim([6, 4, 5], busy=1) == 0
    assert filled(4).victim([4], busy=0) is None
    assert filled().victim([1]) is None


def test_the_copy_to_start_next() -> None:
    assert filled(1, 2).next_fill([1, 2, 3]) is None
    assert filled(1, 2).next_fill([2, 3, 1]) == (3, 0)
    assert filled(1, None).next_fill([1, 2]) == (2, 1)
    # The block that runs needs no copy, and its slot takes none.
    assert filled(1, 2).next_fill([1, 3, 2], busy=0) == (3, 1)
    assert filled(1).next_fill([2], busy=0) is None
    assert filled(1).next_fill([2]) == (2, 0)
    assert filled().next_fill([2]) is None
    assert filled(1, 2).next_fill([]) is None


def test_nothing_is_in_the_slots_when_all_was_forgotten() -> None:
    rotation = filled(1, 2)
    assert (rotation.slot_of(2), rotation.slot_of(3)) == (1, None)
    rotation.forget()
    assert rotation.slot_of(1) is None and rotation.slot_of(2) is None
    assert rotation.next_fill([2]) == (2, 0)
