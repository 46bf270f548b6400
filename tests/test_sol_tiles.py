"""How the Triton kernel is cut for a device: the lists fit the devices, and a timing chooses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.startup import PACK_ROOT
from sol_doubles import meta

tiles = inprocess.pack_module("kernels_glue.attention.sol_tiles")
timings = inprocess.pack_module("kernels_glue.attention.timings")
measured = inprocess.pack_module("kernels_glue.attention.measured")

# KiB of shared memory of a multiprocessor, and how much of it one program can have (CUDA C++ Programming
# Guide, compute capabilities); 64 Ki registers on all of them.
SHARED = {(8, 0): (164, 163), (8, 9): (100, 99), (9, 0): (228, 227), (10, 0): (228, 227), (12, 0): (100, 99)}

# Not in this process, whose Triton interprets. Prints the bytes of shared memory of each compiled kernel.
COMPILE = """
import importlib, json, sys, types
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
package = sys.modules["attention"] = types.ModuleType("attention")
package.__path__ = [sys.argv[1]]  # without its __init__, which wants ComfyUI
modules = [importlib.import_module("attention." + name) for name in ("sol_kernels", "sol_means")]
POINTERS = {"spread": "fp32", "flags": "i8", "entries": "i32", "next_tile": "i32", "exact_pairs": "i64"}
for name, sm, dtype, fixed, described, warps in json.loads(sys.argv[2]):
    kernel = next(getattr(module, name) for module in modules if hasattr(module, name))
    signature, constants, attributes = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        pointer = POINTERS.get(argument)
        if argument in ("q", "k", "v", "out", "k_mean", "v_mean", "centred", "centre"):
            pointer = "fp32" if name in ("block_means", "centre_keys") and argument == "k_mean" else dtype
        if argument in fixed:
            signature[argument], constants[(index,)] = "constexpr", fixed[argument]
        elif pointer and argument in described:
            signature[argument] = f"tensordesc<{dtype}{described[argument]}>"
        elif pointer:
            signature[argument] = "*" + pointer
        else:
            signature[argument] = "fp32" if argument in ("scale", "tau") else "i32"
        if signature[argument].startswith("*") or argument.endswith(("_row", "_head", "_batch")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps})
    print("shared", compiled.metadata.shared, flush=True)
