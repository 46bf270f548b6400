"""``dev.py serve``: ComfyUI with this pack loaded, for hands-on use in a browser."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import processes
from .console import say
from .environment import Environment
from .layout import DEV, ROOT

# The bare download has no models, inputs or outputs; those of this folder survive a new download.
_BASE = DEV / "serve"
_HAS_ACCELERATOR = (
    "import torch; gpu = torch.cuda.is_available() or torch.backends.mps.is_available(); "
    "xpu = getattr(torch, 'xpu', None); raise SystemExit(0 if gpu or (xpu and xpu.is_available()) else 1)"
)


def serve(environment: Environment, arguments: Sequence[str]) -> int:
    """Run ComfyUI until it ends or Ctrl-C. Returns its exit code, 0 after Ctrl-C."""
    command = [str(environment.python), "main.py", *_pack_arguments(environment, arguments), *arguments]
    if not _chooses_device(arguments) and not _has_accelerator(environment):
        say("no GPU that PyTorch can use: adding --cpu")
        command.append("--cpu")
    say(f"ComfyUI with this pack: {address(arguments)}  (Ctrl-C ends it)")
    try:
        return processes.call(command, cwd=environment.tree, env=environment.variables())
    except KeyboardInterrupt:
        say("ComfyUI ended")
        return 0


def address(arguments: Sequence[str]) -> str:
    """The address to open, as ComfyUI derives it from its arguments."""
    host = value_of(arguments, "--listen", "127.0.0.1").split(",")[0]
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    scheme = "https" if value_of(arguments, "--tls-certfile", "") else "http"
    bracketed = f"[{host}]" if ":" in host else host
    return f"{scheme}://{bracketed}:{value_of(arguments, '--port', '8188')}"


def value_of(arguments: Sequence[str], name: str, default: str) -> str:
    """The value of ``--name value`` or ``--name=value``; the last one wins, as in argparse."""
    found = default
    for position, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            found = argument.partition("=")[2]
        elif argument == name:
            following = arguments[position + 1 : position + 2]
            found = following[0] if following and not following[0].startswith("-") else ""
    return found


def _pack_arguments(environment: Environment, arguments: Sequence[str]) -> list[str]:
    """The arguments that make ComfyUI load this repository as a custom node, from where it is.

    Its parent is added as a folder of custom nodes, and a list of names keeps ComfyUI from loading the
    neighbours. That needs no link, which on Windows takes rights that not everybody has.
    """
    base = value_of(arguments, "--base-directory", "")
    result: list[str] = []
    if not base:
        own_checkout = environment.comfyui == "checkout"
        base = str(environment.tree if own_checkout else _BASE)
        result = [] if own_checkout else ["--base-directory", base]
    custom_nodes = Path(base) / "custom_nodes"
    custom_nodes.mkdir(parents=True, exist_ok=True)
    if custom_nodes.resolve() == ROOT.parent:
        return result
    _BASE.mkdir(parents=True, exist_ok=True)
    config = _BASE / "extra_model_paths.yaml"
    # A JSON string is a YAML string too, whatever characters the path holds.
    config.write_text(f"pack:\n  custom_nodes: {json.dumps(str(ROOT.parent))}\n", encoding="utf-8")
    others = sorted(entry.name for entry in custom_nodes.iterdir() if entry.name != "__pycache__")
    result += ["--extra-model-paths-config", str(config), "--disable-all-custom-nodes"]
    return [*result, "--whitelist-custom-nodes", ROOT.name, *others]


def _chooses_device(arguments: Sequence[str]) -> bool:
    return any(argument in ("--cpu", "--directml") for argument in arguments)


def _has_accelerator(environment: Environment) -> bool:
    command = [str(environment.python), "-c", _HAS_ACCELERATOR]
    return subprocess.run(command, capture_output=True, env=environment.variables()).returncode == 0
