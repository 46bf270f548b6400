"""Running a child in the foreground, with time for it to clean up after Ctrl-C."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_PATIENCE_S = 20.0


def call(command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> int:
    """Run ``command`` and return its exit code.

    A terminal sends Ctrl-C to the child as well, which then has servers of its own to stop;
    ``subprocess.run`` would kill it after a quarter of a second. A second Ctrl-C does not wait any longer.
    """
    process = subprocess.Popen(command, cwd=cwd, env=dict(env))
    try:
        return process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    finally:
        if process.poll() is None:
            process.kill()
