"""The CSV and the JSON of a comparison in ComfyUI's output folder."""

from __future__ import annotations

import csv
import math
import os
import time
from pathlib import Path

import pytest
from comfyui import inprocess
from compare_results import comparison, results, steps

files = inprocess.pack_module("kernels_glue.compare.files")
present = inprocess.pack_module("kernels_glue.compare.present")
shape = inprocess.pack_module("kernels_glue.report")
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import folder_paths

    folder = tmp_path / "output"
    folder.mkdir()
    monkeypatch.setattr(folder_paths, "output_directory", str(folder))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_csv_has_a_row_a_step() -> None:
    made = steps(40.0, 38.0, math.nan)
    rows = list(csv.DictReader(files.table(made).splitlines()))
    assert list(rows[0]) == [
        "step",
        "sigma",
        "denoised_psnr",
        "denoised_cosine",
        "denoised_relative_l2",
        "latent_psnr",
        "latent_cosine",
        "latent_relative_l2",
    ]
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    for row, step in zip(rows, made, strict=True):
        assert float(row["sigma"]) == step.sigma
        for side in ("denoised", "latent"):
            for score in ("psnr", "cosine", "relative_l2"):
                found, expected = float(row[f"{side}_{score}"]), getattr(getattr(step, side), score)
                assert found == expected or (math.isnan(found) and math.isnan(expected))
    assert rows[0]["latent_psnr"] == "inf" and rows[2]["denoised_psnr"] == "nan"


def test_files_are_counted_as_save_image_counts(output: Path) -> None:
    (output / "compare_00007_.png").touch()
    assert files.write_files("compare", steps(40.0), "{}") == ("compare_00008_.csv", "compare_00008_.json")
    assert files.write_files("compare", steps(40.0), "[]") == ("compare_00009_.csv", "compare_00009_.json")
    assert files.write_files("other", steps(40.0), "") == ("other_00001_.csv", "other_00001_.json")
    assert (output / "compare_00008_.json").read_text() == "{}"
    assert (output / "compare_00009_.json").read_text() == "[]"
    assert (output / "compare_00008_.csv").read_text() == files.table(steps(40.0))
    assert len(names(output)) == 7  # and nothing that was left over


def test_folders_and_dates_are_understood(output: Path) -> None:
    written = files.write_files("tests/%year%/a", steps(40.0), "{}")
    year = time.localtime().tm_year
    assert written == (f"tests/{year}/a_00001_.csv", f"tests/{year}/a_00001_.json")
    assert names(output) == sorted(written)


def test_names_are_below_the_folder_whatever_links_lead_there(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import folder_paths

    (tmp_path / "link").symlink_to(output)
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / "link"))
    assert files.write_files(str(output / "sub" / "a"), steps(40.0), "{}")[0] == "sub/a_00001_.csv"
    assert files.write_files("sub/a", steps(40.0), "{}")[0] == "sub/a_00002_.csv"


def test_files_are_as_readable_as_others(output: Path) -> None:
    files.write_files("a", steps(40.0), "{}")
    (output / "other").touch()
    assert (output / "a_00001_.csv").stat().st_mode == (output / "other").stat().st_mode


@pytest.mark.parametrize("prefix", ["", "  "])
def test_no_prefix_writes_nothing(output: Path, prefix: str) -> None:
    files.check_prefix(prefix)
    assert files.write_files(prefix, steps(40.0), "{}") == ()
    assert names(output) == []


@pytest.mark.parametrize("prefix", ["../a", "a/../../b", "/tmp/a", ".", "a/..", "a\0b", "link/a"])
def test_a_prefix_out_of_the_output_folder_is_refused(output: Path, tmp_path: Path, prefix: str) -> None:
    (output / "link").symlink_to(tmp_path)
    before = names(tmp_path)
    for use in (files.check_prefix, lambda prefix: files.write_files(prefix, steps(40.0), "{}")):
        with pytest.raises(KitchenSolError) as caught:
            use(prefix)
        assert repr(prefix) in str(caught.value) and "no name inside of ComfyUI's output folder" in str(
            caught.value
        )
    assert names(tmp_path) == before


@pytest.mark.parametrize("prefix", ["a", "a/b", "./a", "a/../b", "a.b", "a/b/"])
def test_a_prefix_within_it_is_fine(output: Path, prefix: str) -> None:
    files.check_prefix(prefix)
    assert len(files.write_files(prefix, steps(40.0), "{}")) == 2


def test_a_file_is_whole_or_not_there(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *args: object, **kwargs: object) -> int:
        with open(self, "w") as file:
            file.write("hal")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_files("a", steps(40.0), "{}")
    assert names(output) == []


# --- with the report and the picture -------------------------------------------------------------


def test_the_json_is_the_report_and_the_report_names_the_files(output: Path) -> None:
    report, image = present.present(comparison(), "a")
    assert report.shown[-1] == "written: a_00001_.csv, a_00001_.json"
    stored = shape.Report.from_json((output / "a_00001_.json").read_text(encoding="utf-8"))
    assert stored.lines == report.lines[:-1]
    assert image.ndim == 4 and image.shape[2] == 1024
    assert "written" not in present.present(comparison(), "")[0].text


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), Exception("core refuses")])
def test_results_are_not_lost_where_they_cannot_be_written(
    output: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*args: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", refuse)
    report, _ = present.present(comparison(), "a")
    assert report.shown[0] == "PSNR 31.23 dB, SSIM 0.9877 (latents)"
    assert report.shown[1].startswith(f"WARNING: the files were not written ({type(error).__name__}: ")
    assert names(output) == []


def test_a_prefix_is_refused_with_a_report_too(output: Path) -> None:
    with pytest.raises(KitchenSolError, match="filename_prefix is"):
        present.present(
            results.Comparison((), *[getattr(comparison(), x) for x in ("final", "model", "reference")]),
            "../a",
        )
