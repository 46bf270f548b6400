"""Workflow files as the ComfyUI frontend saves them: read, checked, and turned into the API form.

Written from the frontend's rules, as it cannot be run by Python: a widget value belongs to an input by its
position, so whatever a node inserts between its inputs shifts the meaning of the values behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Info = Mapping[str, Mapping[str, Any]]  # what /object_info answers
Workflow = Mapping[str, Any]
Node = Mapping[str, Any]

NOTES = frozenset({"Note", "MarkdownNote"})  # the frontend's own, unknown to the server
_WIDGET_TYPES = frozenset({"COMBO", "INT", "FLOAT", "STRING", "BOOLEAN", "COMFY_DYNAMICCOMBO_V3"})
_AFTER_GENERATE = ("fixed", "increment", "decrement", "randomize")
_TITLE_HEIGHT = 30  # pixels above `pos`


@dataclass(frozen=True)
class Slot:
    """An input of a node class. options: of a combo, None for other types."""

    name: str
    type: str
    required: bool
    fields: Mapping[str, Any]
    options: tuple[Any, ...] | None = None

    @property
    def is_widget(self) -> bool:
        return self.type in _WIDGET_TYPES and not self.fields.get("forceInput")

    @property
    def has_control(self) -> bool:
        """Whether the frontend adds `control after generate`, whose value is stored behind this one."""
        named = self.type == "INT" and self.name in ("seed", "noise_seed")
        return bool(self.fields.get("control_after_generate")) or named

    @property
    def default(self) -> Any:
        if self.options is not None:
            return self.fields.get("default", self.options[0] if self.options else None)
        return self.fields.get("default")


def slots(description: Mapping[str, Any], prefix: str = "") -> Iterator[Slot]:
    """The inputs of a node class in the order of its widgets, hidden ones left out."""
    for section in ("required", "optional"):
        for name, (kind, *rest) in description.get(section, {}).items():
            fields = dict(rest[0]) if rest else {}
            options = None
            if isinstance(kind, list):  # the older form of a combo
                kind, options = "COMBO", tuple(kind)
            elif kind == "COMBO":
                options = tuple(fields.get("options", ()))
            elif kind == "COMFY_DYNAMICCOMBO_V3":
                options = tuple(option["key"] for option in fields["options"])
            yield Slot(prefix + name, kind, section == "required", fields, options)


def widget_values(node: Node, info: Info) -> tuple[list[tuple[Slot, Any]], int]:
    """Each widget of a node with its value, and how many of the stored values that takes.

    A widget beyond the stored values has its default: it was added after the file was saved.
    """
    stored = list(node.get("widgets_values", ()))
    found: list[tuple[Slot, Any]] = []
    used = 0
    waiting = [slot for slot in slots(info[node["type"]]["input"]) if slot.is_widget]
    while waiting:
        slot = waiting.pop(0)
        value = stored[used] if used < len(stored) else slot.default
        used += 1
        found.append((slot, value))
        if slot.has_control:
            if used < len(stored) and stored[used] not in _AFTER_GENERATE:
                raise ValueError(f"{_label(node)}: {stored[used]!r} stands behind {slot.name}")
            used += 1
        if slot.type == "COMFY_DYNAMICCOMBO_V3":  # the chosen option brings widgets of its own
            chosen = [option for option in slot.fields["options"] if option["key"] == value]
            nested = [s for option in chosen for s in slots(option["inputs"], f"{slot.name}.")]
            waiting = [s for s in nested if s.is_widget] + waiting
    return found, used


def to_api(workflow: Workflow, info: Info) -> dict[str, dict[str, Any]]:
    """The graph that the frontend would post for a workflow without subgraphs and bypassed nodes."""
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    graph = {}
    for node in active_nodes(workflow):
        inputs = {slot.name: value for slot, value in widget_values(node, info)[0]}
        linked = {x["name"]: sources[x["link"]] for x in node["inputs"] if x.get("link") is not None}
        graph[str(node["id"])] = {"class_type": node["type"], "inputs": {**inputs, **linked}}
    return graph


def active_nodes(workflow: Workflow) -> list[Node]:
    """The nodes that reach the server."""
    nodes = [node for node in workflow["nodes"] if node["type"] not in NOTES]
    for node in nodes:
        if node["mode"] != 0:
            raise NotImplementedError(f"{_label(node)} is muted or bypassed")
    return nodes


# --- checks: each yields one sentence for each thing that is wrong --------------------------------


def value_problems(workflow: Workflow, info: Info) -> Iterator[str]:
    """Values that do not fit their widget, and required inputs without a link."""
    for node in active_nodes(workflow):
        offered = {model["name"] for model in node["properties"].get("models", ())}
        for slot, value in widget_values(node, info)[0]:
            if problem := _misfit(slot, value, offered):
                yield f"{_label(node)}: {slot.name} {problem}"
        linked = {x["name"] for x in node["inputs"] if x.get("link") is not None}
        for slot in slots(info[node["type"]]["input"]):
            if slot.required and not slot.is_widget and slot.name not in linked:
                yield f"{_label(node)}: nothing is connected to {slot.name}"


def _misfit(slot: Slot, value: Any, offered: set[str]) -> str | None:
    kinds = {"INT": (int,), "FLOAT": (int, float), "STRING": (str,), "BOOLEAN": (bool,)}
    if slot.options is not None:
        # A model's file is no option before the user has it; the file says where to get it.
        return None if value in slot.options or value in offered else f"has no option {value!r}"
    if not isinstance(value, kinds[slot.type]) or (isinstance(value, bool) and slot.type != "BOOLEAN"):
        return f"is {slot.type} and not {value!r}"
    if slot.type in ("INT", "FLOAT"):
        low, high = slot.fields.get("min", value), slot.fields.get("max", value)
        return None if low <= value <= high else f"is {value}, outside of {low} to {high}"
    return None


def slot_problems(workflow: Workflow, info: Info) -> Iterator[str]:
    """Saved inputs and outputs that the node class does not have, or has with another type."""
    for node in active_nodes(workflow):
        description = info[node["type"]]
        types = {slot.name: slot.type for slot in slots(description["input"])}
        types.update({slot.name: slot.type for slot, _ in widget_values(node, info)[0]})
        for slot in node["inputs"]:
            if _plain(types.get(slot["name"])) != _plain(slot["type"]):
                yield f"{_label(node)}: input {slot['name']} is {types.get(slot['name'])}"
        saved = [(slot["name"], slot["type"]) for slot in node["outputs"]]
        served = list(zip(description["output_name"], description["output"], strict=True))
        if served[: len(saved)] != saved:  # links name an output by its position
            yield f"{_label(node)}: outputs were {saved} and are {served}"


def _plain(kind: str | None) -> str | None:
    # Newer ComfyUI gives some combos options with widgets of their own; their plain values stay valid.
    return "COMBO" if kind == "COMFY_DYNAMICCOMBO_V3" else kind


def link_problems(workflow: Workflow) -> Iterator[str]:
    """Links that their two ends do not agree on, and ids that are used twice or out of range.

    A link is [id, source node, its output, target node, its input, type].
    """
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: link for link in workflow["links"]}
    if len(nodes) < len(workflow["nodes"]) or len(links) < len(workflow["links"]):
        yield "an id is used twice"
    if max(nodes) > workflow["last_node_id"] or max(links) > workflow["last_link_id"]:
        yield "an id is beyond the last one, so a new node or link would get it again"
    at_outputs, at_inputs = set(), set()
    for node in nodes.values():
        for index, slot in enumerate(node["outputs"]):
            at_outputs |= {(link, node["id"], index, slot["type"]) for link in slot["links"] or ()}
        for index, slot in enumerate(node["inputs"]):
            if slot.get("link") is not None:
                at_inputs.add((slot["link"], node["id"], index))
                link = links.get(slot["link"])
                if link is not None and slot["type"] not in ("*", link[5]):
                    yield f"link {link[0]}: {link[5]} into {_label(node)}, {slot['name']}: {slot['type']}"
    if wrong := at_outputs ^ {(x[0], x[1], x[2], x[5]) for x in links.values()}:
        yield f"links and outputs disagree: {sorted(wrong)}"
    if wrong := at_inputs ^ {(x[0], x[3], x[4]) for x in links.values()}:
        yield f"links and inputs disagree: {sorted(wrong)}"


def overlaps(workflow: Workflow) -> Iterator[str]:
    """Pairs of nodes that cover each other on the canvas."""
    boxes = [(_label(n), *n["pos"], *n["size"]) for n in workflow["nodes"]]
    for index, (a, ax, ay, aw, ah) in enumerate(boxes):
        for b, bx, by, bw, bh in boxes[:index]:
            apart_y = ay + ah <= by - _TITLE_HEIGHT or by + bh <= ay - _TITLE_HEIGHT
            if not (ax + aw <= bx or bx + bw <= ax or apart_y):
                yield f"{a} and {b}"


def _label(node: Node) -> str:
    return f"node {node['id']} ({node['type']})"
