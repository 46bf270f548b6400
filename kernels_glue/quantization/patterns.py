"""The `ignored_layers` language: exact names, prefixes, globs and regular expressions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MODEL_PREFIX = "diffusion_model."
_GLOB_CHARACTERS = frozenset("*?[")


@dataclass(frozen=True)
class Pattern:
    """One entry as the user wrote it, and the test it stands for."""

    text: str
    matches: Callable[[str], bool]


def parse_patterns(text: str) -> tuple[Pattern, ...]:
    """Parses one entry a line (a line without `re:` may also hold several, split by commas).

    - `blocks.0.attn.qkv_proj` or `blocks.0`: that module, and everything below it
    - `blocks.*.mlp.fc2`: a glob over the whole name
    - `re:^blocks\\.(0|49)\\.`: a regular expression, searched in the name
    - everything from `#` on is a comment (not in a `re:` line)

    Names are those of the report; a leading `diffusion_model.` is accepted.

    Raises:
        ValueError: a regular expression that does not compile; the message names the entry.
    """
    return tuple(_pattern(entry) for entry in _entries(text))


def first_match(patterns: Iterable[Pattern], name: str) -> Pattern | None:
    """Returns the first pattern that matches a layer name, or None."""
    return next((p for p in patterns if p.matches(name)), None)


def _entries(text: str) -> Iterable[str]:
    for raw in text.splitlines():
        line = raw.strip()
        parts = [line] if line.startswith("re:") else line.partition("#")[0].split(",")
        yield from filter(None, (part.strip() for part in parts))


def _pattern(entry: str) -> Pattern:
    if entry.startswith("re:"):
        try:
            expression = re.compile(entry[3:].strip())
        except re.error as error:
            raise ValueError(f"{entry!r} is not a regular expression ({error})") from error
        return Pattern(entry, lambda name: expression.search(name) is not None)
    target = entry.removeprefix(MODEL_PREFIX)
    if _GLOB_CHARACTERS.intersection(target):
        return Pattern(entry, lambda name: fnmatch.fnmatchcase(name, target))
    target = target.rstrip(".")
    # The dot keeps `blocks.1` from matching `blocks.10`.
    return Pattern(entry, lambda name: name == target or name.startswith(target + "."))
