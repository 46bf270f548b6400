"""Among several Sol kernels that can run a call, `auto` takes the one that a timing calls the fastest.

The kernels are stand-ins and the clock is made up; real ones are timed in test_gpu_sol_triton.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui import inprocess
from sol_doubles import meta

fastest = inprocess.pack_module("kernels_glue.attention.providers.fastest")
measured = inprocess.pack_module("kernels_glue.attention.measured")
timings = inprocess.pack_module("kernels_glue.attention.timings")
routing = inprocess.pack_module("kernels_glue.attention.routing")
sol = inprocess.pack_module("kernels_glue.attention.sol")
call = inprocess.pack_module("kernels_glue.attention.call")


class Kernel:
    """Takes everything; `ms` None cannot run."""

    min_tokens = 0
    exact_queries = True

    def __init__(self, name: str, ms: float | None, unfit: str = ""):
        self.name, self.ms, self._unfit = name, ms, unfit
        self.ran: list[tuple[torch.Size, Any]] = []

    def missing(self, device: torch.device) -> str:
        return ""

    def unfit(self, *tensors: torch.Tensor) -> str:
        return self._unfit

    def unsupported(self, options: Any) -> str:
        return ""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any) -> Any:
        if self.ms is None:
            raise RuntimeError("illegal instruction")
        self.ran.append((q.shape, options))
        return sol.SolResult(q)


class Machine:
    """A clock that knows how long each kernel takes, and the file of a user."""

    def __init__(self, path: Path, *kernels: Kernel):
        self.path, self.kernels = path, kernels

    @property
    def names(self) -> list[str]:
        return [kernel.name for kernel in self.kernels]

    def process(self) -> Any:
        """What a new process has."""
        store = timings.TimingStore(self.path)
        return fastest.FastestProvider(measured.MeasuredChoice("Sol", "unused", store, self._milliseconds))

    def _milliseconds(self, way: Any, device: torch.device) -> float:
        before = [len(kernel.ran) for kernel in self.kernels]
        way()
        return next(k.ms for k, n in zip(self.kernels, before, strict=True) if len(k.ran) > n)

    def runs(self) -> list[int]:
        found = [len(kernel.ran) for kernel in self.kernels]
        for kernel in self.kernels:
            kernel.ran.clear()
        return found


def fits(*kernels: Kernel) -> list[Any]:
    return [(kernel, sol.SolOptions(1.0, 0.1 * n)) for n, kernel in enumerate(kernels, start=1)]


def choose(chooser: Any, *kernels: Kernel, tokens: int = 20000, here: Any = None, **how: Any) -> str:
    q = meta(2, tokens, 20, 128, **how)
    here = [kernel.name for kernel in kernels] if here is None else here
    provider, options = chooser.choose(q, q, q, fits(*kernels), here)
    assert (provider, options) in fits(*kernels)
    return provider.name


def test_the_fastest_is_timed_once_and_remembered(tmp_path: Path) -> None:
    slow, quick = Kernel("slow", 3.0), Kernel("quick", 2.0)
    machine = Machine(tmp_path / "sol.json", slow, quick)
    chooser = machine.process()
    assert choose(chooser, slow, quick) == "quick"
    # Compiled, then timed, with its own options, on one sample.
    assert quick.ran == [(torch.Size((1, 20000, 20, 128)), sol.SolOptions(1.0, 0.2))] * 2
    assert machine.runs() == [2, 2]
    assert choose(chooser, slow, quick, tokens=32768) == "quick"  # rounded to the same length
    assert choose(machine.process(), slow, quick) == "quick"
    assert machine.runs() == [0, 0]
    assert chooser.text(meta(1, 20000, 2, 128)) == "Sol at 32768 tokens: quick 2 ms, slow 3 ms"
    for other in ({"tokens": 40000}, {"dtype": torch.float16}):
        assert choose(chooser, slow, quick, **other) == "quick"
        assert machine.runs() == [2, 2], other


def test_one_kernel_needs_no_timing(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "sol.json", only := Kernel("only", 1.0))
    assert choose(machine.process(), only) == "only"
    assert machine.runs() == [0] and not machine.path.exists()


def test_a_call_that_suits_more_kernels_times_them_all_and_one_that_suits_less_none(tmp_path: Path) -> None:
    one, two, three = Kernel("one", 3.0), Kernel("two", 2.0), Kernel("three", 1.0)
    machine = Machine(tmp_path / "sol.json", one, two, three)
    assert choose(machine.process(), one, two, here=machine.names) == "two"
    assert machine.runs() == [2, 2, 0]
    assert choose(machine.process(), one, two, three) == "three"
    assert machine.runs() == [2, 2, 2]  # times of one run compare
    assert choose(machine.process(), one, two, here=machine.names) == "two"
    assert machine.runs() == [0, 0, 0]
    assert choose(machine.process(), one, two) == "two"  # the third has been removed
    assert machine.runs() == [2, 2, 0]


def test_a_kernel_that_does_not_run_is_not_chosen(tmp_path: Path) -> None:
    broken, works = Kernel("broken", None), Kernel("works", 9.0)
    machine = Machine(tmp_path / "sol.json", broken, works)
    chooser = machine.process()
    assert choose(chooser, broken, works) == "works"
    entry = next(iter(json.loads(machine.path.read_text())["timings"].values()))
    assert entry["errors"] == {"broken": "RuntimeError: illegal instruction"}
    assert "broken failed (RuntimeError: illegal instruction)" in chooser.text(meta(1, 20000, 2, 128))


def test_what_failed_is_tried_once_in_the_next_process(tmp_path: Path) -> None:
    """It may have been for want of a compiler, or because another kernel took the device down."""
    mended, works = Kernel("mended", None), Kernel("works", 9.0)
    machine = Machine(tmp_path / "sol.json", mended, works)
    assert choose(machine.process(), mended, works) == "works"
    machine.runs()
    again = machine.process()
    assert choose(again, mended, works) == choose(again, mended, works) == "works"
    assert machine.runs() == [0, 0]  # still broken: the times that are there hold
    mended.ms = 1.0
    assert choose(again, mended, works) == "works"
    assert choose(machine.process(), mended, works) == "mended"
    assert machine.runs() == [3, 2]


def test_where_none_runs_the_call_is_dense(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "sol.json", Kernel("broken", None), Kernel("worse", None))
    said = "broken, worse failed (RuntimeError: illegal instruction)"
    with pytest.raises(measured.NothingRuns) as raised:
        choose(machine.process(), *machine.kernels)
    assert str(raised.value) == said
    q = torch.empty((1, 4, 300, 128), dtype=torch.bfloat16, device="meta")
    router = routing.Router(machine.kernels, 0, machine.process())
    reason = router.choose(call.read_call(q, q, q, 4, skip_reshape=True), lambda _: sol.SolOptions(1.0, 0.1))
    assert reason == routing.Reason(said)
    # They are not tried again at every call.
    assert router.missing(machine.kernels[0], q.device) == "RuntimeError: illegal instruction"


def test_the_router_asks_only_about_kernels_that_take_the_call(tmp_path: Path) -> None:
    no, slow, quick = Kernel("no", 0.1, unfit="head_dim"), Kernel("slow", 3.0), Kernel("quick", 2.0)
    machine = Machine(tmp_path / "sol.json", no, slow, quick)
    q = torch.empty((1, 4, 300, 128), dtype=torch.bfloat16, device="meta")
    made = call.read_call(q, q, q, 4, skip_reshape=True)

    def options(provider: Kernel) -> Any:
        return sol.SolOptions(1.0, 0.1)

    router = routing.Router(machine.kernels, 0, machine.process())
    assert router.choose(made, options) == (quick, options(quick))
    assert router.timing_text(made) == "Sol at 512 tokens: quick 2 ms, slow 3 ms"
    assert machine.runs() == [0, 2, 2]
    in_order = routing.Router(machine.kernels, 0)
    assert in_order.choose(made, options) == (slow, options(slow))
    assert in_order.timing_text(made) == ""
    router.give_up(quick, "it failed")
    assert router.choose(made, options) == (slow, options(slow))
