"""`bench offload`, as far as it goes without a GPU: its plan, its arithmetic, its table, and a dry run."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_detection
import comfy.model_management
import pytest
import torch
from comfyui import builders, inprocess
from stand_in_lane import HostLane

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

import bench_offload
from benchkit.models import MODELS, BenchModel, load, random_weights, shrunk
from benchkit.offload import child as child_module
from benchkit.offload import rows as table
from benchkit.offload.child import Child
from benchkit.offload.device import Cpu, Memory
from benchkit.offload.measure import blocks_of, measure, partial_budget
from benchkit.offload.plan import (
    CHILDREN,
    GIB,
    POLICIES,
    RowPlan,
    comfyui_arguments,
    plan_children,
    plan_rows,
    reserve_of_dynamic,
    reserve_of_partial,
)
from benchkit.offload.results import Results


def test_plan_is_one_process_without_dynamic_vram_and_one_for_each_budget_with_it() -> None:
    plain, first, second = plan_children(CHILDREN, POLICIES, ["7k", "2k"], [24.0, 12.0])
    assert [row.policy for row in plain.rows] == ["resident"] * 2 + ["partial"] * 4 + ["stream"] * 4
    assert plain.rows[:4] == (
        RowPlan("resident", "7k"),
        RowPlan("resident", "2k"),
        RowPlan("partial", "7k", 24.0),
        RowPlan("partial", "2k", 24.0),
    )
    assert [row.policy for row in first.rows] == ["dynamic", "dynamic", "core", "core", "stream+dynamic"]
    assert (first.budget, second.budget) == (24.0, 12.0)
    assert {row.budget for row in second.rows} == {12.0}
    assert comfyui_arguments(plain, 0) == "--disable-dynamic-vram"
    assert comfyui_arguments(first, 112.5 * GIB) == "--reserve-vram 112.500"


def test_plan_leaves_out_processes_without_rows() -> None:
    only = plan_children(CHILDREN, ["resident", "partial"], ["2k"], [24.0])
    assert [plan.name for plan in only] == ["plain"]
    assert [row.policy for row in only[0].rows] == ["resident", "partial"]
    (dynamic,) = plan_children(["dynamic"], POLICIES, ["2k"], [24.0])
    assert dynamic.name == "dynamic"


def test_plan_of_chosen_rows() -> None:
    rows = [RowPlan.read(text) for text in ("resident:7k", "core:2k:12", "stream:7k:12", "dynamic:2k:24")]
    plain, twelve, more = plan_rows(rows)
    assert plain.rows == (RowPlan("resident", "7k"), RowPlan("stream", "7k", 12.0))
    assert (twelve.budget, twelve.rows) == (12.0, (RowPlan("core", "2k", 12.0),))
    assert (more.budget, more.rows) == (24.0, (RowPlan("dynamic", "2k", 24.0),))
    with pytest.raises(ValueError, match="resident:8k"):
        RowPlan.read("resident:8k")


class Unloaded:
    """A patcher as load_models_gpu sees it: on a CUDA card, nothing of its 40 GiB loaded."""

    load_device = torch.device("cuda", 0)
    parent = model = None

    def model_patches_models(self) -> list[Any]:
        return []

    def is_dynamic(self) -> bool:
        return False

    def is_clone(self, other: Any) -> bool:
        return False

    def model_size(self) -> int:
        return 40 * GIB

    def loaded_size(self) -> int:
        return 0

    def current_loaded_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.mark.parametrize("required", [0.1 * GIB, 6.5 * GIB])
@pytest.mark.parametrize("budget", [12 * GIB, 24 * GIB])
def test_core_gives_a_partly_loaded_model_the_budget(
    monkeypatch: pytest.MonkeyPatch, required: float, budget: int
) -> None:
    management = comfy.model_management
    given: list[float] = []
    monkeypatch.setattr(management, "get_free_memory", lambda *_: 138 * GIB)
    monkeypatch.setattr(management, "free_memory", lambda *_, **__: [])
    monkeypatch.setattr(management, "vram_state", management.VRAMState.NORMAL_VRAM)
    monkeypatch.setattr(management, "MIN_WEIGHT_MEMORY_RATIO", 0.0)  # as on NVIDIA cards
    monkeypatch.setattr(management, "current_loaded_models", [])
    monkeypatch.setattr(management.LoadedModel, "model_load", lambda self, memory, **_: given.append(memory))
    reserve = reserve_of_partial(138 * GIB, required, budget)
    monkeypatch.setattr(management, "EXTRA_RESERVED_VRAM", reserve)
    patcher = Unloaded()
    management.load_models_gpu([patcher], memory_required=2 * required, minimum_memory_required=required)
    assert given == pytest.approx([budget])


def test_dynamic_vram_must_leave_free_what_is_no_budget() -> None:
    assert reserve_of_dynamic(140 * GIB, 1 * GIB, 3 * GIB, 24 * GIB) == 112 * GIB
    assert reserve_of_dynamic(16 * GIB, 1 * GIB, 3 * GIB, 24 * GIB) == 0


def test_reads_what_the_node_shows_after_sampling() -> None:
    report = inprocess.pack_module("kernels_glue.offload.report")
    sampled = report.Sampled(
        steps=4, seconds=8.0, copied=108 * GIB, waited=0.5, device=12 * GIB, pinned=27 * GIB
    )
    plan = SimpleNamespace(resident=(0,), streamed=(1, 2), slots=2, slot_bytes=GIB)
    text = "\n".join(line.text for line in report.sampled_lines(sampled, plan))
    assert "copied 27.00 GiB a step" in text
    assert table.waited_seconds(text) == pytest.approx(0.125)


def test_weights_are_what_is_in_use_less_activations_and_what_was_there_before() -> None:
    # 2 were in use before. At both blocks 7 of weights are there: 4 in torch's pool and 3 outside of it.
    used, reserved, allocated = [17, 19], [12, 14], [9, 11]
    activations = table.activations_of([23, 24, 25, 27], 20)
    assert activations == [5, 7, 5, 7]
    assert table.weights_on_device(used, reserved, allocated, activations[:2], 2) == [7, 7]
    assert table.weights_on_device(used, reserved, allocated, activations, 2) == [5, 7]


def test_rows_compare_with_the_resident_model_and_with_the_copies() -> None:
    row = {"step": 1.26, "copied": 60e9, "copies_alone": 1.25, "weights": 11.9 * GIB, "budget": 12.0}
    table.complete(row, 0.9, 50e9)
    assert row["copies"] == pytest.approx(1.2)
    assert row["x_resident"] == pytest.approx(1.4)
    assert row["x_bound"] == pytest.approx(1.05)
    assert row["share_of_limit"] == pytest.approx(60 / 1.26 / 50)
    assert row["x_alone"] == pytest.approx(1.008)
    assert row["within"] is True

    hidden = table.complete({"step": 0.99, "copied": 30e9, "weights": 13 * GIB, "budget": 12.0}, 0.9, 50e9)
    assert hidden["x_bound"] == pytest.approx(1.1)
    assert "share_of_limit" not in hidden
    assert hidden["within"] is False
    assert "x_resident" not in table.complete({"step": 1.0}, None, None)
    assert "step" not in table.complete({"failed": "no"}, 0.9, 50e9)


def test_table_has_every_row_in_order_and_shows_refusals() -> None:
    common = {"tokens": 7386, "length": "7k"}
    rows = [
        {"policy": "resident", "length": "2k", "budget": None, "tokens": 2036, "step": 0.2},
        {"policy": "core", "length": "7k", "budget": 24.0, "failed": "Layerwise Offload: no | or."},
        {"policy": "stream", **common, "budget": 12.0, "step": 0.75, "x_resident": 1.021, "pinned": 26 * GIB},
        {"policy": "partial", **common, "budget": 12.0, "step": 1.0, "weights": 13 * GIB, "within": False},
        {"policy": "resident", **common, "budget": None, "step": 0.734},
    ]
    head, rule, *lines = table.markdown(rows).splitlines()
    assert [len(line.split("|")) for line in (head, rule, *lines)] == [len(table.COLUMNS) + 2] * 7
    assert [line.split("|")[3].strip() for line in lines] == [
        "resident",
        "core: Layerwise Offload: no / or.",
        "ComfyUI partial",
        "stream",
        "resident",
    ]
    assert "| 13.00 (over) |" in lines[2]
    assert "| 7386 | 12 | stream | 0.750 | 1.02 |" in lines[3]
    assert lines[3].endswith("| 26.0 |")
    assert lines[0].startswith("| 7386 | all |")


def test_rows_of_several_runs_make_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, policy in zip(paths, ("partial", "stream"), strict=True):
        results = Results(path)
        results.rows.append({"policy": policy, "length": "7k", "budget": 12.0, "step": 1.0})
        results.save()
    bench_offload.show_tables(paths)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[3].strip() for line in lines[2:]] == ["ComfyUI partial", "stream"]


def test_results_are_shared_by_the_processes(tmp_path: Path) -> None:
    path = tmp_path / "offload.json"
    parent = Results(path)
    assert (parent.rows, parent.resident("7k"), parent.activations("7k")) == ([], None, [])
    other = Results(path)
    other.rows.append({"policy": "resident"})
    other.baselines["7k"] = {"step": 0.7, "activations": [3, 5]}
    other.save()
    parent.reload()
    assert (parent.rows, parent.resident("7k"), parent.activations("7k")) == (other.rows, 0.7, [3, 5])


def test_a_child_reads_the_parents_command_line_with_its_own_options_behind() -> None:
    given = ["--model", "wan", "--budgets", "24", "6.5", "--lengths", "2k"]
    options = bench_offload.read_options([*given, "--child", "1", "--deadline", "5.5", "--json", "x.json"])
    assert (options.model, options.budgets, options.lengths) == ("wan", [24.0, 6.5], ["2k"])
    assert (options.child, options.deadline, options.json) == (1, 5.5, Path("x.json"))


# --- with ComfyUI -------------------------------------------------------------------------------


@pytest.fixture(params=["h3", "wan"])
def real(request: pytest.FixtureRequest) -> BenchModel:
    """A model of real size."""
    if request.param not in builders.supported_families():
        pytest.skip(f"this ComfyUI has no {request.param} model")
    return MODELS[request.param]


def test_comfyui_recognises_the_models(real: BenchModel) -> None:
    module, name = real.model_class
    model_class = getattr(importlib.import_module(module), name)
    template = builders.state_dict_template(model_class, dict(real.config), torch.bfloat16)
    config = comfy.model_detection.model_config_from_unet(template, "")
    for key in ("hidden_size", "dim", "ffn_dim", "ffn_hidden_size", "num_layers", "num_heads"):
        if key in real.config and key in config.unet_config:
            assert config.unet_config[key] == real.config[key], key
    assert config.unet_config["num_layers"] == {"h3": 50, "wan": 40}[real.family]
    billions = sum(tensor.numel() for tensor in template.values()) / 1e9
    # 37.5 GiB of bf16 weights were measured for H3; Wan's 14B model is named by its size.
    assert billions == pytest.approx({"h3": 20.2, "wan": 14.3}[real.family], abs=0.1)


def test_lengths_have_the_tokens_that_their_names_say(real: BenchModel) -> None:
    tokens = {}
    for length in real.lengths:
        samples = inprocess.empty_latent(real.sampling(length))["samples"]
        parts = samples.unbind() if samples.is_nested else [samples]
        tokens[length] = real.tokens([part.shape for part in parts])
    assert (
        tokens
        == {
            "h3": {"7k": 7386, "2k": 2036, "33k": 32868},
            "wan": {"7k": 7280, "2k": 2048, "33k": 32760},
        }[real.family]
    )


class Counted(Cpu):
    """A device whose memory in use grows by 1 at each look."""

    def __init__(self) -> None:
        self.looks = 0

    def memory(self) -> Memory:
        self.looks += 1
        return Memory(self.looks, 0, 0)


def test_memory_is_looked_at_in_every_block_of_the_untimed_evaluations(real: BenchModel) -> None:
    tiny = shrunk(real)
    patcher = load(random_weights(tiny, "cpu"))
    blocks = [block for _, block in blocks_of(patcher.model.diffusion_model)]
    found = measure(patcher, tiny, "7k", 3, Counted())
    assert [memory.used for memory in found.blocks] == list(range(1, 2 * 4 + 1))
    assert len(found.steps) == 3
    assert found.step == sorted(found.steps)[1]
    # 8 x 8 latent pixels of Wan; 4 x 4 of H3 with 8 steps of stereo audio and 16 of text.
    assert found.tokens == {"h3": 2 * 2 * 2 + 16 + 16, "wan": 2 * 4 * 4}[real.family]
    assert found.finite
    assert found.loaded == patcher.model_size()
    assert not any(block._forward_pre_hooks for block in blocks)


def test_the_reserve_is_set_before_core_loads_the_model(
    real: BenchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    management = comfy.model_management
    given: list[float] = []
    load_models = management.load_models_gpu

    def watched(*args: Any, minimum_memory_required: float, **kwargs: Any) -> Any:
        reserve = management.EXTRA_RESERVED_VRAM
        assert minimum_memory_required > GIB
        given.append(100 * GIB - max(0.8 * GIB + reserve, minimum_memory_required + reserve))
        return load_models(*args, minimum_memory_required=minimum_memory_required, **kwargs)

    tiny = shrunk(real)
    patcher = load(random_weights(tiny, "cpu"))
    patcher.model.memory_usage_factor *= 1e5  # so that its activations count
    inprocess.unload_all()
    before = management.EXTRA_RESERVED_VRAM
    monkeypatch.setattr(
        management,
        "get_free_memory",
        lambda device=None, torch_free_too=False: (100 * GIB,) * 2 if torch_free_too else 100 * GIB,
    )
    monkeypatch.setattr(management, "load_models_gpu", watched)
    with partial_budget(12 * GIB) as prepare:
        measure(patcher, tiny, "7k", 1, Cpu(), prepare)
    assert given == pytest.approx([12 * GIB])
    assert before == management.EXTRA_RESERVED_VRAM


@pytest.fixture
def run_child(tmp_path: Path) -> Callable[..., Results]:
    """run_child(policies, deadline): the rows of a process on a CPU, with a tiny Wan."""

    def run(policies: list[str], deadline: float) -> Results:
        options = argparse.Namespace(device="cpu", weights="bf16", steps=2, deadline=deadline)
        (plan,) = plan_children(["plain"], policies, ["7k"], [24.0])
        results = Results(tmp_path / "rows.json")
        Child(options, plan, shrunk(MODELS["wan"]), results).run()
        again = Results(tmp_path / "rows.json")
        assert again.rows == results.rows
        return again

    return run


def test_a_child_measures_its_rows_and_goes_on_after_a_refusal(
    run_child: Callable[..., Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = inprocess.pack_module("kernels_glue.errors").KitchenSolError("Layerwise Offload", "No.", "Go.")

    def offload_model(source: Any, config: Any, show: Callable[[Any], None]) -> Any:
        assert (config.vram_budget_gb, config.strategy) == (24.0, "stream")
        raise refused

    name = f"{inprocess.PACK_NAME}.kernels_glue.offload.apply"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(offload_model=offload_model))
    results = run_child(["stream", "partial", "resident"], time.time() + 1000)
    resident, partial, stream = results.rows
    assert resident["x_resident"] == 1.0
    assert partial["tokens"] == 32
    assert partial["step"] > 0
    assert stream["failed"] == "Layerwise Offload: No. Go."
    assert results.machine["limits"] == [Cpu().pinned_limit()]


def test_a_child_counts_the_bytes_that_the_node_copies_in_a_step(
    run_child: Callable[..., Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = inprocess.pack_module("kernels_glue.offload.apply")
    real, plans = apply.offload_model, []

    def offload_model(source: Any, config: Any, show: Callable[[Any], None]) -> Any:
        config = replace(config, resident_blocks=1)
        return real(source, config, lambda report: (show(report), plans.append(source)), HostLane)

    monkeypatch.setattr(apply, "offload_model", offload_model)
    (row,) = run_child(["stream"], time.time() + 1000).rows
    [source] = plans
    sizes = inprocess.pack_module("kernels_glue.offload.patcher").sizes_of(source.model)
    streamed = len(sizes.blocks) - 1
    assert row["copied"] == pytest.approx(streamed * sizes.blocks[0], rel=0.01)
    assert row["waited"] == 0.0
    assert row["copies_alone"] == pytest.approx(row["copied"] / Cpu().pinned_limit(), rel=1e-6)


def test_a_child_without_time_says_so_in_every_row(run_child: Callable[..., Results]) -> None:
    rows = run_child(["resident", "partial"], time.time()).rows
    assert [row["failed"] for row in rows] == [child_module.NOT_RUN] * 2