"""

Case = tuple[str, int, str, dict[str, Any], dict[str, list[int]], int]


def attend(
    sm: int, tile: Any, head_dim: int = 128, dtype: str = "bf16", exact_variance: bool = False
) -> Case:
    fixed = {
        "D": head_dim,
        "GROUP": tile.group,
        "HALVES": tile.halves,
        "DESCRIPTORS": tile.descriptors,
        "EXACT_VARIANCE": exact_variance,
        "SHIFT": 16.0,
        "POOLED_STAGES": tile.pooled_stages,
        "EXACT_STAGES": tile.exact_stages,
    }
    return "attend", sm, dtype, fixed, described(tile, head_dim), tile.warps


def described(tile: Any, head_dim: int) -> dict[str, list[int]]:
    """The shapes of blocks that descriptors copy, by argument."""
    if not tile.descriptors:
        return {}
    part = head_dim // tile.halves
    rows = {"q": [1, 64, 1, head_dim], "k": [1, 64, 1, head_dim], "v": [1, 64, 1, part]}
    group = tile.group
    return {**rows, "k_mean": [1, group, head_dim], "v_mean": [1, group, part]}


def compiled(cases: list[Case], cache: Path) -> list[int]:
    """Bytes of shared memory of each."""
    folder = PACK_ROOT / "kernels_glue" / "attention"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", COMPILE, str(folder), json.dumps(cases)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-4000:]
    return [int(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("shared")]


@pytest.mark.parametrize("sm", SHARED, ids=str)
def test_tiles_compile_and_fit(sm: tuple[int, int], tmp_path: Path) -> None:
    """Without a GPU: Triton and ptxas compile for any. Two programs of the first tile fit."""
    pytest.importorskip("triton")
    number = sm[0] * 10 + sm[1]
    listed = tiles.tiles_for(sm)
    by_pointers = [replace(tile, descriptors=False) for tile in listed if tile.descriptors]
    every = [*listed, *by_pointers]
    found = compiled([attend(number, tile) for tile in every], tmp_path)
    multiprocessor, program = (kib * 1024 for kib in SHARED[sm])
    for tile, shared in zip(every, found, strict=True):
        print(f"SM {sm[0]}.{sm[1]} {tile}: {shared / 1024:.0f} KiB")
        assert shared <= program
    assert 2 * (found[0] + 1024) <= multiprocessor  # each program also takes 1 KiB for the system


@pytest.mark.parametrize(("sm", "index"), [(80, 0), (90, 0), (100, 0), (120, -2)])
def test_the_other_kernels_and_variants_compile_and_fit(sm: int, index: int, tmp_path: Path) -> None:
    """At 12.0 with descriptors and the values in halves."""
    pytest.importorskip("triton")
    tile = tiles.tiles_for((sm // 10, 0))[index]
    fixed = {"D": 128, "HALVES": tile.halves, "DESCRIPTORS": tile.descriptors, "SHIFT": 0.0, "STAGES": 2}
    cases = [
        attend(sm, tile, head_dim=64),
        attend(sm, tile, dtype="fp16", exact_variance=True),
        ("block_means", sm, "bf16", {"D": 128}, {}, 1),
        ("centre_keys", sm, "bf16", {"D": 128, "W": 32, "GROUP": 256}, {}, 4),
        ("attend_exactly", sm, "fp16", fixed, described(tile, 128), 4),
    ]
    found = compiled(cases, tmp_path)
    assert len(found) == len(cases)
    assert max(found) <= SHARED[sm // 10, 0][1] * 1024


def test_devices_without_a_list_take_the_one_that_needs_least() -> None:
    assert tiles.tiles_for((8, 6)) == tiles.tiles_for((11, 0)) == tiles.tiles_for(None)
    assert tiles.tiles_for((9, 0)) != tiles.tiles_for((8, 6))
    assert all(len(set(map(str, tiles.tiles_for(sm)))) == len(tiles.tiles_for(sm)) for sm in SHARED)


# --- choosing ------------------------------------------------------------------------------------


class Device:
    """Stands in for a GPU: a clock that knows how long each tile takes, and some that do not run."""

    def __init__(self, path: Path, ms: Callable[[Any], float]):
        self.path, self.ms = path, ms
        self.ran: list[tuple[torch.Size, Any]] = []

    def process(self) -> Any:
        """A chooser as a new process has it, with the same file."""
        store = timings.TimingStore(self.path)
        return tiles.TileChooser(measured.MeasuredChoice("tiles", "unused", store, self.milliseconds))

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Any) -> None:
        self.ran.append((q.shape, tile))
        self.ms(tile)  # raises for a tile that does not run

    def milliseconds(self, function: Callable[[], Any], device: torch.device) -> float:
        function()
        return self.ms(self.ran[-1][1])


def choose(chooser: Any, device: Device, tokens: int = 1000, versions: str = "1", **how: Any) -> Any:
    q = meta(2, tokens, 20, 128, **how)
    return chooser.choose(q, q, q, device.run, versions)


def test_the_fastest_is_taken_and_remembered(tmp_path: Path) -> None:
    listed = tiles.tiles_for(None)
    device = Device(tmp_path / "tiles.json", lambda tile: 1.0 + (tile is not listed[1]))
    chooser = device.process()
    assert choose(chooser, device) is listed[1]
    # Each compiles and is timed, on one sample.
    assert [tile for _, tile in device.ran] == [tile for tile in listed for _ in range(2)]
    assert {shape for shape, _ in device.ran} == {torch.Size((1, 1000, 20, 128))}
    device.ran.clear()
    assert choose(chooser, device, tokens=1024) is listed[1]  # rounded to the same length
    assert choose(device.process(), device) is listed[1]
    assert device.ran == []
    for other in ({"tokens": 1025}, {"versions": "2"}, {"dtype": torch.float16}):
        choose(device.process(), device, **other)
        assert device.ran, other
        device.ran.clear()


def test_a_tile_that_does_not_run_is_left_out(tmp_path: Path) -> None:
    listed = tiles.tiles_for(None)

    def ms(tile: Any) -> float:
        if tile is listed[0]:
            raise RuntimeError("out of resource: shared memory")
        return 2.0 if tile is listed[1] else 3.0

    device = Device(tmp_path / "tiles.json", ms)
    assert choose(device.process(), device) is listed[1]
    entry = next(iter(json.loads(device.path.read_text())["timings"].values()))
    assert entry["errors"] == {str(listed[0]): "RuntimeError: out of resource: shared memory"}


def test_no_tile_runs(tmp_path: Path) -> None:
    def ms(tile: Any) -> float:
        raise ValueError("no such instruction")

    device = Device(tmp_path / "tiles.json", ms)
    with pytest.raises(measured.NothingRuns, match=r"32-2-1-2-0-4, .* failed \(.*no such instruction\)$"):
        choose(device.process(), device)
    assert not device.path.exists()


def test_out_of_memory_is_not_a_property_of_a_tile(tmp_path: Path) -> None:
    def ms(tile: Any) -> float:
        raise torch.OutOfMemoryError("no memory")

    device = Device(tmp_path / "tiles.json", ms)
    with pytest.raises(torch.OutOfMemoryError):
        choose(device.process(), device)


def test_another_list_is_timed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(tmp_path / "tiles.json", lambda tile: 1.0)
    choose(device.process(), device)
    device.ran.clear()
    other = (tiles.Tile(16, 1, 3, 3),)
    monkeypatch.setattr(tiles, "tiles_for", lambda sm: other)
    assert choose(device.process(), device) is other[0]
    assert device.ran
