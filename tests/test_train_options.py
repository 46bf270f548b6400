"""The arguments of the training: what is refused before it costs anything, what its file says of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

import train_demo_model
from shapes.training import Bucket, Phase, Settings
from train_options import as_typed, read_options

SMALL = Settings(
    steps=6, warmup=2, dim=128, ffn_dim=128, layers=1, phases=(Phase(1.0, (Bucket(2, 16, 2, 1.0),)),)
)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--out"),
        (["--out", "a", "--steps", "0"], "'0' is not a whole number from 1"),
        (["--out", "a", "--steps=-5"], "'-5' is not a whole number"),
        (["--out", "a", "--stop-at", "0"], "'0' is not a whole number from 1"),
        (["--out", "a", "--checkpoint-every", "0"], "'0' is not a whole number from 1"),
        (["--out", "a", "--check=-1"], "'-1' is not a whole number from 0"),
        (["--out", "a", "--seed", "99999999999999999999"], "is not a whole number from 0"),
        (["--out", "a", "--learning-rate", "nan"], "'nan' is not a number above 0"),
        (["--out", "a", "--shift", "0"], "'0' is not a number above 0"),
        (["--ou", "a"], "--out"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        read_options(arguments, "")
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_the_command_in_the_file_has_no_folders_and_runs_again() -> None:
    typed = ["--out", "/a/b/c.safetensors", "--checkpoint=/d/e.pt", "--steps", "5"]
    assert as_typed(typed) == "python tools/dev.py train --out c.safetensors --checkpoint=e.pt --steps 5"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stop-at", "7"], "--stop-at 7 is behind the last step, 6"),
        (["--resume", "{}/absent.pt"], "there is no checkpoint"),
        (["--resume", "{}/text.pt"], "is no checkpoint of this training"),
        (["--resume", "{}/half.pt"], "is no checkpoint of this training"),
        (["--resume", "{}/at_3.pt", "--stop-at", "3"], "at_3.pt is at step 3 already, and 3 is to be"),
        (["--resume", "{}/at_3.pt", "--shift", "5"], "made with other settings: shift"),
        (["--checkpoint", "{}/text.pt/below.pt"], "text.pt"),
        (["--checkpoint", "{}"], "is a folder"),
    ],
)
def test_what_cannot_work_is_said_before_the_first_step(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.pt").write_text("nothing")
    torch.save({"optimizers": [], "step": 3}, tmp_path / "half.pt")
    out = tmp_path / "new" / "model.safetensors"
    at_3 = ["--out", str(tmp_path / "a.safetensors"), "--stop-at", "3", "--checkpoint"]
    assert train_demo_model.main([*at_3, str(tmp_path / "at_3.pt")], SMALL) == 0
    capsys.readouterr()
    options = [option.format(tmp_path) for option in options]
    assert train_demo_model.main(["--out", str(out), *options], SMALL) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and said in printed.err and "step " not in printed.out
    assert not out.exists()


def test_without_a_gpu_comfyui_starts_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, arguments in ((True, "--disable-dynamic-vram"), (False, "--cpu")):
        monkeypatch.setattr(train_demo_model.cuda, "is_there", lambda there=there: there)
        assert train_demo_model._environment()["KITCHEN_SOL_COMFYUI_ARGS"] == arguments


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "model.safetensors"
    assert train_demo_model.main(["--out", str(out)], replace(SMALL, steps=2)) == 0
    assert out.is_file() and out.with_suffix(".loss.csv").is_file()
