"""Starts ComfyUI before any test module is imported, and shares tiny models and a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

# Triton reads this when it is imported; its interpreter runs the kernels on a CPU.
if os.environ.get("KITCHEN_SOL_GPU") != "1":
    os.environ["TRITON_INTERPRET"] = "1"

# Nothing imported here may import torch: pytest_sessionstart comes first.
from comfyui import inprocess, startup
from comfyui.server import ComfyServer

if TYPE_CHECKING:
    from comfyui.builders import TinyModel


def pytest_sessionstart() -> None:
    """Import ComfyUI now: on a CUDA machine that must precede a test module's `import torch`."""
    try:
        startup.start()
    except RuntimeError as error:
        pytest.exit(str(error), returncode=4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests unless KITCHEN_SOL_GPU=1 and there is a CUDA device."""
    import torch

    if os.environ.get("KITCHEN_SOL_GPU") == "1" and torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and KITCHEN_SOL_GPU=1")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def comfy() -> ModuleType:
    """comfyui.inprocess, with ComfyUI imported."""
    inprocess.start()
    return inprocess


@pytest.fixture(scope="session")
def tiny(comfy: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """tiny(family, **arguments of its write function): a tiny model, written once a session.

    Skips the test where the imported ComfyUI does not have the family.
    """
    from comfyui import builders

    folder: Path = tmp_path_factory.mktemp("tiny")
    built: dict[tuple[Any, ...], TinyModel] = {}

    def make(family: str, **arguments: Any) -> TinyModel:
        if family not in builders.supported_families():
            pytest.skip(f"this ComfyUI has no {family} model")
        key = (family, *sorted((name, repr(value)) for name, value in arguments.items()))
        if key not in built:
            name = arguments.pop("name", f"{family}_{len(built)}.safetensors")
            built[key] = builders.FAMILIES[family](folder, name=name, **arguments)
        return built[key]

    return make


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A running ComfyUI server with the pack and the test nodes, for the whole session."""
    base = tmp_path_factory.mktemp("server")
    with ComfyServer(base, device_args=startup.comfyui_args()) as running:
        yield running


@pytest.fixture
def inference() -> Iterator[None]:
    """Inference mode, in which ComfyUI's executor runs nodes, loaders and samplers."""
    import torch

    with torch.inference_mode():
        yield
