"""The arithmetic of the table's rows, and the table. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .plan import GIB, TITLES

Row = dict[str, Any]

_WAITED = re.compile(r"waited[^\d\n]{0,20}(\d+(?:\.\d+)?) s (?:a|per) step", re.IGNORECASE)


def waited_seconds(text: str) -> float | None:
    """Seconds a step that the compute waited for copies, as the node's text after sampling says it."""
    found = _WAITED.search(text)
    return float(found[1]) if found else None


def weights_on_device(
    used: Sequence[int],
    reserved: Sequence[int],
    allocated: Sequence[int],
    activations: Sequence[float],
    outside: float,
) -> list[float]:
    """Bytes of weights on the device at each block, wherever they were allocated.

    Args:
        used: memory in use on the whole device at each block.
        reserved: what torch's allocator has taken of it.
        allocated: what torch's tensors hold of that.
        activations: what is no weight, see activations_of. The highest one, if the visits differ in number.
        outside: what was in use outside of torch before anything was loaded.
    """
    if len(activations) != len(used):
        activations = [max(activations)] * len(used)
    return [
        u - r - outside + a - act for u, r, a, act in zip(used, reserved, allocated, activations, strict=True)
    ]


def activations_of(allocated: Sequence[int], weights: int) -> list[int]:
    """Bytes that are no weight at each block, from a run with all `weights` bytes resident.

    Args:
        allocated: what torch's tensors hold at each block of an evaluation, and then of a later one. The
            higher of the two counts: libraries allocate their workspaces on first use.
    """
    half = len(allocated) // 2
    higher = [max(pair) - weights for pair in zip(allocated[:half], allocated[half:], strict=False)]
    return 2 * higher


def complete(row: Row, resident: float | None, limit: float | None) -> Row:
    """Adds what follows from the measured figures.

    Args:
        row: with `step` and maybe `copied` (bytes a step), `copies_alone` (seconds), `weights` and `budget`.
        resident: seconds a step of the same model fully resident.
        limit: bytes a second that pinned memory reaches on its way to the device.
    """
    step, copied = row.get("step"), row.get("copied")
    if row.get("weights") is not None and row.get("budget") is not None:
        row["within"] = row["weights"] <= row["budget"] * GIB
    if not step:
        return row
    if resident:
        row["x_resident"] = step / resident
    if copied is not None and limit:
        row["copies"] = copied / limit
        if resident:
            row["x_bound"] = step / max(resident, row["copies"])
            if row["copies"] > resident:
                row["share_of_limit"] = copied / step / limit
    if row.get("copies_alone"):
        row["x_alone"] = step / row["copies_alone"]
    return row


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value / GIB:.1f}"


def _weights(row: Row) -> str:
    if row.get("weights") is None:
        return ""
    return f"{row['weights'] / GIB:.2f}" + (" (over)" if row.get("within") is False else "")


def _number(row: Row, key: str, digits: int) -> str:
    return "" if row.get(key) is None else f"{row[key]:.{digits}f}"


def _policy(row: Row) -> str:
    return TITLES[row["policy"]] + (f": {row['failed']}" if row.get("failed") else "")


COLUMNS = {
    "T": lambda row: str(row.get("tokens") or row["length"]),
    "budget, GiB": lambda row: "all" if row["budget"] is None else f"{row['budget']:g}",
    "policy": _policy,
    "s a step": lambda row: _number(row, "step", 3),
    "x resident": lambda row: _number(row, "x_resident", 2),
    "copied, GiB": lambda row: _gib(row.get("copied")),
    "copies, s": lambda row: _number(row, "copies", 3),
    "x max(resident, copies)": lambda row: _number(row, "x_bound", 2),
    "x copies alone": lambda row: _number(row, "x_alone", 2),
    "weights on the device, GiB": _weights,
    "device-wide peak, GiB": lambda row: _gib(row.get("peak")),
    "pinned, GiB": lambda row: _gib(row.get("pinned")),
}


def one_line(row: Row) -> str:
    """A row as it is shown when it has been measured."""
    shown = {name: show(row) for name, show in COLUMNS.items()}
    place = f"T {shown.pop('T'):>6}  {shown.pop('budget, GiB'):>3}  {shown.pop('policy'):<26}"
    figures = [f"{name} {value}" for name, value in shown.items() if value]
    figures += [
        f"{label} {_number(row, key, 3)}"
        for key, label in (
            ("copies_alone", "copies alone, s"),
            ("waited", "waited, s"),
            ("share_of_limit", "share of the pinned limit"),
        )
        if row.get(key) is not None
    ]
    if row.get("remark"):
        figures.append(row["remark"])
    return " | ".join([place, *figures])


def markdown(rows: Sequence[Row]) -> str:
    """The table, longest sequence first, within it the largest budget first."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in sorted(rows, key=_order):
        lines.append("| " + " | ".join(show(row).replace("|", "/") for show in COLUMNS.values()) + " |")
    return "\n".join(lines)


def _order(row: Mapping[str, Any]) -> tuple[float, float, int]:
    budget = float("inf") if row["budget"] is None else row["budget"]
    length = float(row["length"].rstrip("k"))
    return -length, -budget, list(TITLES).index(row["policy"])
