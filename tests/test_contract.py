"""The public contract: node ids, inputs, their order and defaults, options and outputs.

Workflows that users share store widget values by position and links by output index, so a change here
loads them with another meaning. contract.json holds what was promised, as /object_info serves it.
After adding a node, or an input or option at the end: `python tests/test_contract.py --write`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfyui import inprocess

FILE = Path(__file__).with_name("contract.json")
REGENERATE = "python tests/test_contract.py --write"
# What decides the meaning of a stored value; texts for humans are free to change.
_INPUT_FIELDS = (
    "default", "options", "min", "max", "step", "multiline", "forceInput", "dynamicPrompts", "multiselect"
)  # fmt: skip

Contract = dict[str, dict[str, Any]]


def served() -> Contract:
    """The contract of the nodes as they are, from the function that answers /object_info."""
    return {node_id: contract_of(node.GET_NODE_INFO_V1()) for node_id, node in inprocess.pack_nodes().items()}


def contract_of(info: dict[str, Any]) -> dict[str, Any]:
    """The part of a node's info that workflows depend on, with inputs and outputs in order."""
    inputs = []
    for section, names in info["input_order"].items():
        if section == "hidden":  # filled in by ComfyUI; no workflow stores it
            continue
        for name in names:
            kind, *rest = info["input"][section][name]
            fields = dict(rest[0] if rest else {})
            if isinstance(kind, list):  # the older form of a combo
                kind, fields["options"] = "COMBO", kind
            # A flag that is off is as good as absent, a default that is off or 0 is not.
            given = {
                field: fields[field]
                for field in _INPUT_FIELDS
                if fields.get(field) is not None and (fields[field] is not False or field == "default")
            }
            inputs.append({"name": name, "section": section, "type": kind, **given})
    outputs = [
        {"name": name, "type": kind, "is_list": is_list}
        for name, kind, is_list in zip(
            info["output_name"], info["output"], info["output_is_list"], strict=True
        )
    ]
    # Json has lists only, and drops no key order.
    return json.loads(
        json.dumps(
            {
                "node_id": info["name"],
                "display_name": info["display_name"],
                "category": info["category"],
                "is_output_node": info["output_node"],
                "inputs": inputs,
                "outputs": outputs,
            }
        )
    )


# --- what changed -------------------------------------------------------------------------------


def drift(promised: Contract, found: Contract) -> tuple[list[str], list[str]]:
    """(changes that break shared workflows, additions at the end that do not)."""
    breaking: list[str] = []
    added = [f"{node}: new node" for node in found if node not in promised]
    for node, old in promised.items():
        if node not in found:
            breaking.append(f"{node}: the node is gone")
            continue
        new = found[node]
        for field in ("node_id", "display_name", "category", "is_output_node"):
            if old[field] != new[field]:
                breaking.append(f"{node}: {field} was {old[field]!r} and is {new[field]!r}")
        for side in ("inputs", "outputs"):
            for is_breaking, text in _slots(side.removesuffix("s"), old[side], new[side]):
                (breaking if is_breaking else added).append(f"{node}: {text}")
    return breaking, added


def _slots(what: str, old: list[dict], new: list[dict]) -> Iterator[tuple[bool, str]]:
    before, after = [x["name"] for x in old], [x["name"] for x in new]
    if after[: len(before)] != before:
        yield True, f"{what}s were {', '.join(before)} and are {', '.join(after)}"
        return
    for was, now in zip(old, new, strict=False):
        for field in sorted({*was, *now}):
            a, b = was.get(field), now.get(field)
            if a == b:
                continue
            if field == "options" and a and b and b[: len(a)] == a:
                yield False, f"{what} {was['name']}: new option {', '.join(map(repr, b[len(a) :]))}"
            else:
                yield True, f"{what} {was['name']}: {field} was {a!r} and is {b!r}"
    for slot in new[len(old) :]:
        # A stored workflow has no value for it.
        needs_value = what == "input" and slot["section"] == "required" and "default" not in slot
        yield needs_value, f"new {what} {slot['name']}" + (" without a default" if needs_value else "")


def message(breaking: list[str], added: list[str]) -> str:
    parts = []
    if breaking:
        parts += [
            "these changes break workflows that users have shared:",
            *(f"  {x}" for x in breaking),
            "Undo them; append instead, and give a new meaning a new name.",
        ]
    if added:
        parts += ["these are additions:", *(f"  {x}" for x in added)]
        parts += [f"If they are final, make them part of the contract: {REGENERATE}"]
    return "\n".join(parts)


# --- tests --------------------------------------------------------------------------------------


@pytest.mark.core
def test_the_nodes_keep_their_contract() -> None:
    breaking, added = drift(json.loads(FILE.read_text(encoding="utf-8")), served())
    if breaking or added:
        pytest.fail(message(breaking, added), pytrace=False)


