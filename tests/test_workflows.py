"""The workflows that the pack ships, and frozen ones as users have saved them, keep working.

Proves for each file that ComfyUI has its nodes, that every value and link fits, that it still means what
its API form records, and that it runs on a real server. The API forms are exports of the ComfyUI frontend
(File > Export (API)). Files in workflows/ and in tests/workflows/ are found by themselves; those in
tests/workflows/ are never changed: they stand for what users have on their disks.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import ui_workflow
from comfyui import builders
from comfyui.server import ComfyServer
from sol_node import SHORT
from tiny_workflows import behind, for_the_reference, nodes_of, tiny_model_for, with_tiny_model, without
from workflow_files import (
    COMPARE,
    FROZEN,
    INT8,
    OFFLOAD,
    SHIPPED,
    SOL,
    Info,
    differences,
    label,
    read,
    recorded_api,
)

# Of the two blocks of the tiny Wan model with 10 linear layers each, and 6 layers outside of them; of the two
# blocks of the tiny H3 model and the one of its token refiner with 4 layers each, and 10 other layers.
QUANTIZED = {
    "workflows/kitchen_compare_wan": (20, 26),
    "workflows/kitchen_int8_sol_h3": (12, 22),
    "workflows/kitchen_int8_sol_offload_wan": (20, 26),
    "workflows/kitchen_int8_wan": (20, 26),
    "tests/workflows/kitchen_int8_wan": (20, 26),
    # blocks+modulation adds time_projection; blocks.0 and *.ffn.2 are ignored: 1 + 10 - 1.
    "tests/workflows/kitchen_int8_wan_nothing_default": (10, 26),
}

# Why the calls of the tiny models that Sol could take are dense: there are a few dozen tokens, and on a CPU
# provider auto has no kernel, or comfy_kitchen's, which wants thousands.
TOO_SMALL = r"no Sol kernel for \w+|fewer than \d+ tokens"

# What the text of Sol Attention Patch says where its provider is the reference and min_tokens 1: 4 steps of
# one evaluation each, and two blocks, of which one is dense.
SPARSE = {
    # The first step is dense by percent, the first layer by number; Wan's blocks have two attentions each.
    "workflows/kitchen_sol_wan": (
        "sparse 3 calls: reference 3",
        "dense because of: cross-attention 8, dense layer 3, dense step 2",
        "3 of 4 steps sparse, tau 1",
        "tokens: 512",  # 2 x 16 x 16
        "sinks: none",
    ),
    "workflows/kitchen_int8_sol_offload_wan": (
        "sparse 3 calls: reference 3",
        "dense because of: cross-attention 8, dense layer 3, dense step 2",
        "3 of 4 steps sparse, tau 1",
        "tokens: 512",
        "sinks: none",
    ),
    "workflows/kitchen_int8_sol_h3": (
        "sparse 3 calls: reference 3",
        "dense because of: dense layer 3, dense step 2",
        "3 of 4 steps sparse, tau 1",
        "tokens: 538",  # 16 of text, 2 x 37 of sound, 7 x 8 x 8 of video
        "sinks: rows 0-89 exact as keys and queries (MiniMax-H3)",
    ),
    # dense_steps is 1, and dense_layers 1,-1 the last layer.
    "tests/workflows/kitchen_sol_wan_nothing_default": (
        "sparse 3 calls: reference 3",
        "dense because of: cross-attention 8, dense layer 3, dense step 2",
        "3 of 4 steps sparse, tau 0.75 to 1.25",
        "tokens: 512",
        "sinks: rows 4-27 exact as keys (by hand)",
    ),
}
SOL_WORKFLOWS = [path for path in [*SHIPPED, *FROZEN] if "sol" in path.stem.split("_")]

MakeTiny = Callable[..., builders.TinyModel]


every_workflow = pytest.mark.parametrize("path", [*SHIPPED, *FROZEN], ids=label)
every_shipped_workflow = pytest.mark.parametrize("path", SHIPPED, ids=label)


@pytest.fixture(scope="module")
def info(server: ComfyServer) -> Info:
    """ComfyUI's description of every node it has."""
    return server.get("/object_info")


