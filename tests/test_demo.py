"""The demo, apart from its samplings: arguments, what is judged, the table and the picture."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

from demo_options import FAMILIES, PARTS, read_options
from demo_picture import Strip, draw
from demo_table import BOTH, INT8, MODEL, SOL, Row, Setting, problems, settings, text

# --- arguments ----------------------------------------------------------------------------------


def test_without_arguments_both_parts_run() -> None:
    options = read_options([])
    assert options.parts == PARTS and options.families is None and options.seeds == 1
    assert options.picture.parts[-3:] == (".dev", "demo", "shapes.png")


def test_a_part_and_its_arguments() -> None:
    chosen = read_options(["--only", "fidelity", "--seeds", "4", "--picture", "a.png"])
    assert (chosen.parts, chosen.seeds, chosen.picture) == (("fidelity",), 4, Path("a.png"))
    chosen = read_options(["--only", "int8", "--models", "wan", "h3"])
    assert chosen.parts == ("int8",) and chosen.families == FAMILIES[:2]
    assert read_options(["--models", "flux"]).parts == PARTS


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--only", "fidelity", "--models", "wan"], "--models"),
        (["--only", "int8", "--seeds", "2"], "--seeds"),
        (["--only", "int8", "--picture", "a.png"], "--picture"),
        (["--picture", "a.jpg"], "'a.jpg' does not end in .png"),
        (["--seeds", "0"], "'0' is not a number from 1 to 64"),
        (["--seeds", "many"], "'many' is not a number"),
        (["--only", "nothing"], "nothing"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        read_options(arguments)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


# --- what is measured ---------------------------------------------------------------------------


def test_the_table_has_all_settings_once() -> None:
    chosen = settings(["fa", "current"])
    assert len(set(chosen)) == len(chosen) == 3 + 8 + 8 + 2
    assert {INT8, SOL, BOTH} <= set(chosen) and MODEL not in chosen
    assert len({setting.name for setting in chosen}) == len(chosen)


def test_settings_become_inputs_of_the_node() -> None:
    assert INT8.sol_inputs("auto") is None
    asked = SOL.sol_inputs("reference")
    assert (asked["provider"], asked["tau"], asked["dense_percent"]) == ("reference", 1.0, 0.2)
    assert asked["min_tokens"] == 1 and asked["strict"] is True
    dense = Setting(dense_backend="fa").sol_inputs("auto")
    assert dense["dense_backend"] == "fa" and dense["dense_percent"] == 1.0


# --- how it is judged ---------------------------------------------------------------------------


def _rows(int8: tuple[float, ...] = (40.0, 31.0), sol: float = 25.0, both: float = 23.0, **others: float):
    rows = [
        Row(INT8, int8, (0.99, 0.97)),
        Row(SOL, (sol, sol), (0.9, 0.9)),
        Row(BOTH, (both, both), (0.9, 0.9)),
    ]
    return rows + [
        Row(Setting(dense_backend=name), (value, value), (1.0, 1.0)) for name, value in others.items()
    ]


def test_good_numbers_have_no_problem() -> None:
    assert problems(_rows(current=math.inf)) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (_rows(int8=(60.0, 29.99)), "INT8 group 256: 29.99 dB on the worst seed, at least 30 dB are wanted"),
        (_rows(both=21.9), "21.90 dB, more than 3 dB below Sol alone, which has 25.00 dB"),
        (_rows(int8=(40.0, math.inf)), "INT8 group 256: the frames are nearly the same, so it was not used"),
        (_rows(sol=math.inf, both=math.inf), "Sol tau 1, dense_percent 0.2: the frames are nearly the same"),
        (_rows(fa=math.nan), "dense_backend fa: the frames are not finite"),
        (_rows(int8=(40.0, math.nan)), "INT8 group 256: the frames are not finite"),
    ],
)
def test_bad_numbers_are_told(rows: list[Row], said: str) -> None:
    assert any(said in problem for problem in problems(rows)), problems(rows)


def test_the_table_tells_mean_and_worst() -> None:
    lines = text(_rows(current=math.inf)).splitlines()
    assert lines[0].split("  ")[0] == "setting"
    assert " ".join(lines[2].split()) == "INT8 group 256 35.50 dB 31.00 dB 0.9800"
    assert " ".join(lines[5].split()) == "dense_backend current same frames same frames 1.0000"


# --- the picture --------------------------------------------------------------------------------


def test_the_picture_has_a_strip_a_setting_and_video(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    red, blue = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    videos = torch.stack([red.expand(8, 16, 16, 3), blue.expand(8, 16, 16, 3)])
    path = tmp_path / "new" / "picture.png"
    draw([Strip("the model", videos, None), Strip(SOL.name, videos, (20.0, math.inf))], ["a", "b"], path)
    pixels = torch.from_numpy(image.imread(path))[..., :3]
    assert pixels.shape == (280, 960, 3)
    # Two strips of four frames: the red ones at the left of the blue ones.
    found = {
        name: ((pixels - colour).abs().sum(-1) < 0.01).nonzero()
        for name, colour in (("red", red), ("blue", blue))
    }
    assert all(len(places) > 8 * 50 * 50 for places in found.values())
    assert found["red"][:, 1].max() < found["blue"][:, 1].min()