@pytest.mark.core
def test_in_every_combo_the_first_option_is_the_default() -> None:
    combos = [slot for node in served().values() for slot in node["inputs"] if slot["type"] == "COMBO"]
    assert combos
    for slot in combos:
        assert slot["default"] == slot["options"][0], slot["name"]


def test_the_contract_of_the_int8_node_is_what_was_published() -> None:
    """Written by hand from the specification: a regeneration cannot change it by mistake."""
    node = json.loads(FILE.read_text(encoding="utf-8"))["KitchenInt8QuantizeModel"]
    assert (node["display_name"], node["category"]) == ("Kitchen INT8 Quantize Model", "model/patch")
    options = {slot["name"]: slot.get("options", slot.get("default")) for slot in node["inputs"]}
    assert list(options) == ["model", "group_size", "layers", "ignored_layers", "lora", "device"]
    assert options == {
        "model": None,
        "group_size": ["auto", "256", "64", "16"],
        "layers": ["blocks", "blocks+modulation", "all"],
        "ignored_layers": "",
        "lora": ["keep", "bake"],
        "device": ["auto", "cpu"],
    }
    assert {slot["section"] for slot in node["inputs"]} == {"required"}
    assert [(x["name"], x["type"]) for x in node["outputs"]] == [("model", "MODEL"), ("report", "STRING")]


def test_the_contract_of_the_sol_node_is_what_was_published() -> None:
    """Written by hand from the specification: a regeneration cannot change it by mistake."""
    node = json.loads(FILE.read_text(encoding="utf-8"))["KitchenSolAttentionPatch"]
    assert (node["display_name"], node["category"]) == ("Sol Attention Patch", "model/patch")
    found = {slot["name"]: slot.get("options", slot.get("default")) for slot in node["inputs"]}
    expected = {
        "model": None,
        "provider": ["auto", "kitchen", "nvlabs", "triton", "reference", "builtin"],
        "dense_backend": ["fa", "sage_attn", "kitchen_int8", "current"],
        "tau": 1.0,
        "curve": ["constant", "linear", "cosine", "step"],
        "tau_end": 1.0,
        "thresh_type": ["diag", "exact"],
        "kv_splits": ["auto", "1", "2", "4"],
        "dense_percent": 0.2,
        "dense_steps": -1,
        "dense_layers": "0",
        "sinks": ["auto", "off", "keys", "keys_and_queries"],
        "sink_start": 0,
        "sink_tokens": 0,
        "min_tokens": 0,
        "token_aug": 0,
        "strict": False,
        "profile": False,
        "steps": 20,
    }
    assert list(found) == list(expected)
    assert found == expected
    assert {slot["section"] for slot in node["inputs"]} == {"required"}
    outputs = [(x["name"], x["type"]) for x in node["outputs"]]
    assert outputs == [("model", "MODEL"), ("report", "STRING"), ("schedule", "IMAGE")]


def test_the_contract_of_the_offload_node_is_what_was_published() -> None:
    """Written by hand from the specification: a regeneration cannot change it by mistake."""
    node = json.loads(FILE.read_text(encoding="utf-8"))["KitchenLayerwiseOffload"]
    assert (node["display_name"], node["category"]) == ("Layerwise Offload", "model/patch")
    found = {slot["name"]: slot.get("options", slot.get("default")) for slot in node["inputs"]}
    expected = {
        "model": None,
        "vram_budget_gb": 0.0,
        "resident_blocks": -1,
        "prefetch_blocks": 1,
        "pin_memory": ["auto", "on", "off"],
        "max_pinned_gb": 0.0,
        "strategy": ["auto", "stream", "core"],
    }
    assert list(found) == list(expected)
    assert found == expected
    kinds = [slot["type"] for slot in node["inputs"]]
    assert kinds == ["MODEL", "FLOAT", "INT", "INT", "COMBO", "FLOAT", "COMBO"]
    assert {slot["section"] for slot in node["inputs"]} == {"required"}
    assert [(x["name"], x["type"]) for x in node["outputs"]] == [("model", "MODEL"), ("report", "STRING")]


def test_the_contract_of_the_compare_node_is_what_was_published() -> None:
    """Written by hand from the specification: a regeneration cannot change it by mistake."""
    node = json.loads(FILE.read_text(encoding="utf-8"))["KitchenCompareModels"]
    assert (node["display_name"], node["category"]) == ("Kitchen Compare Models", "model/sampling")
    assert node["is_output_node"] is True
    found = {slot["name"]: slot.get("options", slot.get("default")) for slot in node["inputs"]}
    expected = {
        "model": None,
        "add_noise": True,
        "noise_seed": 0,
        "cfg": 8.0,
        "positive": None,
        "negative": None,
        "sampler": None,
        "sigmas": None,
        "latent_image": None,
        "layers": False,
        "keep_psnr": 0.0,
        "lpips": ["auto", "off"],
        "filename_prefix": "kitchen_compare",
        "reference": None,
        "vae": None,
    }
    assert list(found) == list(expected)
    assert found == expected
    optional = [slot["name"] for slot in node["inputs"] if slot["section"] == "optional"]
    assert optional == ["reference", "vae"]
    outputs = [(x["name"], x["type"]) for x in node["outputs"]]
    assert outputs == [
        ("latent", "LATENT"),
        ("reference_latent", "LATENT"),
        ("report", "STRING"),
        ("plot", "IMAGE"),
    ]