def require_nodes(workflow: dict[str, Any], info: Info) -> None:
    """Skips the test of a workflow for a model that this ComfyUI does not have yet."""
    absent = {node["type"] for node in ui_workflow.active_nodes(workflow)} - set(info)
    if "EmptyMiniMaxH3LatentAV" in absent:
        pytest.skip("this ComfyUI has no MiniMax-H3")


# --- the files ----------------------------------------------------------------------------------


def test_workflows_are_found() -> None:
    assert SHIPPED and FROZEN


@every_workflow
def test_every_node_is_known(path: Path, info: Info) -> None:
    workflow = read(path)
    require_nodes(workflow, info)
    assert workflow["version"] == 0.4
    assert {node["type"] for node in ui_workflow.active_nodes(workflow)} <= set(info)
    for node in ui_workflow.active_nodes(workflow):
        assert node["properties"]["Node name for S&R"] == node["type"]


@every_workflow
def test_values_slots_and_links_fit_the_nodes(path: Path, info: Info) -> None:
    workflow = read(path)
    require_nodes(workflow, info)
    problems = [
        *ui_workflow.value_problems(workflow, info),
        *ui_workflow.slot_problems(workflow, info),
        *ui_workflow.link_problems(workflow),
    ]
    assert not problems, "\n".join(problems)


@every_shipped_workflow
def test_shipped_workflows_have_a_value_for_every_widget_of_the_pack(path: Path, info: Info) -> None:
    workflow = read(path)
    require_nodes(workflow, info)
    ours = [n for n in ui_workflow.active_nodes(workflow) if is_ours(info[n["type"]])]
    assert ours
    for node in ours:
        widgets, used = ui_workflow.widget_values(node, info)
        assert len(node["widgets_values"]) == used, [slot.name for slot, _ in widgets]
        # By this the frontend names the pack to a user who lacks it.
        assert node["properties"]["cnr_id"] == "kitchen-sol"


@every_shipped_workflow
def test_no_node_covers_another(path: Path) -> None:
    assert not list(ui_workflow.overlaps(read(path)))


@every_shipped_workflow
def test_a_note_links_every_model_file(path: Path) -> None:
    workflow = read(path)
    note = "\n".join(n["widgets_values"][0] for n in workflow["nodes"] if n["type"] == "MarkdownNote")
    models = [model for node in workflow["nodes"] for model in node["properties"].get("models", ())]
    assert models
    for model in models:
        assert model["url"].endswith(f"/{model['directory']}/{model['name']}")
        assert f"({model['url']})" in note and f"models/{model['directory']}" in note


def is_ours(description: dict[str, Any]) -> bool:
    return description["python_module"].startswith("custom_nodes.ComfyUI-Kitchen-Sol")


# --- their meaning ------------------------------------------------------------------------------


@every_workflow
def test_the_workflow_means_what_its_api_form_says(path: Path, info: Info) -> None:
    """Case 25: a widget in the middle of a node would shift every value behind it."""
    workflow = read(path)
    require_nodes(workflow, info)
    found = ui_workflow.to_api(workflow, info)
    assert differences(found, recorded_api(path), info) == []


# --- ComfyUI's template browser -----------------------------------------------------------------


def test_the_template_browser_lists_the_ui_files_only(server: ComfyServer) -> None:
    # The API forms are in a folder of their own because it would list them, too, and open nothing.
    listed = server.get("/workflow_templates")
    assert sorted(listed[server.pack_folder]) == [path.stem for path in SHIPPED]


@every_shipped_workflow
def test_the_template_browser_gets_the_file_and_a_small_thumbnail(path: Path, server: ComfyServer) -> None:
    assert server.get(f"/api/workflow_templates/{server.pack_folder}/{path.stem}.json") == read(path)
    thumbnail = path.with_suffix(".jpg").read_bytes()
    assert thumbnail[:3] == b"\xff\xd8\xff" and len(thumbnail) < 60_000


# --- running them -------------------------------------------------------------------------------


