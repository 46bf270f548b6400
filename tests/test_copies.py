"""Two copies of the pack, and a core that grew a parameter (case 6): ComfyUI starts, the node works, and
one line of the log names the folders."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from comfyui import graphs
from comfyui.builders import TinyModel, write_lora
from comfyui.server import ComfyServer
from comfyui.startup import PACK_ROOT, comfyui_args

NODE = "KitchenInt8QuantizeModel"
SETTINGS = dict(group_size="auto", layers="blocks", ignored_layers="", lora="keep", device="auto")
LINE = "ComfyUI-Kitchen-Sol is installed "
PARTS = ("__init__.py", "pyproject.toml", "nodes", "kernels_glue")

MakeTiny = Callable[..., TinyModel]


def install(custom_nodes: Path, *folders: str) -> None:
    """Copies the pack into folders of these names, as `git clone` and a manager leave it."""
    for folder in folders:
        (custom_nodes / folder).mkdir(parents=True)
        for part in PARTS:
            source, target = PACK_ROOT / part, custom_nodes / folder / part
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)


@pytest.fixture(scope="module")
def two_copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A server with two active copies of the pack and a disabled one."""
    base = tmp_path_factory.mktemp("copies")
    install(base / "custom_nodes", "ComfyUI-Kitchen-Sol", "a stale copy", "older.disabled")
    with ComfyServer(base, pack=None, device_args=comfyui_args()) as running:
        yield running


def test_two_copies_are_reported_in_exactly_one_line(two_copies: ComfyServer) -> None:
    [line] = [line for line in two_copies.log().splitlines() if LINE in line]
    assert f"{LINE}2 times" in line
    folders = line.rpartition("remove all but one of: ")[2]
    paths = [two_copies.base / "custom_nodes" / name for name in ("ComfyUI-Kitchen-Sol", "a stale copy")]
    assert folders == ", ".join(sorted(str(path.resolve()) for path in paths))


def test_with_two_copies_both_load_and_the_node_works(two_copies: ComfyServer, tiny: MakeTiny) -> None:
    log = two_copies.log()
    assert "IMPORT FAILED" not in log and "Traceback" not in log
    model = tiny("wan")
    two_copies.add_model(model)
    graph = graphs.sampling_graph(model, model_nodes=[(NODE, SETTINGS)], save_as="copies")
    result = two_copies.run(graph).raise_for_errors()
    assert any("quantized 20 of " in text for text in result.texts_of("model_1")), result.texts
    assert two_copies.latent("copies").isfinite().all()


def test_with_two_copies_the_contract_is_served(two_copies: ComfyServer) -> None:
    import test_contract

    served = test_contract.contract_of(two_copies.object_info(NODE))
    assert served == json.loads(test_contract.FILE.read_text(encoding="utf-8"))[NODE]


def load_as_custom_nodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, custom_nodes: Path, *folders: str
) -> list[str]:
    """Loads copies by ComfyUI's own function, in this process; what they say of each other."""
    import folder_paths

    nodes = importlib.import_module("nodes")
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "custom_nodes", ([str(custom_nodes)], set()))
    monkeypatch.setattr(nodes, "NODE_CLASS_MAPPINGS", {})
    monkeypatch.setattr(nodes, "NODE_DISPLAY_NAME_MAPPINGS", {})
    # The mark of a process that has reported; other tests may have set it.
    monkeypatch.delattr(logging.getLogger("ComfyUI-Kitchen-Sol"), "copies_reported", raising=False)
    caplog.clear()
    for folder in folders:
        assert asyncio.run(nodes.load_custom_node(str(custom_nodes / folder)))
    assert NODE in nodes.NODE_CLASS_MAPPINGS
    return [record.getMessage() for record in caplog.records if LINE in record.getMessage()]


