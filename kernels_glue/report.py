"""The one shape of what the nodes say: lines to read, and beside each the same in numbers and names. Pure.

As text a report stands on the node, in its `report` output and in the log; as JSON it can be compared and
kept.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

# headline: stands above the warnings too. item: an entry of the list that the line before it opens.
Kind = Literal["headline", "detail", "item", "note", "warning"]

_MARKS: Mapping[str, str] = {"item": "- ", "note": "note: ", "warning": "WARNING: "}
# A node shows only its first lines.
_FIRST: Mapping[str, int] = {"headline": 0, "warning": 1}


@dataclass(frozen=True)
class Line:
    """One sentence, and what it says in numbers and names. Made by `headline`, `detail`, `item`, ...

    Attributes:
        kind: which also decides its mark and its place.
        text: without the mark.
        facts_json: a JSON object with sorted keys. As text it cannot change, however deep it is.

    Raises:
        ValueError: there is no such kind.
    """

    kind: Kind
    text: str
    facts_json: str = "{}"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"{self.kind!r} is no kind of line; use one of: {', '.join(get_args(Kind))}.")

    @classmethod
    def of(cls, kind: Kind, text: str, facts: Mapping[str, Any]) -> Line:
        """A line of a kind that is not known beforehand; see `headline`."""
        plain = {name: _plain(value) for name, value in facts.items()}
        return cls(kind, text, json.dumps(plain, sort_keys=True))

    @property
    def marked(self) -> str:
        """As it is read: `WARNING: ...`, `note: ...`, `- ...`, or the text alone."""
        return _MARKS.get(self.kind, "") + self.text

    @property
    def facts(self) -> dict[str, Any]:
        """A copy of the facts, of JSON's types; infinity and NaN are the strings "inf", "-inf" and "nan"."""
        return json.loads(self.facts_json)


def headline(text: str, /, **facts: Any) -> Line:
    """The result in a line, above everything else.

    Args:
        facts: None, bool, int, float, str, and sequences, sets (which are sorted) and mappings of these.
            Sizes are in bytes, durations in seconds, shares from 0 to 1, and one name means one thing in all
            lines of a report.

    Raises:
        TypeError: a fact is of another type, such as a tensor.
    """
    return Line.of("headline", text, facts)


def detail(text: str, /, **facts: Any) -> Line:
    """A plain line; arguments as for `headline`."""
    return Line.of("detail", text, facts)


def item(text: str, /, **facts: Any) -> Line:
    """An entry of a list; arguments as for `headline`."""
    return Line.of("item", text, facts)


def note(text: str, /, **facts: Any) -> Line:
    """What the reader may not expect; arguments as for `headline`."""
    return Line.of("note", text, facts)


def warning(text: str, /, **facts: Any) -> Line:
    """What the reader should change; arguments as for `headline`."""
    return Line.of("warning", text, facts)


@dataclass(frozen=True)
class Report:
    """What a node says.

    Attributes:
        node: its display name.
        lines: in the order in which they were found.
    """

    node: str
    lines: tuple[Line, ...]

    @classmethod
    def of(cls, node: str, *groups: Iterable[Line]) -> Report:
        """The lines of all groups."""
        return cls(node, tuple(line for group in groups for line in group))

    @property
    def shown(self) -> tuple[str, ...]:
        """The lines as they are read: headlines, warnings, and the others in their order."""
        ordered = sorted(self.lines, key=lambda line: _FIRST.get(line.kind, len(_FIRST)))
        return tuple(line.marked for line in ordered)

    @property
    def text(self) -> str:
        """What stands on the node."""
        return "\n".join(self.shown)

    @property
    def warns(self) -> bool:
        """Whether there is a warning among the lines."""
        return any(line.kind == "warning" for line in self.lines)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of all lines in one.

        Where several lines have a fact of the same name, lists are joined and mappings united; of other
        values the last one stands.
        """
        united: dict[str, Any] = {}
        for each in self.lines:
            _unite(united, each.facts)
        return united

    def log(self) -> None:
        """One record of one line, at level WARNING if there is a warning."""
        level = logging.WARNING if self.warns else logging.INFO
        logging.log(level, "%s: %s", self.node, "; ".join(self.shown))

    def to_json(self) -> str:
        """`{"node": ..., "lines": [{"kind": ..., "text": ..., "facts": {...}}, ...]}`.

        Equal reports give the same characters, all of them ASCII.
        """
        lines = [{"kind": each.kind, "text": each.text, "facts": each.facts} for each in self.lines]
        return json.dumps({"node": self.node, "lines": lines}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote.

        Raises:
            ValueError: the text is not such a report.
        """
        read = json.loads(text)
        try:
            lines = [Line.of(each["kind"], each["text"], each["facts"]) for each in read["lines"]]
            report = cls.of(read["node"], lines)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this JSON is no report: {error!r}.") from error
        if not all(isinstance(words, str) for words in (report.node, *(each.text for each in lines))):
            raise ValueError("this JSON is no report: its node and the text of its lines are to be strings.")
        return report


# What is called with each report of a node: now, and whenever its model is sampled.
Show = Callable[[Report], None]


def _plain(value: Any) -> Any:
    """The same in JSON's types."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Set):
        return sorted(map(_plain, value))
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(inner) for inner in value]
    raise TypeError(f"{value!r} of type {type(value).__name__} is no fact of a report.")


def _unite(into: dict[str, Any], facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        there = into.get(name)
        if isinstance(there, dict) and isinstance(value, dict):
            _unite(there, value)
        elif isinstance(there, list) and isinstance(value, list):
            there += value
        else:
            into[name] = value
