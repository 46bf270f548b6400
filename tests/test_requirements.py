"""An older ComfyUI: where something that the pack needs is missing, the pack still loads and its node
stops with one sentence that names it.

Each needed thing is removed from the real modules in turn.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from comfyui import inprocess

pytestmark = pytest.mark.core

INT8, SOL, OFFLOAD = "KitchenInt8QuantizeModel", "KitchenSolAttentionPatch", "KitchenLayerwiseOffload"
COMPARE = "KitchenCompareModels"
# The package below kernels_glue that holds a node's code, and what it requires.
PACKAGES = {INT8: "quantization", SOL: "attention", OFFLOAD: "offload", COMPARE: "compare"}
REQUIREMENTS = {
    node: inprocess.pack_module(f"kernels_glue.{package}.requirements") for node, package in PACKAGES.items()
}
DISPLAY_NAMES = {
    INT8: "Kitchen INT8 Quantize Model",
    SOL: "Sol Attention Patch",
    OFFLOAD: "Layerwise Offload",
    COMPARE: "Kitchen Compare Models",
}
INT8_INPUTS = {
    "group_size": "auto",
    "layers": "blocks",
    "ignored_layers": "",
    "lora": "keep",
    "device": "auto",
}
# What a node is run with besides a model.
INPUTS: dict[str, dict[str, Any]] = {INT8: INT8_INPUTS, COMPARE: {"filename_prefix": ""}}
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError
GLUE = Path(inprocess.load_pack().__file__).parent / "kernels_glue"

# What the code calls its variables that hold a ModelPatcher.
PATCHERS = ("source", "patcher", "clone", "root", "quantized")
LACKS, TAIL = ": this ComfyUI lacks ", ". Update ComfyUI to 0.27 or newer."


def refusal(comfy: ModuleType, node: str = INT8) -> str:
    """What the node says is lacking; it is run without a model, which it must not get to.

    Without ComfyUI's executor, which uses some of the removed parts itself.
    """
    with pytest.raises(KitchenSolError) as caught:
        comfy.pack_nodes()[node].execute(model=None, **INPUTS.get(node, {}))
    message, head = str(caught.value), DISPLAY_NAMES[node] + LACKS
    assert message.startswith(head) and message.endswith(TAIL), message
    return message.removeprefix(head).removesuffix(TAIL)


@pytest.mark.parametrize("node", PACKAGES)
def test_this_comfyui_has_everything(node: str) -> None:
    REQUIREMENTS[node].require_comfyui()


@pytest.mark.parametrize(
    ("node", "name"), [(node, name) for node, module in REQUIREMENTS.items() for name in module.NAMES]
)
def test_a_missing_name_is_named(
    comfy: ModuleType, monkeypatch: pytest.MonkeyPatch, node: str, name: str
) -> None:
    owner, _, attribute = name.rpartition(".")
    # A class may inherit what it is asked for.
    for cls in getattr(pkgutil.resolve_name(owner), "__mro__", [pkgutil.resolve_name(owner)]):
        if attribute in vars(cls):
            monkeypatch.delattr(cls, attribute)
    assert refusal(comfy, node) == name


@pytest.mark.parametrize(
    ("node", "name", "parameter"),
    [(node, *pair) for node in (INT8, OFFLOAD, COMPARE) for pair in REQUIREMENTS[node].PARAMETERS],
)
def test_a_missing_parameter_is_named(
    comfy: ModuleType, monkeypatch: pytest.MonkeyPatch, node: str, name: str, parameter: str
) -> None:
    owner, _, attribute = name.rpartition(".")
    monkeypatch.setattr(
        pkgutil.resolve_name(owner), attribute, without(pkgutil.resolve_name(name), parameter)
    )
    assert refusal(comfy, node) == f"{name}({parameter}=...)"


def test_a_missing_weight_format_is_named(comfy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(pkgutil.resolve_name("comfy.quant_ops.QUANT_ALGOS"), "int8_tensorwise")
    assert refusal(comfy) == "the weight format int8_tensorwise (comfy.quant_ops.QUANT_ALGOS)"


@pytest.mark.parametrize("method", ["set_weight", "convert_weight"])
def test_quantized_layers_that_would_drop_a_lora_are_named(
    comfy: ModuleType, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    ops = importlib.import_module("comfy.ops")
    real = ops.mixed_precision_ops

    def lacking(*args: Any, **kwargs: Any) -> type:
        operations = real(*args, **kwargs)  # makes its classes anew on each call
        delattr(operations.Linear, method)
        return operations

    monkeypatch.setattr(ops, "mixed_precision_ops", lacking)
    assert refusal(comfy) == f"comfy.ops.mixed_precision_ops().Linear.{method}"


@pytest.mark.parametrize("module", ["comfy.quant_ops", "comfy.patcher_extension", "comfy.float"])
def test_a_missing_module_is_named_with_all_that_is_needed_of_it(
    comfy: ModuleType, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    parent, _, leaf = module.rpartition(".")
    comfy.pack_nodes()
    monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
    monkeypatch.delattr(importlib.import_module(parent), leaf)
    expected = [name for name in REQUIREMENTS[INT8].NAMES if name.startswith(module + ".")]
    assert expected and refusal(comfy) == ", ".join(expected)


def test_the_pack_loads_without_any_of_it(comfy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {name for module in REQUIREMENTS.values() for name in module.NAMES}:
        owner, _, attribute = name.rpartition(".")
        monkeypatch.delattr(pkgutil.resolve_name(owner), attribute, raising=False)
    package = "kitchen_sol_on_an_old_comfyui"
    try:
        nodes = inprocess.pack_nodes(package)
        for node, name in DISPLAY_NAMES.items():
            assert nodes[node].GET_NODE_INFO_V1()["display_name"] == name
    finally:
        for loaded in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[loaded]


@pytest.mark.parametrize(
    ("node", "some"),
    [
        (INT8, ("ops.pick_operations", "quant_ops.QuantizedTensor", "model_patcher.ModelPatcher.clone")),
        (SOL, ("samplers.calculate_sigmas", "model_patcher.ModelPatcher.clone")),
        (OFFLOAD, ("model_patcher.wipe_lowvram_weight", "patcher_extension.CallbacksMP")),
        (COMPARE, ("sample.sample_custom", "model_patcher.ModelPatcher.clone")),
    ],
)
def test_everything_that_the_code_uses_by_name_is_required(node: str, some: tuple[str, ...]) -> None:
    """So that a new use cannot be forgotten in the list."""
    used = {name for path in files_of(PACKAGES[node]) for name in uses_of_comfy(path)}
    assert {f"comfy.{name}" for name in some} <= used
    known = REQUIREMENTS[node].NAMES
    assert {name for name in used if not any(f"{k}.".startswith(f"{name}.") for k in known)} == set()


def files_of(package: str) -> set[Path]:
    """The files of a package below kernels_glue, and those that they import."""
    found: set[Path] = set()
    waiting = set((GLUE / package).rglob("*.py"))
    while waiting:
        path = waiting.pop()
        found.add(path)
        waiting |= set(imports_of(path)) - found
    return found


def imports_of(path: Path) -> Iterator[Path]:
    """The files of the pack that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        # A name is a module of that folder, or something that the module of that name has.
        candidates = [folder.with_suffix(".py"), *(folder / f"{alias.name}.py" for alias in node.names)]
        yield from (file for file in candidates if file.is_file())


def uses_of_comfy(path: Path) -> Iterator[str]:
    """Dotted names of what a file takes from ComfyUI when it runs."""
    patcher_class = importlib.import_module("comfy.model_patcher").ModelPatcher
    tree = ast.parse(path.read_text(encoding="utf-8"))
    only_typing = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    short = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    for node in ast.walk(tree):
        if node in only_typing:
            continue
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.startswith("comfy."):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            first, dot, rest = ast.unparse(node).partition(".")
            name = short.get(first, first) + dot + rest
            owner, _, attribute = name.rpartition(".")
            if name.startswith("comfy.") and name.count(".") == 2 and "(" not in name:
                yield name
            elif owner in PATCHERS and attribute in vars(patcher_class):
                yield f"comfy.model_patcher.ModelPatcher.{attribute}"


def without(function: Callable, parameter: str) -> Callable:
    """A function with the signature of `function` before it had the parameter."""

    def older(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.name != parameter]
    older.__signature__ = signature.replace(parameters=kept)
    return older
