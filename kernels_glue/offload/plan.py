"""Decides which blocks stay on the device: from sizes and a budget, without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import KitchenSolError
from ..units import size
from .config import NODE


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights as they lie on the device.

    Attributes:
        outside: what is not in a block, and always on the device.
        blocks: one slab a block, in the order in which the blocks run.
        aside: indices of blocks that are not of the main lists (refiners, side branches). They run once a
            sampling or over few tokens, so they are the last to become resident.
    """

    outside: int
    blocks: tuple[int, ...]
    aside: frozenset[int] = frozenset()

    @property
    def total(self) -> int:
        """All weights."""
        return self.outside + sum(self.blocks)


@dataclass(frozen=True)
class Plan:
    """What is where.

    Attributes:
        resident: indices of the blocks whose weights stay on the device.
        streamed: indices of the others, in order.
        slots: device slabs through which they rotate.
        slot_bytes: size of each of these.
        device_bytes: all weights on the device, slots included.
    """

    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    slots: int
    slot_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Wishes:
    """What the user set of the plan: see OffloadConfig."""

    resident_blocks: int = -1
    prefetch_blocks: int = 1


def make_plan(sizes: Sizes, budget: float, wishes: Wishes = Wishes()) -> Plan:
    """As many resident blocks as the budget holds, or as many as the user wants, spread evenly.

    Args:
        budget: bytes for all weights on the device; infinity for no limit.

    Raises:
        KitchenSolError: the budget holds not even the slots, or not the blocks that the user wants.
    """
    count = len(sizes.blocks)
    wanted = min(wishes.resident_blocks, count)
    if wanted >= 0:
        plan = _place(sizes, wanted, wishes)
        if plan.device_bytes > budget and wanted:
            raise _too_many(plan, wishes, budget)
        if plan.device_bytes > budget:
            raise _too_small(plan, sizes, budget)
        return plan
    for resident in range(count, -1, -1):
        plan = _place(sizes, resident, wishes)
        if plan.device_bytes <= budget:
            return plan
    plans = (_place(sizes, resident, wishes) for resident in range(count + 1))
    raise _too_small(min(plans, key=lambda plan: plan.device_bytes), sizes, budget)


def smallest_plan(sizes: Sizes, wishes: Wishes = Wishes()) -> Plan:
    """The plan that needs the least of the device, copying less ahead; as many resident as wished for."""
    count, wanted = len(sizes.blocks), wishes.resident_blocks
    residents = range(count + 1) if wanted < 0 else [min(wanted, count)]
    ahead = [Wishes(wanted, slots) for slots in range(wishes.prefetch_blocks + 1)]
    plans = [_place(sizes, resident, wish) for resident in residents for wish in ahead]
    return min(plans, key=lambda plan: (plan.device_bytes, len(plan.streamed)))


def _place(sizes: Sizes, resident: int, wishes: Wishes) -> Plan:
    count = len(sizes.blocks)
    streamed = _spread(count, count - resident, sizes.aside)
    kept = tuple(sorted(set(range(count)) - set(streamed)))
    slots = min(wishes.prefetch_blocks + 1, len(streamed))
    slot_bytes = max((sizes.blocks[i] for i in streamed), default=0)
    device = sizes.outside + sum(sizes.blocks[i] for i in kept) + slots * slot_bytes
    return Plan(kept, streamed, slots, slot_bytes, device)


def _spread(count: int, streamed: int, aside: frozenset[int]) -> tuple[int, ...]:
    """`streamed` of `count` indices with even gaps, so that each copy has as much compute to hide behind."""
    first = sorted(aside)[:streamed]
    main = [i for i in range(count) if i not in aside]
    return tuple(sorted([*first, *evenly(main, streamed - len(first))]))


def evenly(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items with even gaps between them."""
    return [items[(2 * k + 1) * len(items) // (2 * count)] for k in range(count)]


def _too_many(plan: Plan, wishes: Wishes, budget: float) -> KitchenSolError:
    return KitchenSolError(
        NODE,
        f"resident_blocks is {wishes.resident_blocks}, which needs {size(plan.device_bytes)} of device"
        f" memory, and the budget is {size(budget)}.",
        "Lower resident_blocks, set it to -1, or raise vram_budget_gb.",
    )


def _too_small(plan: Plan, sizes: Sizes, budget: float) -> KitchenSolError:
    resident = f", {len(plan.resident)} resident blocks" if plan.resident else ""
    return KitchenSolError(
        NODE,
        f"the budget is {size(budget)}, and this model needs at least {size(plan.device_bytes)}"
        f" ({size(sizes.outside)} outside of its blocks, {plan.slots} slabs of"
        f" {size(plan.slot_bytes)}{resident}).",
        "Raise vram_budget_gb, lower prefetch_blocks, or quantize the model first.",
    )