@pytest.mark.core
@pytest.mark.parametrize(
    ("installed", "loaded", "reported"),
    [
        (["sol"], ["sol"], 0),
        (["sol", "sol-old.disabled"], ["sol"], 0),
        (["sol", "sol-2"], ["sol", "sol-2"], 2),
        (["sol", "sol-2"], ["sol-2", "sol"], 2),
        (["sol", "sol-2", "sol-3"], ["sol"], 3),
    ],
)
def test_copies_seen_by_whichever_loads(
    comfy: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    installed: list[str],
    loaded: list[str],
    reported: int,
) -> None:
    install(tmp_path, *installed)
    lines = load_as_custom_nodes(monkeypatch, caplog, tmp_path, *loaded)
    assert len(lines) == (1 if reported else 0)
    for line in lines:
        assert f"{LINE}{reported} times" in line
        assert line.endswith(", ".join(str((tmp_path / name).resolve()) for name in sorted(installed)))


@pytest.mark.core
def test_other_packs_are_no_copies(
    comfy: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    install(tmp_path, "sol")
    projects = {
        "fork": b'[project]\nname = "kitchen-sol-extras"\n',
        "depends": b'[project]\nname = "x"\ndependencies = ["kitchen-sol"]\n',
        "binary": b"\xff\xfe\x00name",
    }
    for folder, content in projects.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pyproject.toml").write_bytes(content)
    (tmp_path / "a folder in its place" / "pyproject.toml").mkdir(parents=True)
    assert load_as_custom_nodes(monkeypatch, caplog, tmp_path, "sol") == []


# --- a core method that grew a parameter --------------------------------------------------------


@pytest.fixture
def newer_core(comfy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Core passes one argument more to every callback, and clone() takes one more.

    Returns the kinds of calls that the pack got with it.
    """
    import comfy.model_patcher

    patcher_class = comfy.model_patcher.ModelPatcher
    get_all, clone = patcher_class.get_all_callbacks, patcher_class.clone
    extra = object()
    seen: list[str] = []

    def is_ours(function: Any) -> bool:
        return "kernels_glue" in getattr(function, "__module__", type(function).__module__)

    def callbacks_with_more(self: Any, call_type: str) -> list[Callable]:
        def call(function: Callable, *args: Any, **kwargs: Any) -> Any:
            if not is_ours(function):
                return function(*args, **kwargs)
            seen.append(call_type)
            return function(*args, extra, **kwargs)

        return [
            lambda *args, function=function, **kwargs: call(function, *args, **kwargs)
            for function in get_all(self, call_type)
        ]

    def clone_with_more(self: Any, *args: Any, new_parameter: int = 0, **kwargs: Any) -> Any:
        seen.append("clone")
        return clone(self, *args, **kwargs)

    # The node looks for the parameter that it needs.
    clone_with_more.__signature__ = inspect.signature(clone)
    monkeypatch.setattr(patcher_class, "get_all_callbacks", callbacks_with_more)
    monkeypatch.setattr(patcher_class, "clone", clone_with_more)
    return seen


@pytest.mark.core
def test_a_core_that_passes_more_arguments_breaks_nothing(
    comfy: ModuleType, tiny: MakeTiny, newer_core: list[str]
) -> None:
    import torch

    model = tiny("wan")
    node = comfy.pack_nodes()[NODE]
    source = comfy.load_unet(model.path)
    quantized, report = comfy.run_node(node, model=source, **SETTINGS)
    assert report.startswith("quantized 20 of ")
    again = comfy.run_node(node, model=quantized.clone(), **SETTINGS)[0]
    assert again.clone(disable_dynamic=True).model is not None
    samples = comfy.sample(again, model)
    assert torch.equal(samples, comfy.sample(quantized, model)) and samples.isfinite().all()
    assert {"on_clone", "on_pre_run", "on_cleanup", "clone"} <= set(newer_core)


@pytest.mark.core
def test_the_refusal_of_lora_hooks_takes_more_arguments(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path, newer_core: list[str]
) -> None:
    from safetensors.torch import load_file

    hooks = importlib.import_module("comfy.hooks")
    model = tiny("wan")
    write_lora(tmp_path / "lora.safetensors", model, ["blocks.0.self_attn.q"])
    group = hooks.create_hook_lora(load_file(tmp_path / "lora.safetensors"), 1.0, 0.0)
    quantized, _ = comfy.run_node(comfy.pack_nodes()[NODE], model=comfy.load_unet(model.path), **SETTINGS)
    with pytest.raises(ValueError, match="the conditioning carries a LoRA hook"):
        comfy.sample(quantized, model, positive=comfy.conditioning(model, hooks=group))
    assert "on_register_all_hook_patches" in newer_core
