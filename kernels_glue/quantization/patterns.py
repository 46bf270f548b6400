"""The `ignored_layers` language: exact names, prefixes, globs and regular expressions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..names import MODEL_PREFIX

_GLOB_CHARACTERS = frozenset("*?[")


@dataclass(frozen=True)
class Pattern:
    """One entry as the user wrote it, and the test it stands for."""

    text: str
    matches: Callable[[str], bool]


def parse_patterns(text: str) -> tuple[Pattern, ...]:
    """Parses one entry a line (a line without `re:` may also hold several, split by commas).

    - `blocks.0.attn.qkv_proj` or `blocks.0`: that module, and everything below it
    - `blocks.*.mlp.fc2`: a glob over the whole name; `[0-11,49]` stands for these numbers, as in reports
    - `re:^blocks\\.(0|49)\\.`: a regular expression, searched in the name
    - everything from `#` on is a comment (not in a `re:` line)

    Names are those of the report; a leading `diffusion_model.` is accepted.

    Raises:
        ValueError: a regular expression that is empty or does not compile; the message names the entry.
    """
    return tuple(_pattern(entry) for entry in _entries(text))


def first_match(patterns: Iterable[Pattern], name: str) -> Pattern | None:
    """Returns the first pattern that matches a layer name, or None."""
    return next((p for p in patterns if p.matches(name)), None)


def _entries(text: str) -> Iterable[str]:
    for raw in text.splitlines():
        line = raw.strip()
        # A comma inside of brackets belongs to a list of numbers.
        parts = [line] if line.startswith("re:") else re.split(r",(?![^\[]*\])", line.partition("#")[0])
        yield from filter(None, (part.strip() for part in parts))


def _pattern(entry: str) -> Pattern:
    if entry.startswith("re:"):
        text = entry[3:].strip()
        if not text:
            raise ValueError(f"{entry!r} is an empty regular expression, which matches every layer")
        try:
            expression = re.compile(text)
        except re.error as error:
            raise ValueError(f"{entry!r} is not a regular expression ({error})") from error
        return Pattern(entry, lambda name: expression.search(name) is not None)
    target = entry.removeprefix(MODEL_PREFIX)
    if _GLOB_CHARACTERS.intersection(target):
        glob = re.compile(_glob_expression(target))
        return Pattern(entry, lambda name: glob.match(name) is not None)
    target = target.rstrip(".")
    # The dot keeps `blocks.1` from matching `blocks.10`.
    return Pattern(entry, lambda name: name == target or name.startswith(target + "."))


def _glob_expression(glob: str) -> str:
    """Translates a glob, in which brackets that hold only numbers and ranges of them mean numbers."""
    parts = re.split(r"\[([\d,\- ]+)\]", glob)
    # fnmatch wraps what it translates; the numbers go in between the unwrapped pieces.
    pieces = [_numbers(part) if i % 2 else fnmatch.translate(part)[4:-3] for i, part in enumerate(parts)]
    return f"(?s:{''.join(pieces)})\\Z"


def _numbers(text: str) -> str:
    numbers: list[int] = []
    for span in filter(None, (span.strip() for span in text.split(","))):
        first, _, last = span.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return f"(?:{'|'.join(map(str, numbers))})"
