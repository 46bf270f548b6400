"""Measures Layerwise Offload on a CUDA GPU, against the resident model and ComfyUI's own offloading.

Run by `python tools/dev.py bench offload`. One run is one model and one kind of weights, and prints one
table; every figure in it comes from that run. The weights are random; the model, the loader, the nodes and
the sampler are ComfyUI's and the pack's own. A step is the median time between two evaluations, by events
of the compute stream; the first evaluation is left out.

Dynamic VRAM is chosen when ComfyUI starts, so the rows come from several processes, each with its own
model: one without it (resident, partial, stream), then one for each budget with it (dynamic, core, and one
row of stream). KITCHEN_SOL_COMFYUI_ARGS is set for each of them and has no effect from outside.

Weights on the device are measured over the whole device at every block of two untimed evaluations: what is
in use outside of torch's allocator, plus torch's tensors, less what the resident model has allocated there
that is no weight. Every row is in the JSON file as soon as it is measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from benchkit.models import MODELS, BenchModel, shrunk
from benchkit.offload import plan as planning
from benchkit.offload.plan import GIB, ChildPlan
from benchkit.offload.results import Results
from benchkit.offload.rows import markdown
from devkit import cuda

# A process that has not stopped by itself this long after the end of the time is stopped.
_GRACE_S = 45.0


def main() -> int:
    options = read_options()
    if options.table:
        show_tables(options.table)
        return 0
    model = MODELS[options.model]
    if options.device == "cpu":
        model = shrunk(model)
    if options.blocks:
        model = model.with_blocks(options.blocks)
    if options.rows:
        plans = planning.plan_rows(options.rows)
    else:
        plans = planning.plan_children(options.children, options.policies, options.lengths, options.budgets)
    if options.child is not None:
        _child(options, plans[options.child], model)
        return 0
    if options.device == "cuda" and not cuda.is_there():
        raise SystemExit("bench offload needs a CUDA GPU")
    return _parent(options, plans, model)


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line. `arguments` None: that of the process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="h3")
    add("--weights", choices=["bf16", "int8"], default="bf16")
    add("--blocks", type=int, help="fewer blocks, for a trial")
    add("--lengths", nargs="*", choices=list(planning.TIMED_STEPS), default=["7k", "2k", "33k"])
    add("--budgets", nargs="*", type=float, default=[24.0, 12.0], metavar="GIB")
    add("--policies", nargs="*", choices=planning.POLICIES, default=list(planning.POLICIES))
    add("--children", nargs="*", choices=planning.CHILDREN, default=list(planning.CHILDREN),
        help="the process without dynamic VRAM, those with it")  # fmt: skip
    add("--rows", nargs="+", type=planning.RowPlan.read, metavar="POLICY:LENGTH[:GIB]",
        help="these rows alone, such as resident:7k stream:7k:12")  # fmt: skip
    add("--steps", type=int, help="timed steps of every row; by default fewer for longer sequences")
    add("--touch-gib", type=int, default=0,
        help="host memory to touch first, for machines whose RAM grows on use")  # fmt: skip
    add("--max-minutes", type=float, default=8.5, help="rows that would end later are left out")
    add("--json", type=Path, help="also write every row to this file")
    add("--baseline", type=Path,
        help="the JSON file of an earlier run of the same model, for its resident rows")  # fmt: skip
    add("--table", type=Path, nargs="+", metavar="JSON",
        help="measure nothing; print the rows of these files as one table")  # fmt: skip
    add("--device", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    # For the processes that this one starts.
    add("--child", type=int, help=argparse.SUPPRESS)
    add("--deadline", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _child(options: argparse.Namespace, plan: ChildPlan, model: BenchModel) -> None:
    # ComfyUI chooses torch's allocator, so nothing that imports torch may be imported before it starts.
    from comfyui import inprocess

    inprocess.start()
    from benchkit.offload.child import Child

    Child(options, plan, model, Results(options.json)).run()


def _parent(options: argparse.Namespace, plans: list[ChildPlan], model: BenchModel) -> int:
    deadline = time.time() + 60 * options.max_minutes
    with tempfile.TemporaryDirectory() as folder:
        path = (options.json or Path(folder) / "offload.json").resolve()
        earlier = Results(options.baseline) if options.baseline else None
        path.unlink(missing_ok=True)
        results = Results(path)
        if earlier is not None:
            results.baselines = earlier.baselines
            results.machine = {"kernels": earlier.machine.get("kernels", 0)}
            results.save()
        print(f"{model.title}, {model.config['num_layers']} blocks, {options.weights}", flush=True)
        touch_host_memory(options.touch_gib)
        failed = False
        for index, plan in enumerate(plans):
            results.reload()
            code = _run(options, index, plan, results, path, deadline)
            failed = failed or code != 0
        results.reload()
        if not results.rows:
            print("nothing was measured")
            return 1
        print(f"\n{model.title}, {options.weights}: {results.machine.get('GPU', '')}")
        limits = results.machine.get("limits", [])
        shown = ", ".join(f"{limit / 1e9:.1f}" for limit in limits)
        print(f"{results.machine.get('versions', '')}; pinned host to device {shown} GB/s\n")
        print(markdown(results.rows), flush=True)
    return 1 if failed else 0


def _run(
    options: argparse.Namespace, index: int, plan: ChildPlan, results: Results, path: Path, deadline: float
) -> int:
    """Run a child in the foreground; it shares this process's output. Returns its exit code."""
    arguments = "--cpu"
    if options.device == "cuda":
        arguments = planning.comfyui_arguments(plan, _reserve(plan, results))
    command = [sys.executable, __file__, *sys.argv[1:], "--child", str(index)]
    command += ["--deadline", str(deadline), "--json", str(path)]
    variables = {**os.environ, "KITCHEN_SOL_COMFYUI_ARGS": arguments, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=variables)
    try:
        return process.wait(max(1.0, deadline + _GRACE_S - time.time()))
    except subprocess.TimeoutExpired:
        print("stopped: the time was over", flush=True)
        return 1
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _reserve(plan: ChildPlan, results: Results) -> float:
    """What the first row of a process with dynamic VRAM needs; the process renews it for the others."""
    if plan.budget is None:
        return 0.0
    machine = results.machine
    total = machine.get("total") or _total_memory()
    outside = machine.get("outside", 0) + machine.get("kernels", 0)
    activations = max(results.activations(plan.rows[0].length), default=0)
    return planning.reserve_of_dynamic(total, outside, activations, plan.budget * GIB)


def _total_memory() -> int:
    """Bytes of the device, from a process of its own: CUDA must not be in use in this one."""
    code = "import torch; print(torch.cuda.mem_get_info()[1])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[-1])


def show_tables(paths: list[Path]) -> None:
    """Print the rows of several runs of one model as one table."""
    print(markdown([row for path in paths for row in Results(path).rows]))


def touch_host_memory(gib: int) -> None:
    """Use `gib` GiB once and give them back: ComfyUI pins by what the machine says it has."""
    if not gib:
        return
    import psutil

    touched = [bytearray(b"\x01") * GIB for _ in range(gib)]
    del touched
    total = psutil.virtual_memory().total / GIB
    print(f"host memory touched first: {gib} GiB; the machine says it has {total:.0f} GiB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