OLD: Contract = {
    "A": {
        "node_id": "A",
        "display_name": "The A",
        "category": "c",
        "is_output_node": False,
        "inputs": [
            {"name": "model", "section": "required", "type": "MODEL"},
            {
                "name": "kind",
                "section": "required",
                "type": "COMBO",
                "default": "a",
                "options": ["a", "b"],
            },
            {"name": "size", "section": "required", "type": "INT", "default": 1},
        ],
        "outputs": [{"name": "model", "type": "MODEL", "is_list": False}],
    }
}
NEW_INPUT = {"name": "more", "section": "required", "type": "INT", "default": 0}


def changed(change: str) -> Contract:
    node = copy.deepcopy(OLD)["A"]
    inputs = node["inputs"]
    match change:
        case "nothing":
            pass
        case "gone":
            return {}
        case "renamed":
            node["display_name"] = "B"
        case "moved":
            node["category"] = "d"
        case "inserted":
            inputs.insert(1, dict(NEW_INPUT))
        case "removed":
            del inputs[1]
        case "swapped":
            inputs[1], inputs[2] = inputs[2], inputs[1]
        case "default":
            inputs[2]["default"] = 2
        case "type":
            inputs[2]["type"] = "FLOAT"
        case "option inserted":
            inputs[1]["options"].insert(1, "c")
        case "option removed":
            inputs[1]["options"].pop()
        case "output type":
            node["outputs"][0]["type"] = "LATENT"
        case "output inserted":
            node["outputs"].insert(0, {"name": "text", "type": "STRING", "is_list": False})
        case "input without default":
            inputs.append({"name": "clip", "section": "required", "type": "CLIP"})
        case "option appended":
            inputs[1]["options"].append("c")
        case "input appended":
            inputs.append(dict(NEW_INPUT))
        case "optional link appended":
            inputs.append({"name": "clip", "section": "optional", "type": "CLIP"})
        case "output appended":
            node["outputs"].append({"name": "text", "type": "STRING", "is_list": False})
        case "node added":
            return {"A": node, "B": node}
    return {"A": node}


def test_no_change_is_no_drift() -> None:
    assert drift(OLD, changed("nothing")) == ([], [])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("gone", "A: the node is gone"),
        ("renamed", "A: display_name was 'The A' and is 'B'"),
        ("moved", "A: category was 'c' and is 'd'"),
        ("inserted", "A: inputs were model, kind, size and are model, more, kind, size"),
        ("removed", "A: inputs were model, kind, size and are model, size"),
        ("swapped", "A: inputs were model, kind, size and are model, size, kind"),
        ("default", "A: input size: default was 1 and is 2"),
        ("type", "A: input size: type was 'INT' and is 'FLOAT'"),
        ("option inserted", "A: input kind: options was ['a', 'b'] and is ['a', 'c', 'b']"),
        ("option removed", "A: input kind: options was ['a', 'b'] and is ['a']"),
        ("output type", "A: output model: type was 'MODEL' and is 'LATENT'"),
        ("output inserted", "A: outputs were model and are text, model"),
        ("input without default", "A: new input clip without a default"),
    ],
)
def test_a_breaking_change_is_named_and_says_that_workflows_break(change: str, line: str) -> None:
    breaking, added = drift(OLD, changed(change))
    assert (breaking, added) == ([line], [])
    text = message(breaking, added)
    assert "break workflows that users have shared" in text and line in text
    assert REGENERATE not in text


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("option appended", "A: input kind: new option 'c'"),
        ("input appended", "A: new input more"),
        ("optional link appended", "A: new input clip"),
        ("output appended", "A: new output text"),
        ("node added", "B: new node"),
    ],
)
def test_an_addition_is_named_and_asks_for_a_regeneration(change: str, line: str) -> None:
    breaking, added = drift(OLD, changed(change))
    assert (breaking, added) == ([], [line])
    text = message(breaking, added)
    assert line in text and REGENERATE in text and "break" not in text


def write() -> None:
    """Write contract.json from the nodes as they are, and print what that changes."""
    found = served()
    if FILE.exists():
        print(message(*drift(json.loads(FILE.read_text(encoding="utf-8")), found)) or "nothing changed")
    FILE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(f"usage: {REGENERATE}")
    write()
