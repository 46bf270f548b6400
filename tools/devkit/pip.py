"""Calling pip: a short progress on stdout, the whole output in a log, errors in plain words."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .console import DevError, say
from .layout import LOGS

_SHOWN = ("Downloading ", "Installing collected ", "Successfully installed", "ERROR", "error:")
_WIDTH = 110
_TAIL = 15

# Text in pip's output -> what it means for the developer. The first match wins.
_CAUSES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("No space left on device", "[Errno 28]", "[WinError 112]"),
        "The disk is full. The environment takes about 7 GB, and pip's downloads about 3 GB in the folder "
        "for temporary files (TMPDIR).",
    ),
    (
        ("DO NOT MATCH THE HASHES",),
        "The downloaded file is not the one expected: its sha256 differs. It was not used. Try again; if it "
        "stays, the package index serves another file.",
    ),
    (
        (
            "NewConnectionError",
            "NameResolutionError",
            "Temporary failure in name resolution",
            "getaddrinfo failed",
            "ConnectTimeoutError",
            "ReadTimeoutError",
            "ProxyError",
            "Network is unreachable",
            "Connection refused",
        ),
        "The package index cannot be reached. On a machine without a network, install the requirements by "
        "other means, set COMFYUI_PATH and pass --no-install.",
    ),
)


def run(
    python: Path,
    arguments: Sequence[str],
    log_name: str,
    env: Mapping[str, str] | None = None,
    before_installing: Callable[[], None] = lambda: None,
) -> None:
    """Run ``python -m pip`` with ``arguments``.

    ``env`` is added to the environment. ``before_installing`` is called when pip has all it needs and
    starts to write packages: what stops it from there on may leave half of one behind.
    Raises DevError with the probable cause and the log's path.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    log_path = LOGS / f"{log_name}.log"
    # A PYTHONPATH of the caller would make pip see packages that are not in the environment.
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    environment.update(PYTHONUNBUFFERED="1", PYTHONIOENCODING="utf-8", **(env or {}))
    # No input: a question nobody sees would hang the run.
    fixed = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command = [str(python), "-m", "pip", arguments[0], *fixed, *arguments[1:]]

    lines: list[str] = []
    with (
        log_path.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                lines.append(line.rstrip())
                if line.startswith("Installing collected packages"):
                    before_installing()
                if line.lstrip().startswith(_SHOWN):
                    say("  " + _shorten(line.strip()))
        except BaseException:
            # Ctrl-C in a terminal reaches pip as well; a signal to this process alone does not.
            process.terminate()
            raise
    if process.returncode != 0:
        raise DevError(explain(lines, log_path))


def explain(lines: Sequence[str], log_path: Path) -> str:
    text = "\n".join(lines)
    for needles, cause in _CAUSES:
        if any(needle in text for needle in needles):
            return f"{cause}\nThe log of pip: {log_path}"
    tail = "\n".join(f"  {line}" for line in lines[-_TAIL:])
    return f"pip failed:\n{tail}\nThe whole log: {log_path}"


def _shorten(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."
