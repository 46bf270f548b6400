"""The virtual environment in ``.dev/venv``: made once, brought up to date when a requirement list changes."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import files, pip
from .console import DevError, say
from .layout import DEV, ROOT, VENV, venv_python

TORCH = ("torch", "torchvision", "torchaudio")
# ruff is held within one minor version: the next one may format differently and turn a green check red.
DEV_TOOLS = ("packaging", "pytest>=8.2", "ruff>=0.17,<0.18", "websocket-client")
# Left out of ComfyUI's list: torch has a step of its own, the templates are large and optional.
_LEFT_OUT = frozenset((*TORCH, "comfyui-workflow-templates"))
_BROKEN = "installing"
# Space the environment takes. Only Linux on x86-64 gets the wheels that bring CUDA along.
_NEEDED_GB = 7.0 if sys.platform == "linux" and platform.machine() == "x86_64" else 2.5


@dataclass(frozen=True)
class Step:
    """One call of pip: the name of its log, what the developer sees, and the requirements."""

    name: str
    what: str
    arguments: tuple[str, ...]


def comfyui_requirements(tree: Path) -> list[str]:
    """The lines of ComfyUI's requirements.txt that are installed beside torch."""
    path = tree / "requirements.txt"
    if not path.is_file():
        raise DevError(f"{tree} is not a ComfyUI checkout: it has no requirements.txt")
    return [line for line in _requirement_lines(path) if _name_of(line) not in _LEFT_OUT]


def _requirement_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    stripped = (line.split(" #")[0].strip() for line in text.splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


def _name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match.group()).lower() if match else ""


def steps_for(tree: Path) -> list[Step]:
    """What is installed, in the order a user gets it: torch, then ComfyUI, then this pack.

    The pack comes last and by itself, as ComfyUI-Manager does it: its floor may lift a release that an older
    ComfyUI pins, and in one call pip would refuse the two.
    """
    return [
        Step("torch", f"{', '.join(TORCH)} (several GB, the first time takes minutes)", TORCH),
        Step("comfyui", "ComfyUI's requirements, pytest, ruff", (*comfyui_requirements(tree), *DEV_TOOLS)),
        Step("pack", "the requirements of this pack", tuple(_requirement_lines(ROOT / "requirements.txt"))),
    ]


def stamp_for(steps: Sequence[Step]) -> str:
    parts = [part for step in steps for part in (step.name, *step.arguments)]
    return f"{files.python_tag()} {files.fingerprint(*parts)}"


def ensure(tree: Path) -> Path:
    """Return the interpreter of an environment that fits ``tree``; installs only what has changed."""
    steps = steps_for(tree)
    wanted = stamp_for(steps)
    found = files.read_stamp(VENV)
    python = venv_python()
    if found == wanted and python.exists():
        return python

    started = time.monotonic()
    if not _usable(found, wanted, python):
        _create(python)
    for step in steps:
        _install(python, step)
    files.write_stamp(VENV, wanted)
    say(f"environment ready after {time.monotonic() - started:.0f} s: {VENV}")
    return python


def _usable(found: str | None, wanted: str, python: Path) -> bool:
    """Whether the folder holds an environment of this Python that pip may go on with."""
    if not python.exists() or found == _BROKEN:
        return False
    return found is not None and found.split()[0] == wanted.split()[0]


def _create(python: Path) -> None:
    if Path(sys.prefix).resolve() == VENV.resolve():
        raise DevError(f"{VENV} has to be made anew; run this command with the Python outside of it")
    DEV.mkdir(parents=True, exist_ok=True)
    if VENV.exists():
        say(f"removing {VENV}: it is incomplete or made by another Python")
        files.remove(VENV)
    free_gb = shutil.disk_usage(DEV).free / 1e9
    if free_gb < _NEEDED_GB:
        raise DevError(f"{DEV} has {free_gb:.1f} GB free; the environment needs about {_NEEDED_GB:.0f} GB")
    say(f"making {VENV} with Python {platform.python_version()}")
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True)
    if made.returncode != 0 or not python.exists():
        files.remove(VENV)
        # Debian and Ubuntu ship Python without ensurepip; their message names the package to install.
        raise DevError(f"python -m venv failed:\n{(made.stdout + made.stderr).strip()}")
    files.write_stamp(VENV, stamp_for([]))


def _install(python: Path, step: Step) -> None:
    """Run one step. A stop while pip writes packages leads to a fresh environment the next time.

    A stop before that (no network, Ctrl-C during a download) leaves the environment as it was.
    """
    say(f"installing {step.what}")
    pip.run(
        python,
        ["install", *step.arguments],
        f"pip-{step.name}",
        before_installing=lambda: files.write_stamp(VENV, _BROKEN),
    )
    # The step is whole, the list is not: keep the Python version, drop the fingerprint.
    files.write_stamp(VENV, stamp_for([]))
