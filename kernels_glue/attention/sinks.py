"""Which rows of a joint sequence stay exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import KitchenSolError
from .config import NODE, SolConfig
from .sol import NO_ROWS


@dataclass(frozen=True)
class Sinks:
    """Rows [start, stop) that are exact as keys for every query, and as queries.

    Both are empty ranges where nothing is exact.
    """

    keys: tuple[int, int] = NO_ROWS
    queries: tuple[int, int] = NO_ROWS


@dataclass(frozen=True)
class SinkRule:
    """How the rows are found.

    Attributes:
        by_hand: rows [start, stop) that the user gave, or None to go by the model's layout.
        keys, queries: what is exact about them.
    """

    by_hand: tuple[int, int] | None
    keys: bool
    queries: bool

    def source(self, family: str) -> str:
        """Where the rows come from, for a text."""
        return family if self.by_hand is None else "by hand"

    def rows(self, tokens: int, text_rows: Callable[[], tuple[int, int]]) -> Sinks:
        """The exact rows of a sequence.

        Args:
            tokens: length of the sequence.
            text_rows: gives the rows of conditioning tokens in it.

        Raises:
            KitchenSolError: the range by hand ends behind the sequence.
        """
        if not self.keys:
            return Sinks()
        start, stop = text_rows() if self.by_hand is None else self.by_hand
        if stop > tokens:
            raise KitchenSolError(
                NODE,
                f"sink_start {start} and sink_tokens {stop - start} reach behind the {tokens} tokens of this"
                " sequence.",
                "Give a range inside of it, or 0 sink_tokens to go by the model's layout.",
            )
        return Sinks((start, stop), (start, stop) if self.queries else NO_ROWS)


def sink_rule(config: SolConfig, layout_queries: bool) -> SinkRule:
    """Reads the settings.

    Args:
        layout_queries: `auto` makes the text's own rows dense, too, in this model.
    """
    by_hand = None
    if config.sink_tokens:
        by_hand = (config.sink_start, config.sink_start + config.sink_tokens)
    queries = config.sinks == "keys_and_queries" or (config.sinks == "auto" and layout_queries)
    return SinkRule(by_hand, config.sinks != "off", queries)
