"""comfy_kitchen missing, broken, incomplete or too old: the error names the one command that mends it.
A device on which its INT8 kernels fail or compute something else is refused.

The first runs in processes of its own, in which an import fails as it would on such a machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from comfyui.startup import PACK_ROOT, comfyui_path

probe = inprocess.pack_module("kernels_glue.probe")
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError

NODE = "Kitchen INT8 Quantize Model"
FORCE = "install --force-reinstall --no-deps comfy-kitchen"
MakeTiny = Callable[..., TinyModel]

# Stands before the scripts below: makes `import <name>` fail as if it were not installed.
BLOCKER = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""
PROBE = """
import importlib.util, sys
root = sys.argv[1]
spec = importlib.util.spec_from_file_location(
    "pack", root + "/__init__.py", submodule_search_locations=[root]
)
sys.modules["pack"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from pack.kernels_glue.errors import KitchenSolError
from pack.kernels_glue.probe import require_kitchen
try:
    print("RESULT", require_kitchen("Kitchen INT8 Quantize Model").__name__)
except KitchenSolError as error:
    print("RESULT", error)
"""
# The whole way: ComfyUI starts, loads the pack and executes the node.
IN_COMFYUI = """
import sys
sys.path.insert(0, sys.argv[1] + "/tests")
from comfyui import inprocess
inprocess.start()
node = inprocess.pack_nodes()["KitchenInt8QuantizeModel"]
try:
    inprocess.run_node(node, model=None, group_size="auto", layers="blocks", ignored_layers="", lora="keep",
                       device="auto")
except ValueError as error:
    print("RESULT", error)
"""


def run(script: str, first_on_path: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(first_on_path or "")}
    done = subprocess.run(
        [sys.executable, "-c", script, str(PACK_ROOT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.rpartition("RESULT ")[2].strip()


def refusal(problem: str, command: str) -> str:
    return f'{NODE}: {problem} Run: "{sys.executable}" -m pip {command} and restart ComfyUI.'


INSTALL = 'install -U "comfy-kitchen>=0.2.26"'


def test_the_installed_one_is_accepted() -> None:
    assert run(PROBE) == "comfy_kitchen"


def test_missing() -> None:
    message = run(BLOCKER.format(name="comfy_kitchen") + PROBE)
    assert message == refusal("comfy-kitchen is not installed.", INSTALL)


def test_missing_in_comfyui() -> None:
    """The whole way, where ComfyUI itself starts without comfy_kitchen (0.27 does, 0.30 does not)."""
    ldm = comfyui_path() / "comfy" / "ldm"
    needs_it = re.compile(r"^(import|from) comfy_kitchen", re.MULTILINE)
    if any(needs_it.search(path.read_text(encoding="utf-8")) for path in ldm.rglob("*.py")):
        pytest.skip("this ComfyUI does not start without comfy_kitchen")
    message = run(BLOCKER.format(name="comfy_kitchen") + IN_COMFYUI)
    assert message == refusal("comfy-kitchen is not installed.", INSTALL)


def test_without_packaging() -> None:
    """comfy_kitchen imports it without declaring it."""
    message = run(BLOCKER.format(name="packaging") + PROBE)
    problem = "comfy-kitchen is installed, but needs the package 'packaging', which is not."
    assert message == refusal(problem, "install packaging")


@pytest.mark.parametrize(
    ("statement", "shown"),
    [
        (
            'raise ImportError("libcudart.so.13: cannot open shared object file")',
            "ImportError: libcudart.so.13",
        ),
        ("from comfy_kitchen.no_such_part import x", "No module named 'comfy_kitchen.no_such_part'"),
        ('raise OSError("[WinError 126] a module was not found")', "OSError: [WinError 126]"),
        ('raise RuntimeError("operator already registered")', "RuntimeError: operator already registered"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_broken(tmp_path: Path, statement: str, shown: str) -> None:
    """A package that fails by itself, for which none could be installed: a folder in its place."""
    package = tmp_path / "comfy_kitchen"
    package.mkdir()
    (package / "__init__.py").write_text(statement + "\n", encoding="utf-8")
    message = run(PROBE, first_on_path=tmp_path)
    assert shown in message
    assert message.startswith(f"{NODE}: comfy-kitchen is installed, but broken (")
    assert message.endswith(f'Run: "{sys.executable}" -m pip {FORCE} and restart ComfyUI.')


def old_quantize(tensor: torch.Tensor, is_weight: bool = False) -> None:
    """The layout's function before ConvRot: no such release runs with today's ComfyUI."""


@pytest.mark.core
@pytest.mark.parametrize("change", ["no ConvRot", "no INT8"])
def test_too_old(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    import comfy_kitchen.tensor

    if change == "no INT8":
        monkeypatch.delattr(comfy_kitchen.tensor, "TensorWiseINT8Layout")
    else:
        monkeypatch.setattr(comfy_kitchen.tensor.TensorWiseINT8Layout, "quantize", staticmethod(old_quantize))
    with pytest.raises(KitchenSolError) as caught:
        probe.require_kitchen(NODE)
    version = importlib.metadata.version("comfy-kitchen")
    assert str(caught.value) == refusal(f"comfy-kitchen {version} has no INT8 ConvRot.", INSTALL)


# --- case 4: a card whose kernels fail, or compute noise ------------------------------------------


@pytest.fixture
def substitute(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable], None]]:
    """Puts another int8_linear in place of the reference one: the faulty card itself cannot be had."""
    from comfy_kitchen.registry import registry

    def put(make: Callable[[Callable], Callable]) -> None:
        backend = registry._backends["eager"]
        monkeypatch.setattr(backend, "int8_linear", make(backend.int8_linear))

    with registry.use_backend("eager"):
        probe.int8_fault.cache_clear()
        yield put
    probe.int8_fault.cache_clear()


def noise_in_tiles(real: Callable, rows: Callable[[int], bool] = lambda rows: True) -> Callable:
    """Every other tile of 16x16 outputs is noise of the right size."""

    def int8_linear(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = real(x, *args, **kwargs)
        if not rows(x[..., 0].numel()):
            return result
        row, column = (torch.arange(n, device=x.device) // 16 for n in (x[..., 0].numel(), result.shape[-1]))
        tiles = ((row[:, None] + column) % 2 == 0).view(result.shape)
        noise = torch.randn_like(result) * result.std()
        return torch.where(tiles, noise, result)

    return int8_linear


def some_turing_rows(rows: int) -> bool:
    return 97 <= rows <= 127


def fails_for_some_rows(real: Callable) -> Callable:
    def int8_linear(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if some_turing_rows(x[..., 0].numel()):
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul\nmore lines")
        return real(x, *args, **kwargs)

    return int8_linear


def run_node(comfy: ModuleType, source: Any) -> Any:
    return comfy.run_node(
        comfy.pack_nodes()["KitchenInt8QuantizeModel"],
        model=source, group_size="auto", layers="blocks", ignored_layers="", lora="keep", device="auto",
    )  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        (noise_in_tiles, r"wrong numbers with 1 rows \(relative error (0\.[2-9]\d?|1(\.\d)?)\)"),
        (
            lambda real: noise_in_tiles(real, some_turing_rows),
            r"wrong numbers with 97 rows \(relative error (0\.[2-9]\d?|1(\.\d)?)\)",
        ),
        (fails_for_some_rows, "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"),
        (lambda real: lambda x, *a, **k: real(x, *a, **k) * float("nan"), r"relative error nan\)"),
    ],
    ids=["noise", "noise for 97..127 rows", "error for 97..127 rows", "nan"],
)
def test_a_device_with_faulty_kernels_is_refused_by_name(
    comfy: ModuleType, tiny: MakeTiny, substitute: Callable, fault: Callable, shown: str
) -> None:
    source = comfy.load_unet(tiny("wan").path)
    substitute(fault)
    with pytest.raises(KitchenSolError) as caught:
        run_node(comfy, source)
    message = str(caught.value)
    device = probe._device_name(source.load_device)
    assert message.startswith(f"{NODE}: comfy_kitchen's INT8 kernels do not work on {device} in torch.")
    assert "with group size 256: " in message and re.search(shown, message), message
    assert message.endswith("-m pip install -U comfy-kitchen), or remove this node.")


@pytest.mark.core
def test_sound_kernels_pass_for_every_group_and_dtype() -> None:
    import comfy.model_management

    device = comfy.model_management.get_torch_device()
    probe.int8_fault.cache_clear()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for group_size in (256, 64, 16):
            assert probe.int8_fault(device, dtype, group_size) == ""


# --- which backend runs -------------------------------------------------------------------------


@pytest.mark.core
def test_the_backend_in_use_is_named() -> None:
    from comfy_kitchen.registry import registry

    with registry.use_backend("eager"):
        backend = probe.int8_backend(torch.device("cpu"))
    assert str(backend) == "eager (reference kernels, slow: there is no GPU)"


@pytest.mark.parametrize(
    ("device", "cuda", "remark"),
    [
        (
            "cuda",
            "12.8",
            "slow: comfy_kitchen's CUDA kernels need a torch built for CUDA 13, this one is for 12.8",
        ),
        ("cuda", "13.0", "slow: comfy_kitchen has no INT8 kernel for this device"),
        ("cuda", None, "slow: comfy_kitchen has no INT8 kernel for this device"),
        ("mps", None, "slow: comfy_kitchen has no INT8 kernel for this device"),
        ("cpu", "12.8", "reference kernels, slow: there is no GPU"),
    ],
)
def test_the_remark_on_the_slow_backend(device: str, cuda: str | None, remark: str) -> None:
    """A torch for CUDA 12.8 or a Mac cannot be installed beside the one that runs the tests."""
    assert probe._eager_remark(device, cuda) == remark
