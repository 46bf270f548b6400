"""Importing the pack costs nothing and changes nothing: no kernel package is loaded, ComfyUI stays as it
is, and the folders keep to their side of the schema.

The import runs in a process of its own, by the function with which ComfyUI loads a custom node.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from comfyui.startup import PACK_ROOT

HEAVY = (
    "comfy_kitchen",
    "triton",
    "matplotlib",
    "skimage",
    "lpips",
    "sageattention",
    "flash_attn",
    "sol_attn",
    "torch",
)
KERNELS = (*HEAVY, "comfy_aimdo")
PATCHABLE = ("comfy.ops", "comfy.model_patcher", "comfy.model_management", "comfy.sd")

SCRIPT = """
import asyncio, json, sys, time
sys.path.insert(0, sys.argv[1])
from comfyui import startup
startup.start()
import nodes
import test_import as helpers
from comfy_config import config_parser  # ComfyUI's own, on the first custom node
import comfy.sd
modules, core = set(sys.modules), helpers.identities()
started = time.perf_counter()
loaded = asyncio.run(nodes.load_custom_node(str(startup.PACK_ROOT)))
milliseconds = 1000 * (time.perf_counter() - started)
print("RESULT" + json.dumps({
    "loaded": loaded,
    "node": "KitchenInt8QuantizeModel" in nodes.NODE_CLASS_MAPPINGS,
    "new": sorted(set(sys.modules) - modules),
    "changed": helpers.changed(core, helpers.identities()),
    "milliseconds": milliseconds,
}))
"""


def identities() -> dict[str, Any]:
    """Every attribute of the modules in PATCHABLE, and of the classes they define, by dotted name.

    The values are the objects themselves: an id could be used again.
    """
    found = {}
    for module_name in PATCHABLE:
        module = importlib.import_module(module_name)
        for name, value in vars(module).items():
            found[f"{module_name}.{name}"] = value
            if isinstance(value, type) and (value.__module__, value.__name__) == (module_name, name):
                found.update({f"{module_name}.{name}.{key}": x for key, x in vars(value).items()})
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) is not after.get(name))


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": ""}
    tests = str(Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, tests], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.partition("RESULT")[2])


def test_comfyui_loads_the_pack_as_a_custom_node(loaded: dict[str, Any]) -> None:
    assert loaded["loaded"] and loaded["node"]
    assert any(name.endswith(".kitchen_int8") for name in loaded["new"])
    print(f"importing the pack took {loaded['milliseconds']:.0f} ms")


def test_importing_loads_no_kernel_package(loaded: dict[str, Any]) -> None:
    assert [name for name in loaded["new"] if name.partition(".")[0] in HEAVY] == []


def test_importing_loads_nothing_below_the_schema_but_pure_settings(loaded: dict[str, Any]) -> None:
    below = [name.rpartition("kernels_glue")[2] for name in loaded["new"] if "kernels_glue" in name]
    assert sorted(below) == [
        "",
        ".attention",
        ".attention.config",
        ".compare",
        ".compare.config",
        ".errors",
        ".names",
        ".offload",
        ".offload.config",
        ".quantization",
        ".quantization.config",
        ".quantization.patterns",
    ]


def test_importing_patches_nothing_of_comfyui(loaded: dict[str, Any]) -> None:
    assert loaded["changed"] == []


@pytest.mark.core
def test_running_the_node_patches_no_function_and_no_class(comfy: ModuleType, tiny: Any) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    before = identities()
    quantized, _ = comfy.run_node(
        comfy.pack_nodes()["KitchenInt8QuantizeModel"],
        model=source, group_size="auto", layers="blocks", ignored_layers="", lora="keep", device="auto",
    )  # fmt: skip
    comfy.sample(quantized, model)
    after = identities()
    names = changed(before, after)
    # What is left is ComfyUI's own state, such as the number of registered bytes.
    is_code = [name for name in names if callable(before.get(name, after.get(name))) or name not in before]
    assert is_code == []


TOOLS = """
import os, sys
from importlib import import_module
from pathlib import Path
tools = Path(sys.argv[1])
sys.path[:0] = [str(tools), str(tools.parent / "tests")]
from comfyui import inprocess
inprocess.start()
before = dict(os.environ)
for path in sorted(tools.glob("*.py")):
    import_module(path.stem)
print(sorted(before.items() ^ os.environ.items()))
"""


def test_importing_a_tool_leaves_the_environment_alone() -> None:
    """A test that imports one would choose the device of all that come after it."""
    tools = str(PACK_ROOT / "tools")
    run = subprocess.run([sys.executable, "-c", TOOLS, tools], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.split("\n")[-2] == "[]", run.stdout


def test_the_comparison_notices_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_patcher
    import comfy.ops

    before = identities()
    monkeypatch.setattr(comfy.ops, "pick_operations", lambda *args, **kwargs: None)
    monkeypatch.setattr(comfy.model_patcher.ModelPatcher, "clone", lambda self: self)
    assert changed(before, identities()) == [
        "comfy.model_patcher.ModelPatcher.clone",
        "comfy.ops.pick_operations",
    ]


# --- by reading the source ----------------------------------------------------------------------


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """(file, absolute name) of every absolute import, wherever in a file it stands."""
    paths = sorted((PACK_ROOT / folder).rglob("*.py"))
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((path.name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield path.name, node.module


def test_nodes_import_no_kernel() -> None:
    assert [x for x in imports("nodes") if x[1].partition(".")[0] in KERNELS] == []


def test_kernels_glue_imports_no_node_api() -> None:
    roots = ("comfy_api", "nodes", "server", "comfy_extras")
    assert [x for x in imports("kernels_glue") if x[1].partition(".")[0] in roots] == []


def test_the_pack_imports_itself_relatively() -> None:
    """Its folder has any name, and `nodes` is a module of ComfyUI."""
    own = ("nodes", "kernels_glue")
    for folder in own:
        assert [x for x in imports(folder) if x[1].partition(".")[0] in own] == []
    for node in ast.walk(ast.parse((PACK_ROOT / "__init__.py").read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Import)
        assert not isinstance(node, ast.ImportFrom) or node.level == 1 or node.module == "__future__"


@pytest.mark.parametrize(
    ("package", "module"),
    [
        *(("quantization", x) for x in ("config", "patterns", "plan", "roles", "report", "patch_count")),
        *(("offload", x) for x in ("config", "plan", "order", "rotation", "report", "strategy")),
        *(("compare", x) for x in ("config", "results", "recommend", "wording", "worst", "report")),
        *(("", x) for x in ("report", "units")),
    ],
)
def test_decisions_import_neither_torch_nor_comfyui(package: str, module: str) -> None:
    allowed = {*sys.stdlib_module_names}
    found = [x[1] for x in imports(f"kernels_glue/{package}") if x[0] == f"{module}.py"]
    assert found and {name.partition(".")[0] for name in found} <= allowed
