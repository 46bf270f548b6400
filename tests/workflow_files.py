"""The workflow files that the pack ships, the frozen ones, and what ComfyUI has to say about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ui_workflow
from comfyui import graphs
from comfyui.startup import PACK_ROOT

SHIPPED = sorted((PACK_ROOT / "workflows").glob("*.json"))
FROZEN = sorted((Path(__file__).parent / "workflows").glob("*.json"))
INT8, SOL, OFFLOAD = "KitchenInt8QuantizeModel", "KitchenSolAttentionPatch", "KitchenLayerwiseOffload"
COMPARE = "KitchenCompareModels"

Info = dict[str, dict[str, Any]]  # what /object_info answers


def label(path: Path) -> str:
    return path.relative_to(PACK_ROOT).with_suffix("").as_posix()


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def recorded_api(path: Path) -> graphs.Graph:
    """The API form that stands beside a workflow, without the titles in it."""
    nodes = read(path.parent / "api" / path.name)
    return {key: {k: node[k] for k in ("class_type", "inputs")} for key, node in nodes.items()}


def differences(found: graphs.Graph, recorded: graphs.Graph, info: Info) -> list[str]:
    """Where a graph differs from the record, other than by inputs that came later, at their defaults."""
    if found.keys() != recorded.keys():
        return [f"nodes {sorted(found.keys() ^ recorded.keys())} are in one of them only"]
    result = []
    for key, node in recorded.items():
        kind, inputs = found[key]["class_type"], found[key]["inputs"]
        if kind != node["class_type"]:
            result.append(f"node {key} is {kind} and was {node['class_type']}")
            continue
        defaults = {slot.name: slot.default for slot in ui_workflow.slots(info[kind]["input"])}
        wanted = {**{name: defaults.get(name) for name in inputs}, **node["inputs"]}
        for name in sorted(wanted.keys() | inputs.keys()):
            if (name in inputs, inputs.get(name)) != (True, wanted[name]):
                result.append(f"{kind}.{name} is {inputs.get(name)!r} and was {wanted[name]!r}")
    return result
