"""Which device slab holds which block, and which to fill next: without tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


class Rotation:
    """The contents of the slots through which streamed blocks rotate."""

    def __init__(self, slots: int):
        self._contents: list[int | None] = [None] * slots

    def slot_of(self, block: int) -> int | None:
        """The slot that holds a block, or is being filled with it."""
        return self._contents.index(block) if block in self._contents else None

    def put(self, block: int | None, slot: int) -> None:
        """The slot is filled with a block from now on, or with nothing."""
        self._contents[slot] = block

    def forget(self) -> None:
        """No slot holds anything any more."""
        self._contents = [None] * len(self._contents)

    def victim(self, upcoming: Iterable[int], busy: int | None = None) -> int | None:
        """The slot to overwrite: an empty one, else that whose block is expected last.

        Args:
            upcoming: blocks that are expected, nearest first.
            busy: a slot that is in use.
        """
        free = [slot for slot in range(len(self._contents)) if slot != busy]
        rank = {block: position for position, block in enumerate(upcoming)}
        never = len(rank) + 1

        def distance(slot: int) -> int:
            block = self._contents[slot]
            return never + 1 if block is None else rank.get(block, never)

        return max(free, key=distance, default=None)

    def next_fill(self, upcoming: Iterable[int], busy: int | None = None) -> tuple[int, int] | None:
        """(block, slot) of the next copy that is worth starting, or None if all slots hold what is next.

        Args:
            upcoming: blocks that are expected, each once, nearest first.
            busy: the slot of the block that runs; None between blocks.
        """
        room = len(self._contents) - (busy is not None)
        running = self._contents[busy] if busy is not None else None
        soon = list(islice((block for block in upcoming if block != running), room))
        for block in soon:
            if block not in self._contents:
                return block, self.victim(soon, busy)
        return None
