"""A process of the benchmark: makes the model and measures the rows of its plan."""

from __future__ import annotations

import argparse
import gc
import platform
import time
import traceback
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import comfy.memory_management
import comfy.model_management
import comfy.utils
import comfyui_version
import torch
from comfyui import inprocess

from ..models import BenchModel, load, random_weights
from .device import Cpu, Cuda
from .measure import Measured, blocks_of, clear, dynamic_reserve, measure, partial_budget
from .plan import (
    GIB,
    ORDINARY_RESERVE,
    SECONDS_TO_MAKE,
    ChildPlan,
    RowPlan,
    reserve_of_dynamic,
    seconds_of_row,
    timed_steps,
)
from .results import Results
from .rows import Row, activations_of, complete, one_line, waited_seconds, weights_on_device

NOT_RUN = "not run, the time was over"


class Child:
    """Measures the rows of a plan and writes each down at once."""

    def __init__(self, options: argparse.Namespace, plan: ChildPlan, model: BenchModel, results: Results):
        self.options = options
        self.plan = plan
        self.model = model
        self.results = results
        self.device = Cpu() if options.device == "cpu" else Cuda()
        self._alone: dict[int, float] = {}
        self._group: object = None
        self._patcher: Any = None
        self._texts: list[str] = []

    def run(self) -> None:
        comfy.utils.PROGRESS_BAR_ENABLED = False
        with torch.inference_mode():
            self._start()
            if time.time() + SECONDS_TO_MAKE > self.options.deadline:
                for row in self.plan.rows:
                    self._finish({**_begin(row, self.plan), "failed": NOT_RUN})
                return
            self.source = self._make()
            self.weights = comfy.model_management.module_size(self.source.model)
            self.slab = self._largest_block()
            shown = f"{self.weights / GIB:.2f} GiB, its largest block {self.slab / GIB:.3f} GiB"
            print(f"weights of the model: {shown}", flush=True)
            for row, following in zip(self.plan.rows, (*self.plan.rows[1:], None), strict=True):
                self._row(row, following is None or following.group != row.group)

    # --- before the rows ------------------------------------------------------------------------

    def _start(self) -> None:
        dynamic = "on" if comfy.memory_management.aimdo_enabled else "off"
        print(f"\n--- ComfyUI with dynamic VRAM {dynamic}: {inprocess_arguments()}", flush=True)
        if self.device.name == "cuda" and (dynamic == "on") != (self.plan.budget is not None):
            raise SystemExit(f"dynamic VRAM is {dynamic}, which this process is not for")
        self.limit = self.device.pinned_limit()
        clear()
        self.outside = self.device.memory().outside
        machine = describe_machine(self.device.name) | {"total": self.device.total(), "outside": self.outside}
        if "GPU" not in self.results.machine:
            for label in ("GPU", "versions", "Python"):
                print(f"{label}: {machine[label]}", flush=True)
        self.results.machine = machine | self.results.machine
        self.results.machine.setdefault("limits", []).append(self.limit)
        self.results.save()
        pinnable = comfy.model_management.MAX_PINNED_MEMORY / GIB
        print(
            f"pinned host to device: {self.limit / 1e9:.1f} GB/s; ComfyUI may pin {pinnable:.0f} GiB; "
            f"in use outside of torch: {self.outside / GIB:.2f} GiB",
            flush=True,
        )

    def _make(self) -> Any:
        started = time.perf_counter()
        patcher = load(random_weights(self.model, self.device.name))
        if self.options.weights == "int8":
            apply = inprocess.pack_module("kernels_glue.quantization.apply")
            config = inprocess.pack_module("kernels_glue.quantization.config").QuantizeConfig()
            patcher, _ = apply.quantize_model(patcher, config, lambda _: None)
        clear()
        print(f"made the model in {time.perf_counter() - started:.0f} s", flush=True)
        return patcher

    def _largest_block(self) -> int:
        size = comfy.model_management.module_size
        return max((size(block) for _, block in blocks_of(self.source.model.diffusion_model)), default=1)

    # --- a row ----------------------------------------------------------------------------------

    def _row(self, plan: RowPlan, last: bool) -> None:
        """last: the next row does not go on with what is loaded."""
        row = _begin(plan, self.plan)
        timed = timed_steps(plan.length, self.options.steps)
        expected = seconds_of_row(self.results.resident(plan.length), timed)
        if time.time() + expected > self.options.deadline:
            self._finish({**row, "failed": NOT_RUN})
            return
        try:
            self._measure(plan, timed, row)
        except Exception as error:
            # A refusal of the node is a result; anything else is worth its traceback.
            refusal = type(error).__name__ == "KitchenSolError"
            row["failed"] = str(error) if refusal else f"{type(error).__name__}: {error}".splitlines()[0]
            if not refusal:
                traceback.print_exc()
        try:
            if last:
                self._tidy(plan, row)
        except Exception as error:
            # After some errors of the device nothing works any more, but the row must be kept.
            _remark(row, f"could not be unloaded: {type(error).__name__}")
        self._finish(row)

    def _tidy(self, plan: RowPlan, row: Row) -> None:
        self._patcher, self._group = None, None
        gc.collect()
        clear()
        left = self.device.memory()
        # cuBLAS keeps workspaces of some tens of MiB in torch's allocator.
        if left.allocated > 2**27:
            _remark(row, f"{left.allocated / GIB:.2f} GiB left on the device by torch's tensors")
        if plan.policy == "resident":
            # Kernels are loaded on first use, and stay.
            known = self.results.machine.get("kernels", 0)
            self.results.machine["kernels"] = max(known, left.outside - self.outside)

    def _finish(self, row: Row) -> None:
        baseline = self.results.baselines.get(row["length"], {})
        row.setdefault("tokens", baseline.get("tokens"))
        complete(row, baseline.get("step"), self.limit)
        self.results.rows.append(row)
        self.results.save()
        print(one_line(row), flush=True)

    def _measure(self, plan: RowPlan, timed: int, row: Row) -> None:
        if self._group != plan.group:
            clear()
            self._group, self._patcher, self._texts = plan.group, None, []
        texts = self._texts
        with ExitStack() as around:
            prepare = None
            if plan.policy == "partial":
                prepare = around.enter_context(partial_budget(plan.budget * GIB))
            if self.plan.budget is not None and self.device.name == "cuda":
                reserve = self._reserve(plan)
                row["reserve"] = reserve
                around.enter_context(dynamic_reserve(reserve))
            if self._patcher is None:
                offloaded = plan.policy in ("stream", "core", "stream+dynamic")
                self._patcher = self._offloaded(plan, texts) if offloaded else self.source
            found = measure(self._patcher, self.model, plan.length, timed, self.device, prepare)
        self._write(plan, found, texts, row)

    def _reserve(self, plan: RowPlan) -> float:
        if plan.policy != "dynamic":
            return ORDINARY_RESERVE  # the node needs no help to hold its budget
        total, activations = self.device.total(), self.results.activations(plan.length)
        return reserve_of_dynamic(total, self._outside(), max(activations, default=0), plan.budget * GIB)

    def _outside(self) -> float:
        return self.outside + self.results.machine.get("kernels", 0)

    def _offloaded(self, plan: RowPlan, texts: list[str]) -> Any:
        apply = inprocess.pack_module("kernels_glue.offload.apply")
        config = inprocess.pack_module("kernels_glue.offload.config").OffloadConfig(
            vram_budget_gb=plan.budget, strategy=plan.policy.partition("+")[0]
        )
        patcher, _ = apply.offload_model(self.source, config, lambda report: texts.append(report.text))
        return patcher

    def _write(self, plan: RowPlan, found: Measured, texts: list[str], row: Row) -> None:
        row.update(
            tokens=found.tokens,
            step=found.step,
            steps=found.steps,
            pinned=found.pinned,
            loaded=found.loaded,
            seconds=found.seconds,
        )
        if not found.finite:
            _remark(row, "the result is not finite")
        if plan.policy == "resident":
            self._keep_baseline(plan, found, row)
        activations = self.results.activations(plan.length)
        if plan.policy == "resident":
            row["weights"] = found.loaded
        elif activations and found.blocks:
            used, reserved, allocated = (
                [getattr(memory, name) for memory in found.blocks]
                for name in ("used", "reserved", "allocated")
            )
            row["weights"] = max(weights_on_device(used, reserved, allocated, activations, self._outside()))
        if found.blocks:
            row["peak"] = max(memory.used for memory in found.blocks)
        if plan.policy == "partial":
            row["copied"] = max(0, self.weights - found.loaded)
            held = (found.loaded + found.buffer) / GIB
            if row["copied"] and not plan.budget - 2 < held <= plan.budget:
                _remark(row, f"core holds {held:.2f} GiB instead of the budget")
        if texts:
            row["text"] = texts[-1]  # earlier ones are from before the sampling
            row["waited"] = waited_seconds(row["text"])
        if plan.policy.startswith("stream"):
            row["copied"] = found.copied
            if found.copied:
                row["copies_alone"] = self._copies_alone(int(found.copied))

    def _keep_baseline(self, plan: RowPlan, found: Measured, row: Row) -> None:
        if found.loaded != self.weights:
            _remark(row, f"only {found.loaded / GIB:.2f} GiB of it were resident")
        allocated = [memory.allocated for memory in found.blocks]
        self.results.baselines[plan.length] = {
            "step": found.step,
            "tokens": found.tokens,
            "activations": activations_of(allocated, self.weights),
        }

    def _copies_alone(self, copied: int) -> float:
        if copied not in self._alone:
            self._alone[copied] = self.device.copies_alone(copied, self.slab)
        return self._alone[copied]


def _begin(row: RowPlan, child: ChildPlan) -> Row:
    return {"policy": row.policy, "length": row.length, "budget": row.budget, "child": child.name}


def _remark(row: Row, text: str) -> None:
    row["remark"] = "; ".join(filter(None, (row.get("remark"), text)))


def inprocess_arguments() -> str:
    from comfyui.startup import comfyui_args

    return " ".join(comfyui_args())


def describe_machine(device: str) -> dict[str, str]:
    """GPU and versions, as the first lines of the output name them."""
    names = ("comfy-kitchen", "comfy-aimdo")
    packages = ", ".join(f"{name} {_version(name)}" for name in names)
    return {
        "GPU": torch.cuda.get_device_name() if device == "cuda" else "none",
        "versions": f"ComfyUI {comfyui_version.__version__}, torch {torch.__version__}, {packages}",
        "Python": platform.python_version(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
