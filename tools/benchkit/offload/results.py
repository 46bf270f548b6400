"""The file that the processes of one benchmark share: each row is in it as soon as it is measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .rows import Row


class Results:
    """Rows, what the machine is, and the resident model's figures, which the later rows are compared with."""

    def __init__(self, path: Path):
        self._path = path
        self.machine: dict[str, Any] = {}
        self.baselines: dict[str, dict[str, Any]] = {}
        self.rows: list[Row] = []
        self.reload()

    def reload(self) -> None:
        """Read what another process has written meanwhile."""
        if self._path.is_file() and self._path.stat().st_size:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            self.machine, self.baselines, self.rows = data["machine"], data["baselines"], data["rows"]

    def save(self) -> None:
        # Replaced whole, so that whoever is stopped in the middle of it leaves the older file.
        part = self._path.with_suffix(".part")
        data = {"machine": self.machine, "rows": self.rows, "baselines": self.baselines}
        part.write_text(json.dumps(data, indent=1), encoding="utf-8")
        os.replace(part, self._path)

    def resident(self, length: str) -> float | None:
        """Seconds a step of the resident model."""
        return self.baselines.get(length, {}).get("step")

    def activations(self, length: str) -> list[float]:
        """Bytes that are no weight, at each block of the two untimed evaluations; empty if not measured."""
        return self.baselines.get(length, {}).get("activations", [])
