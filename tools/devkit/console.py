"""What the developer tools print, and the one error type they stop with."""

from __future__ import annotations

from collections.abc import Sequence


class DevError(Exception):
    """A problem the developer can act on; shown as one message, without a traceback."""


def say(text: str = "") -> None:
    """Print a progress line at once, also when stdout is a pipe (CI logs)."""
    print(text, flush=True)


def title(text: str) -> None:
    say(f"\n##### {text}")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns to their widest cell; a column of numbers is set flush right."""
    columns = [[title, *cells] for title, cells in zip(header, zip(*rows, strict=True), strict=True)]
    for column in columns:
        width = max(map(len, column))
        numeric = all(cell[:1].isdigit() for cell in column[1:])
        column[:] = [cell.rjust(width) if numeric else cell.ljust(width) for cell in column]
        column.insert(1, "-" * width)
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
