"""``dev.py test``: which test runs there are, running them one after the other, the table at the end."""

from __future__ import annotations

import os
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import cuda, files, processes
from .console import DevError, say, table, title
from .environment import COMFYUI_ARGS, USE_GPU, Environment, Options, prepare
from .layout import REPORTS, ROOT

NEWER_KITCHEN = "0.2.40"
OLDER_COMFYUI = "0.27"

# ``python -m pytest`` would put the current folder, the pack's root, on sys.path, where its ``nodes`` would
# hide ComfyUI's module of that name. (The switch -P for this came with Python 3.11.)
_PYTEST = (
    "import sys; sys.path[:] = filter(None, sys.path); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)
_NO_TESTS_COLLECTED = 5


@dataclass(frozen=True)
class Run:
    """One pytest process. ``comfyui_args`` None: whatever the caller's environment says."""

    name: str
    marker: str | None = None
    comfyui: str | None = None
    kitchen: str | None = None
    comfyui_args: str | None = None
    gpu: bool = False


@dataclass(frozen=True)
class Outcome:
    """A row of the table at the end."""

    name: str
    result: str
    failed: bool
    seconds: float
    counts: dict[str, int] | None = None


def plan(options: Options, quick: bool, gpu: bool, caller_args: str) -> list[Run]:
    """The test runs that the options ask for, first to last."""
    chosen = Run("", comfyui=options.comfyui, kitchen=options.kitchen)
    if gpu:
        on_gpu = replace(chosen, marker="gpu", gpu=True)
        runs = [
            replace(on_gpu, name="gpu tests, default arguments", comfyui_args=""),
            replace(on_gpu, name="gpu tests, --disable-dynamic-vram", comfyui_args="--disable-dynamic-vram"),
        ]
        if caller_args:
            runs.append(replace(on_gpu, name=f"gpu tests, {caller_args}", comfyui_args=caller_args))
        return runs
    runs = [replace(chosen, name="whole suite")]
    if quick or options.comfyui or options.kitchen:
        return runs
    runs.append(Run("core tests, --cpu --bf16-unet", marker="core", comfyui_args="--cpu --bf16-unet"))
    if not options.fixed_tree:
        runs.append(Run("core tests", marker="core", kitchen=NEWER_KITCHEN))
        runs.append(Run("core tests", marker="core", comfyui=OLDER_COMFYUI))
    return runs


def run_all(options: Options, runs: Sequence[Run], lint: bool, pytest_args: Sequence[str]) -> int:
    """Run everything, also after a failure. Returns 0 if all went well, else 1."""
    # Everything is fetched before the first test, so that a missing network shows at once.
    environments = [_environment_for(run, options) for run in runs]
    if any(run.gpu for run in runs):
        _require_cuda(environments[0])
    outcomes: list[Outcome] = []
    if lint:
        for arguments in (["check", "."], ["format", "--check", "."]):
            outcomes.append(_run_ruff(environments[0], arguments))
    for number, (run, environment) in enumerate(zip(runs, environments, strict=True), start=1):
        title(f"run {number} of {len(runs)}: {_label(run, environment)}")
        outcomes.append(_run_pytest(run, environment, number, pytest_args))
    _print_summary(outcomes)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _environment_for(run: Run, options: Options) -> Environment:
    return prepare(replace(options, comfyui=run.comfyui, kitchen=run.kitchen))


def _require_cuda(environment: Environment) -> None:
    """Without a device every gpu test would be skipped, which looks like success."""
    if not cuda.is_there(environment.python, environment.variables()):
        raise DevError(f"--gpu needs a CUDA device, and PyTorch in {environment.python} finds none")


def _label(run: Run, environment: Environment) -> str:
    return f"{run.name} (ComfyUI {environment.comfyui}, comfy-kitchen {environment.kitchen})"


def _run_ruff(environment: Environment, arguments: Sequence[str]) -> Outcome:
    name = f"ruff {' '.join(arguments[:-1])}"
    title(name)
    present = subprocess.run([str(environment.python), "-c", "import ruff"], capture_output=True)
    if present.returncode != 0:
        say("not run: ruff is not installed")
        return Outcome(name, "not run: not installed", False, 0.0)
    started = time.monotonic()
    command = [str(environment.python), "-m", "ruff", *arguments]
    code = processes.call(command, cwd=ROOT, env=environment.variables())
    return Outcome(name, "ok" if code == 0 else "FAILED", code != 0, time.monotonic() - started)


def _run_pytest(run: Run, environment: Environment, number: int, pytest_args: Sequence[str]) -> Outcome:
    REPORTS.mkdir(parents=True, exist_ok=True)
    report = REPORTS / f"run-{number}.xml"
    files.remove(report)
    command = [str(environment.python), "-c", _PYTEST, f"--junitxml={report}"]
    if run.marker:
        command += ["-m", run.marker]
    # Set for every run: a value the caller left in the environment must not turn CPU runs into GPU runs.
    variables = {USE_GPU: "1" if run.gpu else "0"}
    # The models are tiny: more threads spend their time waiting for each other.
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    if run.comfyui_args is not None:
        variables[COMFYUI_ARGS] = run.comfyui_args
    started = time.monotonic()
    code = processes.call([*command, *pytest_args], cwd=ROOT, env=environment.variables(variables))
    seconds = time.monotonic() - started
    # A selection by the caller may match nothing in a run; a run of its own that finds no test is a mistake.
    nothing_selected = code == _NO_TESTS_COLLECTED and bool(pytest_args)
    counts = _read_counts(report)
    if nothing_selected:
        result = "no test selected"
    elif code == 0:
        result = "ok"
    else:
        result = f"FAILED (exit code {code})"
    failed = code != 0 and not nothing_selected
    return Outcome(_label(run, environment), result, failed, seconds, counts)


def _read_counts(report: Path) -> dict[str, int] | None:
    """Numbers of tests by outcome, in pytest's words, or None if pytest wrote no report."""
    try:
        suites = ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    totals = {key: 0 for key in ("tests", "failures", "errors", "skipped")}
    for suite in suites.iter("testsuite"):
        for key in totals:
            totals[key] += int(suite.get(key, "0"))
    passed = totals["tests"] - totals["failures"] - totals["errors"] - totals["skipped"]
    return {
        "failed": totals["failures"],
        "passed": max(passed, 0),
        "skipped": totals["skipped"],
        "errors": totals["errors"],
    }


def _describe(counts: dict[str, int] | None) -> str:
    if counts is None:
        return ""
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "no tests"


def _print_summary(outcomes: Sequence[Outcome]) -> None:
    title("summary")
    rows = [(o.name, o.result, _describe(o.counts), f"{o.seconds:.1f}") for o in outcomes]
    say(table(("run", "result", "tests", "seconds"), rows))
    # The sum of all runs, in the form of pytest's own last line, for readers of the end of a log.
    total: dict[str, int] = {}
    for outcome in outcomes:
        for word, count in (outcome.counts or {}).items():
            total[word] = total.get(word, 0) + count
    seconds = sum(outcome.seconds for outcome in outcomes)
    say(f"\n{f' {_describe(total)} in {seconds:.2f}s ':=^80}")
