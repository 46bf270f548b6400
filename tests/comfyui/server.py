"""A real ComfyUI server in a subprocess: its folders, its start and its end."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .client import ComfyClient, NodeError, PromptRejected, RunResult
from .startup import PACK_ROOT, comfyui_path

if TYPE_CHECKING:
    import torch

    from .builders import TinyModel

__all__ = ["ComfyServer", "NodeError", "PromptRejected", "RunResult", "ServerDied", "link_folder"]

TEST_NODES = Path(__file__).resolve().parent / "testnodes"
DEFAULT_PACK_FOLDER = "ComfyUI-Kitchen-Sol"

_UNLINKED = shutil.ignore_patterns(".git", "__pycache__", ".venv", "venv", ".pytest_cache", ".ruff_cache")


class ServerDied(RuntimeError):
    """The ComfyUI process ended; the message carries the end of its log."""


class ComfyServer(ComfyClient):
    """ComfyUI in a subprocess; a context manager that starts and stops it.

    base: folder for custom_nodes, models, output and the log; made if missing.
    pack: folder of the node pack, linked into custom_nodes as `pack_folder`; None for no pack.
    device_args: ComfyUI's arguments that choose the device; () leaves it to ComfyUI.
    extra_args, env: added to the command line and to the environment.
    startup_timeout: seconds until /system_stats must answer.
    """

    def __init__(
        self,
        base: Path,
        *,
        pack: Path | None = PACK_ROOT,
        pack_folder: str = DEFAULT_PACK_FOLDER,
        comfyui: Path | None = None,
        device_args: Sequence[str] = ("--cpu",),
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        startup_timeout: float = 300.0,
    ) -> None:
        self.base = Path(base)
        self.pack = pack
        self.pack_folder = pack_folder
        self.comfyui = Path(comfyui) if comfyui is not None else comfyui_path()
        self.arguments = [*device_args, *extra_args]
        self.env = dict(env or {})
        self.python = python
        self.startup_timeout = startup_timeout
        self.log_path = self.base / "server.log"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    # --- lifetime -------------------------------------------------------------------------------

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises ServerDied if the process ends first, TimeoutError after startup_timeout.
        """
        for folder in ("custom_nodes", "models/diffusion_models", "models/loras", "input", "output"):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        link_folder(TEST_NODES, self.base / "custom_nodes" / "kitchen_sol_testnodes")
        if self.pack is not None:
            link_folder(self.pack, self.base / "custom_nodes" / self.pack_folder)
        self.port = _free_port()
        command = [
            self.python,
            str(self.comfyui / "main.py"),
            "--listen",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--base-directory",
            str(self.base),
            "--disable-api-nodes",
            "--database-url",
            "sqlite:///:memory:",
            *self.arguments,
        ]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", **self.env}
        environment["PYTHONPATH"] = _without_pack_root(environment.get("PYTHONPATH", ""))
        atexit.register(self.stop)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.base,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the process. Safe to call twice."""
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Everything the server has printed."""
        if not self.log_path.exists():
            return ""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.startup_timeout
        while True:
            self.require_alive()
            with contextlib.suppress(OSError):
                self.get("/system_stats")
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"ComfyUI did not answer within {self.startup_timeout:.0f} s\n{self._log_tail()}"
                )
            time.sleep(0.2)

    def require_alive(self) -> None:
        """Raise ServerDied with the end of the log if the process has ended."""
        if not self.alive:
            code = self._process.returncode if self._process is not None else None
            raise ServerDied(f"ComfyUI is not running (exit code {code})\n{self._log_tail()}")

    def _log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    # --- files ----------------------------------------------------------------------------------

    def add_model(self, tiny: TinyModel) -> str:
        """Put a model file where UNETLoader finds it; its name there."""
        return _place(tiny.path, self.base / "models" / "diffusion_models")

    def add_lora(self, path: Path) -> str:
        """Put a LoRA file where LoraLoaderModelOnly finds it; its name there."""
        return _place(Path(path), self.base / "models" / "loras")

    def latent(self, save_as: str = "latent") -> torch.Tensor:
        """What TestSaveLatent wrote, in the form that inprocess.sample returns."""
        import torch
        from safetensors.torch import load_file

        tensors = load_file(str(self.base / "output" / f"{save_as}.safetensors"))
        parts = [tensors[f"samples_{i}"] for i in range(len(tensors))]
        return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])


def link_folder(source: Path, link: Path) -> None:
    """Make `link` show `source`: a symlink, on Windows a junction, a copy where neither works."""
    if link.is_symlink() or link.exists():
        return
    try:
        if os.name == "nt":
            import _winapi

            _winapi.CreateJunction(str(source), str(link))
        else:
            link.symlink_to(source, target_is_directory=True)
    except OSError:
        shutil.copytree(source, link, ignore=_UNLINKED)


def _place(source: Path, folder: Path) -> str:
    target = folder / source.name
    if target.exists():
        if os.path.samefile(source, target):
            return target.name
        target.unlink()
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target.name


def _without_pack_root(search_path: str) -> str:
    # The pack's `nodes` would hide ComfyUI's; anything else there (another comfy-kitchen) is wanted.
    entries = filter(None, search_path.split(os.pathsep))
    return os.pathsep.join(entry for entry in entries if Path(entry).resolve() != PACK_ROOT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
