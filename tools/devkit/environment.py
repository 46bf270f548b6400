"""Which interpreter, ComfyUI tree and comfy-kitchen a command runs with, and the variables that say so."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from . import comfyui, kitchen, venv
from .console import DevError
from .layout import TOOLS

COMFYUI_PATH = "COMFYUI_PATH"
COMFYUI_ARGS = "KITCHEN_SOL_COMFYUI_ARGS"
USE_GPU = "KITCHEN_SOL_GPU"

# Modules that ComfyUI, the pack and the tools need, looked up when nothing may be installed.
_NEEDED = (
    *("torch", "torchvision", "torchaudio", "aiohttp", "comfy_kitchen", "safetensors", "websocket"),
    *("matplotlib", "skimage"),
)


@dataclass(frozen=True)
class Options:
    """What the caller chose, for every command alike. None: not chosen."""

    install: bool = True
    comfyui: str | None = None
    kitchen: str | None = None

    @property
    def checkout(self) -> Path | None:
        """The ComfyUI tree the caller names in COMFYUI_PATH."""
        value = os.environ.get(COMFYUI_PATH, "").strip()
        return Path(value).expanduser() if value else None

    @property
    def fixed_tree(self) -> bool:
        """Only one tree can be used: the caller's own, or nothing may be downloaded."""
        return self.checkout is not None or not self.install


@dataclass(frozen=True)
class Environment:
    """An interpreter with everything installed, a ComfyUI tree, and how to tell a child process."""

    python: Path
    tree: Path
    comfyui: str
    kitchen_folder: Path | None = None
    inherit_pythonpath: bool = False

    @property
    def kitchen(self) -> str:
        return self.kitchen_folder.name.partition("-")[2] if self.kitchen_folder else "installed"

    def variables(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a child process."""
        result = dict(os.environ)
        result.pop("PYTHONHOME", None)
        search = [str(self.kitchen_folder)] if self.kitchen_folder else []
        # The packages of an environment of the caller's own may come by PYTHONPATH; ours has them all.
        if self.inherit_pythonpath and result.get("PYTHONPATH"):
            search.append(result["PYTHONPATH"])
        result.pop("PYTHONPATH", None)
        if search:
            result["PYTHONPATH"] = os.pathsep.join(search)
        result[COMFYUI_PATH] = str(self.tree)
        result["PYTHONUNBUFFERED"] = "1"
        result.update(extra or {})
        return result

    def script(self, name: str) -> list[str]:
        """The start of a command line that runs ``tools/<name>.py``."""
        return [str(self.python), str(TOOLS / f"{name}.py")]


def prepare(options: Options) -> Environment:
    """Make or find everything that ``options`` ask for. Raises DevError with what is missing."""
    if not options.install:
        result = _as_it_is(options)
    elif options.checkout is not None:
        _refuse_version(options)
        tree = comfyui.check_tree(options.checkout)
        result = Environment(venv.ensure(tree), tree, "checkout")
    else:
        # One environment, made for the default tree, serves the older ones: the lists differ in pins only.
        version = options.comfyui or comfyui.DEFAULT
        result = Environment(venv.ensure(comfyui.ensure(comfyui.DEFAULT)), comfyui.ensure(version), version)
    if options.kitchen is None:
        return result
    return replace(result, kitchen_folder=kitchen.ensure(result.python, options.kitchen, options.install))


def _as_it_is(options: Options) -> Environment:
    if options.checkout is None:
        raise DevError(f"--no-install needs {COMFYUI_PATH}: set it to the folder of a ComfyUI checkout")
    _refuse_version(options)
    tree = comfyui.check_tree(options.checkout)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise DevError(f"--no-install, but {sys.executable} lacks: {', '.join(missing)}")
    return Environment(Path(sys.executable), tree, "checkout", inherit_pythonpath=True)


def _refuse_version(options: Options) -> None:
    if options.comfyui is not None:
        raise DevError(f"--comfyui chooses a download, but {COMFYUI_PATH} names a checkout; use one of them")
