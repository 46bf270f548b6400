"""Learns the order in which blocks run, and foretells it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

# Evaluations that are remembered: enough for a few conditions a step, each with its own skipped blocks.
_REMEMBERED = 16


class VisitOrder:
    """Foretells the blocks that come next from those that came before.

    The prediction is that what followed the last time will follow again: a place in the history is kept
    whose continuation is expected, and when a visit contradicts it, the place is found anew where the
    longest run of visits up to now has happened before. So an order that repeats is known after it was seen
    once, also where lists alternate, blocks are skipped or repeated, or conditions differ in that.

    Args:
        expected: the order to assume before anything was seen.
    """

    def __init__(self, expected: Iterable[int]):
        self._history = list(expected)
        self._limit = _REMEMBERED * max(1, len(self._history))
        # Two evaluations back; what came before a change says nothing about what follows it.
        self._longest = 2 * max(1, len(self._history))
        self._next = 0

    def visit(self, block: int) -> None:
        """A block is about to run."""
        history = self._history
        if not (self._next < len(history) and history[self._next] == block):
            self._next = self._place_of(block)
        history.append(block)
        self._next += 1
        if len(history) > 2 * self._limit:
            dropped = len(history) - self._limit
            del history[:dropped]
            self._next = max(0, self._next - dropped)

    def upcoming(self) -> Iterator[int]:
        """The blocks that are expected to run next, each once, nearest first."""
        seen: set[int] = set()
        for block in islice(self._history, self._next, None):
            if block not in seen:
                seen.add(block)
                yield block

    def _place_of(self, block: int) -> int:
        """Where the block last ran after the same blocks as now; the end of the history if it never did."""
        history = self._history
        best, longest = len(history), -1
        for place in range(len(history) - 1, -1, -1):
            if history[place] != block:
                continue
            run = 0
            while run < min(place, self._longest) and history[place - 1 - run] == history[-1 - run]:
                run += 1
            if run > longest:
                best, longest = place, run
            if run >= self._longest:
                break
        return best