@pytest.mark.core
@every_workflow
def test_the_workflow_runs_on_a_tiny_model(path: Path, server: ComfyServer, tiny: MakeTiny) -> None:
    model = tiny_model_for(recorded_api(path), tiny)
    server.add_model(model)
    graph = for_the_reference(with_tiny_model(recorded_api(path), model))
    result = server.run(graph).raise_for_errors()
    quantized = server.latent("workflow")
    assert torch.isfinite(quantized).all()

    for key in nodes_of(graph, SOL):
        report, after = (lines_of(text) for text in result.texts_of(key))
        assert re.match(rf"WARNING: nothing was sparse, because of: ({TOO_SMALL}) 3$", after[0]), after
        assert after[1] == "sparse 0 calls"
        [reasons] = [line for line in after if line.startswith("dense because of: ")]
        assert re.search(rf"(: |, )({TOO_SMALL}) 3(, |$)", reasons), reasons
        if path in SOL_WORKFLOWS:
            assert [lines_of(result.outputs[k]["text"][0]) for k in behind(graph, key, 1)] == [report]
            assert [len(result.outputs[k]["images"]) for k in behind(graph, key, 2)] == [1]

    for key in nodes_of(graph, OFFLOAD):
        texts = [lines_of(text) for text in result.texts_of(key)]
        assert texts and all(texts)
        assert [lines_of(result.outputs[k]["text"][0]) for k in behind(graph, key, 1)] == [texts[0]]

    for key in nodes_of(graph, COMPARE):
        texts = [lines_of(text) for text in result.texts_of(key)]
        assert re.match(r"PSNR \d\d\.\d\d dB, SSIM 0\.\d{4} \(latents\)$", texts[-1][0])
        assert [lines_of(result.outputs[k]["text"][0]) for k in behind(graph, key, 2)] == [texts[-1]]
        assert [len(result.outputs[k]["images"]) for k in behind(graph, key, 3)] == [1]

    nodes = nodes_of(graph, INT8)
    for key in nodes:
        texts = result.texts_of(key)
        assert texts and all(texts)
        done, total = counts(texts[-1])
        assert 0 < done <= total
        assert (done, total) == QUANTIZED.get(label(path), (done, total))
        shown = behind(graph, key, 1)
        assert [counts(result.outputs[k]["text"][0]) for k in shown] == [(done, total)] * len(shown)
    if nodes:
        server.run(without(graph, INT8)).raise_for_errors()
        plain = server.latent("workflow").double()
        # The sampler gets the quantized model: a little off, and not equal.
        assert 1e-4 < ((quantized.double() - plain).norm() / plain.norm()).item() < 0.1


@pytest.mark.core
@pytest.mark.parametrize("path", SOL_WORKFLOWS, ids=label)
def test_the_workflow_is_sparse_where_there_is_a_kernel(
    path: Path, server: ComfyServer, tiny: MakeTiny
) -> None:
    """On enough tokens to leave some out, with the one kernel that runs everywhere."""
    model = tiny_model_for(recorded_api(path), tiny)
    server.add_model(model)
    graph = with_tiny_model(recorded_api(path), model, **SHORT[model.family])
    [key] = nodes_of(graph, SOL)
    graph[key]["inputs"].update(provider="reference", min_tokens=1)
    texts = server.run(for_the_reference(graph)).raise_for_errors().texts_of(key)
    assert [line for line in lines_of(texts[-1]) if line in SPARSE[label(path)]] == [*SPARSE[label(path)]]
    sparse = server.latent("workflow").double()
    server.run(without(graph, SOL)).raise_for_errors()
    dense = server.latent("workflow").double()
    # The sampler gets the patched model: what it leaves out is little, and not nothing.
    assert 1e-4 < ((sparse - dense).norm() / dense.norm()).item() < 0.1


@pytest.mark.core
def test_a_setting_that_its_provider_lacks_stops_the_workflow(server: ComfyServer, tiny: MakeTiny) -> None:
    """Why the frozen workflow runs above without two of its values: they arrive and are refused."""
    [path] = [path for path in FROZEN if path.stem == "kitchen_sol_wan_nothing_default"]
    model = tiny("wan")
    server.add_model(model)
    graph = with_tiny_model(recorded_api(path), model)
    [error] = server.run(graph).errors
    assert [error.node_id] == nodes_of(graph, SOL)
    assert "kv_splits (2 asked), token_aug (128 asked)" in error.exception_message


def lines_of(text: str) -> list[str]:
    """Lines of a text, without the marks that it gets where it stands on a node."""
    return [re.sub(r"^• ", "- ", html.unescape(line.rstrip())) for line in text.splitlines()]


def counts(text: str) -> tuple[int, int]:
    match = re.match(r"quantized (\d+) of (\d+) layers", text)
    assert match, text
    return int(match[1]), int(match[2])
