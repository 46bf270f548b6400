"""Imports ComfyUI into the test process, in the order its main.py does."""

from __future__ import annotations

import atexit
import importlib
import os
import shlex
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

PACK_ROOT = Path(__file__).resolve().parents[2]
PATH_VARIABLE = "COMFYUI_PATH"
ARGS_VARIABLE = "KITCHEN_SOL_COMFYUI_ARGS"

_started = False


def comfyui_path() -> Path:
    """The ComfyUI folder under test. Raises RuntimeError if COMFYUI_PATH names none."""
    value = os.environ.get(PATH_VARIABLE)
    if not value:
        raise RuntimeError(f"{PATH_VARIABLE} is not set; run the tests with `python tools/dev.py test`")
    path = Path(value).resolve()
    if not (path / "main.py").is_file():
        raise RuntimeError(f"{PATH_VARIABLE}={value} is not a ComfyUI folder: it has no main.py")
    return path


def comfyui_args() -> list[str]:
    """ComfyUI's command line for the tests: KITCHEN_SOL_COMFYUI_ARGS, by default `--cpu`."""
    return shlex.split(os.environ.get(ARGS_VARIABLE, "--cpu"), posix=os.name != "nt")


def start() -> None:
    """Import ComfyUI from COMFYUI_PATH with comfyui_args(). Does nothing the second time.

    On a CUDA machine this must run before torch is imported: the allocator and dynamic VRAM are
    chosen before. Raises RuntimeError if COMFYUI_PATH names no ComfyUI.
    """
    global _started
    if _started:
        return
    root = comfyui_path()
    arguments = comfyui_args()
    if "torch" in sys.modules and "--cpu" not in arguments:
        warnings.warn("torch was imported before ComfyUI, whose allocator choice came too late", stacklevel=2)
    _put_first_on_path(root)
    _parse_args(arguments)
    _initialize_torch_and_dynamic_vram()
    _started = True


def _put_first_on_path(root: Path) -> None:
    # `python -m pytest` puts the pack's root on sys.path, whose `nodes` would hide ComfyUI's.
    sys.path[:] = [p for p in sys.path if Path(p or os.curdir).resolve() != PACK_ROOT]
    sys.path.insert(0, str(root))


def _parse_args(arguments: list[str]) -> None:
    import comfy.options

    comfy.options.enable_args_parsing()
    if "--base-directory" not in arguments:
        # ComfyUI creates its input, output and user folders where it is told to live.
        base = tempfile.mkdtemp(prefix="kitchen_sol_comfyui_")
        atexit.register(shutil.rmtree, base, ignore_errors=True)
        arguments = [*arguments, "--base-directory", base]
    argv, sys.argv = sys.argv, ["main.py", *arguments]
    try:
        importlib.import_module("comfy.cli_args")  # parses sys.argv
    finally:
        sys.argv = argv


def _initialize_torch_and_dynamic_vram() -> None:
    import comfy_aimdo.control
    from comfy.cli_args import args, enables_dynamic_vram

    if enables_dynamic_vram():
        headroom = None if args.reserve_vram is None else int(args.reserve_vram * 1024**3)
        protocols = [{"simple_vram_headroom": headroom}, {}]
        if hasattr(args, "disable_nvml_pressure"):
            protocols.insert(
                0, {"simple_vram_headroom": headroom, "nvml_pressure": not args.disable_nvml_pressure}
            )
        # The signature grew from release to release; main.py tries the newest first as well.
        for options in protocols:
            try:
                comfy_aimdo.control.init(**options)
                break
            except TypeError:
                continue

    if args.cuda_device is not None and args.cuda_device != "all":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(args.cuda_device)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Chooses torch's allocator, so it must come before anything that imports torch.
    importlib.import_module("cuda_malloc")

    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    _import_nodes_of(comfyui_path())

    management = comfy.model_management
    wanted = args.enable_dynamic_vram or (
        enables_dynamic_vram() and management.is_nvidia() and not management.is_wsl()
    )
    if not wanted or (not args.enable_dynamic_vram and management.torch_version_numeric < (2, 8)):
        return
    devices = management.get_all_torch_devices()
    try:
        ready = comfy_aimdo.control.init_devices(
            (d.index, int(args.vram_headroom * 1024**3)) for d in devices
        )
    except TypeError:
        ready = comfy_aimdo.control.init_devices(d.index for d in devices)
    if ready:
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True


def _import_nodes_of(root: Path) -> None:
    importlib.import_module("execution")  # before nodes, as in main.py
    nodes = importlib.import_module("nodes")
    if Path(nodes.__file__).resolve().parent != root:
        raise RuntimeError(f"`nodes` came from {nodes.__file__} instead of {root}: sys.path is wrong")
