"""The one shape of all reports: its text, its facts, its JSON and its line in the log."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections import Counter
from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import pytest
from comfyui import inprocess

report = inprocess.pack_module("kernels_glue.report")
size = inprocess.pack_module("kernels_glue.units").size
Line, Report = report.Line, report.Report

NODE = "A Node"


def example() -> Any:
    """Every kind, in an order that is not the one they are shown in."""
    return Report.of(
        NODE,
        [
            report.detail("speed 1.26 s a step", seconds=1.26),
            report.note("two \u00e4 remarks", remarks=["a"]),
            report.warning("nothing reached", reached=0),
        ],
        (line for line in [report.headline("made 2 of 3", made=2, total=3)]),
        [
            report.detail("kept: 1", remarks=["b"]),
            report.item("norm (1): x", kept={"norm": ["x"]}),
            report.item("head (1): y", kept={"head": ("y",)}),
        ],
    )


# --- text ----------------------------------------------------------------------------------------


def test_headlines_and_warnings_come_first_and_the_rest_in_its_order() -> None:
    assert example().text.splitlines() == [
        "made 2 of 3",
        "WARNING: nothing reached",
        "speed 1.26 s a step",
        "note: two \u00e4 remarks",
        "kept: 1",
        "- norm (1): x",
        "- head (1): y",
    ]
    assert "\n".join(example().shown) == example().text
    assert Report(NODE, ()).text == ""


def test_lines_of_a_kind_keep_their_order() -> None:
    lines = [report.warning("b"), report.detail("d"), report.warning("a"), report.detail("c")]
    assert Report.of(NODE, lines).shown == ("WARNING: b", "WARNING: a", "d", "c")


def test_the_mark_is_no_part_of_the_text() -> None:
    assert [
        (line.text, line.marked) for line in (report.note("n"), report.warning("w"), report.item("i"))
    ] == [
        ("n", "note: n"),
        ("w", "WARNING: w"),
        ("i", "- i"),
    ]


def test_the_log_gets_one_line_at_its_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Report.of(NODE, [report.detail("100% b"), report.note("c")]).log()
    Report.of(NODE, [report.detail("b"), report.warning("c")]).log()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"{NODE}: 100% b; note: c"),
        ("WARNING", f"{NODE}: WARNING: c; b"),
    ]
    assert example().warns and not Report.of(NODE, [report.note("c")]).warns


# --- facts ---------------------------------------------------------------------------------------


def test_facts_of_all_lines_are_united() -> None:
    assert example().facts == {
        "seconds": 1.26,
        "remarks": ["a", "b"],
        "reached": 0,
        "made": 2,
        "total": 3,
        "kept": {"norm": ["x"], "head": ["y"]},
    }
    later = Report.of(
        NODE, [report.detail("", n=1, of={"a": 1, "b": [1]}), report.detail("", n=2, of={"a": 3})]
    )
    assert later.facts == {"n": 2, "of": {"a": 3, "b": [1]}}


def test_facts_are_plain_values() -> None:
    facts = report.detail(
        "",
        counts=Counter({"b": 1, "a": 2}),
        layers=frozenset({8, 1}),  # which Python would give as 8, 1
        span=range(2),
        by_index={4: (1, 2)},
        half=Fraction(1, 2),
        psnr=math.inf,
        low=-math.inf,
        broken=[math.nan],
        none=None,
        yes=True,
    ).facts
    assert facts == {
        "counts": {"a": 2, "b": 1},
        "layers": [1, 8],
        "span": [0, 1],
        "by_index": {"4": [1, 2]},
        "half": 0.5,
        "psnr": "inf",
        "low": "-inf",
        "broken": ["nan"],
        "none": None,
        "yes": True,
    }
    assert facts["yes"] is True
    assert float(facts["psnr"]) == math.inf  # what is no JSON number can be read as one


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    facts = report.detail("", a=numpy.float32(0.5), b=numpy.int64(3), c=numpy.float64("inf")).facts
    assert facts == {"a": 0.5, "b": 3, "c": "inf"} and type(facts["b"]) is int


@pytest.mark.parametrize("value", [object(), b"bytes", 1j, [object()], {"a": {1: b""}}])
def test_what_is_no_fact_is_refused_where_it_is_written(value: Any) -> None:
    with pytest.raises(TypeError, match="is no fact of a report"):
        report.detail("", fact=value)


def test_a_tensor_is_no_fact() -> None:
    import torch

    with pytest.raises(TypeError, match="of type Tensor is no fact"):
        report.detail("", fact=torch.zeros(2))


def test_a_report_cannot_be_changed() -> None:
    made = example()
    given = [1]
    line = report.detail("", given=given)
    given.append(2)
    line.facts["given"].append(3)
    assert line.facts == {"given": [1]}
    for target, name in ((made, "node"), (line, "text"), (line, "facts_json")):
        with pytest.raises(FrozenInstanceError):
            setattr(target, name, "x")
    assert hash(made) == hash(example())
    assert copy.deepcopy(made) == made  # callbacks of a patcher hold reports, and core copies these


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'remark' is no kind of line; use one of: headline, detail, item"):
        Line.of("remark", "text", {})


# --- JSON ----------------------------------------------------------------------------------------


def test_a_report_comes_back_from_its_json() -> None:
    made = example()
    again = Report.from_json(made.to_json())
    assert again == made and again.text == made.text and again.facts == made.facts
    assert again.to_json() == made.to_json()
    special = Report.of(NODE, [report.detail("\n\ud800\U0001f642", psnr=math.inf, nan=math.nan, none=None)])
    assert Report.from_json(special.to_json()) == special


def test_the_json_is_the_same_whatever_the_order_of_the_facts() -> None:
    one = Report.of(NODE, [report.detail("t", a={"x": 1, "y": 2}, b=2)])
    other = Report.of(NODE, [report.detail("t", b=2, a={"y": 2, "x": 1})])
    assert one == other and one.to_json() == other.to_json()
    assert json.loads(one.to_json()) == {
        "node": NODE,
        "lines": [{"kind": "detail", "text": "t", "facts": {"a": {"x": 1, "y": 2}, "b": 2}}],
    }
    assert list(json.loads(one.to_json())) == ["node", "lines"]


def test_the_json_is_one_that_every_reader_takes() -> None:
    made = Report.of(NODE, [report.detail("\u00e4", a=math.inf, b=math.nan)])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)  # Infinity and NaN are Python's, not JSON's

    assert json.loads(made.to_json(), parse_constant=refuse)["node"] == NODE
    assert made.to_json().isascii()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "3",
        "[]",
        '{"node": "A"}',
        '{"lines": []}',
        '{"node": 1, "lines": []}',
        '{"node": "A", "lines": [{"kind": "detail", "text": 1, "facts": {}}]}',
        '{"node": "A", "lines": [{"kind": "detail", "text": "t"}]}',
        '{"node": "A", "lines": [{"kind": "other", "text": "t", "facts": {}}]}',
        '{"node": "A", "lines": [{"kind": "detail", "text": "t", "facts": [1]}]}',
    ],
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Report.from_json(text)


# --- sizes ---------------------------------------------------------------------------------------


def test_sizes_in_words() -> None:
    gib, mib = 2**30, 2**20
    assert size(gib) == "1.00 GiB"
    assert size(int(35.9 * gib)) == "35.90 GiB"
    assert size(gib / 2) == "0.50 GiB"
    assert size(12 * mib) == "12.00 MiB"
    assert size(6_500_000) == "6.20 MiB"
    assert size(0) == "0.00 MiB"
    assert size(math.inf) == "inf GiB"
