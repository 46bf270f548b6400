"""The Python packages that the pack imports are declared, come with ComfyUI, or are optional and known."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from comfyui.startup import PACK_ROOT, comfyui_path
from test_import import imports

# Looked for where they are first used, and missed in words; never required.
OPTIONAL = {"flash_attn", "lpips", "sageattention", "sol_attn", "sol_attn_triton", "triton"}
DISTRIBUTIONS = {"skimage": "scikit-image", "comfy_kitchen": "comfy-kitchen", "comfy_aimdo": "comfy-aimdo"}


def required(path: Path) -> list[str]:
    """The lines of a requirements.txt that name a package."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("-")]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~ ;\[]", line)[0].lower() for line in requirements}


def test_both_lists_of_dependencies_are_equal() -> None:
    """Read as text: Python 3.10 has no reader of TOML."""
    project = (PACK_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [dependencies] = re.findall(r"^dependencies = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)
    declared = re.findall(r'"([^"]+)"', dependencies)
    assert declared == required(PACK_ROOT / "requirements.txt")
    assert "scikit-image" in declared and not names(declared) & (OPTIONAL | {"torch"})


@pytest.mark.parametrize("folder", ["nodes", "kernels_glue"])
def test_every_package_that_is_imported_is_declared_or_comes_with_comfyui(folder: str) -> None:
    tree = comfyui_path()
    own = {path.stem for path in tree.iterdir() if path.suffix == ".py" or path.is_dir()}
    here = names(required(PACK_ROOT / "requirements.txt")) | names(required(tree / "requirements.txt"))
    imported = {name.partition(".")[0] for _, name in imports(folder)} - sys.stdlib_module_names - own
    assert {name for name in imported - OPTIONAL if DISTRIBUTIONS.get(name, name) not in here} == set()
