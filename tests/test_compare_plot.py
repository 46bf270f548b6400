"""The picture of a comparison: its size, and that what there is to show is in it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from typing import Any

import pytest
import torch
from comfyui import inprocess
from compare_results import comparison, layers, results, steps, trials

plot = inprocess.pack_module("kernels_glue.compare.plot")
present = inprocess.pack_module("kernels_glue.compare.present")

BLUE, ORANGE, GREEN = "#2f6fde", "#d9722b", "#2c9f5b"


@pytest.fixture(autouse=True)
def _matplotlib() -> None:
    pytest.importorskip("matplotlib")


def pixels_of(image: torch.Tensor, color: str) -> torch.Tensor:
    """[H, W], where the picture has a colour."""
    wanted = torch.tensor([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return ((image[0] - wanted).abs() < 0.03).all(dim=2)


@pytest.mark.parametrize(
    ("changes", "height"),
    [
        ({}, 470),
        ({"layers": layers(12)}, 870),
        ({"recommendation": trials()}, 850),
        ({"layers": layers(2), "recommendation": trials(None)}, 1250),
        ({"recommendation": results.Recommendation(30.0, (), None)}, 470),
        ({"steps": steps(30.0)}, 470),
        ({"steps": ()}, 470),
        ({"steps": steps(math.nan, math.inf)}, 470),
        ({"steps": steps(*[30.0] * 200)}, 470),
        ({"layers": (results.LayerError("x" * 300, "int8", 0.0, 1),)}, 870),
    ],
)
def test_the_picture_grows_with_what_there_is(changes: dict[str, Any], height: int) -> None:
    image = plot.draw(comparison(**changes))
    assert image.shape == (1, height, 1024, 3) and image.dtype == torch.float32
    assert 0 <= image.min() < 0.3 and image.max() == 1
    assert (image == 1).float().mean() > 0.5


def test_the_same_comparison_is_the_same_picture_and_another_another() -> None:
    images = [
        plot.draw(comparison(steps=steps(*psnrs))) for psnrs in ((40.0, 30.0), (40.0, 30.0), (40.0, 31.0))
    ]
    assert torch.equal(images[0], images[1]) and not torch.equal(images[0], images[2])


def test_the_lines_follow_the_scores() -> None:
    image = plot.draw(comparison(steps=steps(50.0, 40.0, 30.0, 20.0)))

    def heights(*edges: float) -> list[float]:
        """Mean row of the blue line between parts of the picture's width, below the legend; 0 is the top."""
        blue = pixels_of(image, BLUE)[115:]
        stripes = [slice(int(left * 1024), int(right * 1024)) for left, right in itertools.pairwise(edges)]
        return [float(blue[:, stripe].nonzero()[:, 0].float().mean()) for stripe in stripes]

    psnr, error = heights(0.13, 0.2, 0.27, 0.33), heights(0.76, 0.83, 0.9, 0.97)
    assert psnr == sorted(psnr) and len(set(psnr)) == 3  # it falls
    assert error == sorted(error, reverse=True) and len(set(error)) == 3  # it grows


def test_an_equal_step_stands_on_the_upper_edge() -> None:
    made = steps(50.0, 45.0, 40.0)
    apart = dataclasses.replace(made[0], latent=made[1].latent)
    edges = [
        pixels_of(plot.draw(comparison(steps=shown)), ORANGE)[107:122, 100:250].sum()
        for shown in (made, (apart, *made[1:]))
    ]
    assert edges[0] > 30 and edges[1] == 0


def test_bars_are_as_long_as_the_errors() -> None:
    kinds = {"int8": (("a", 0.4), ("b", 0.2), ("c", 0.1)), "attention": (("3", 8.0), ("4", 2.0))}
    made = [results.LayerError(name, kind, error, 1) for kind, some in kinds.items() for name, error in some]
    image = plot.draw(comparison(layers=tuple(made)))[:, 470:]

    def bars(left: float, right: float) -> list[int]:
        """Lengths of the bars in a part of the picture, from above."""
        rows = pixels_of(image, BLUE)[:, int(left * 1024) : int(right * 1024)].sum(dim=1).tolist()
        return [length for length, same in itertools.groupby(rows) if length > 10 and len(list(same)) > 10]

    first, *others = bars(0, 0.62)
    assert [other / first for other in others] == pytest.approx([0.5, 0.25], abs=0.01)
    first, *others = bars(0.62, 1)  # each kind has a scale of its own
    assert [other / first for other in others] == pytest.approx([0.25], abs=0.02)


def axes_of(draw: Any, *args: Any, **kwargs: Any) -> Any:
    """The axes of one panel."""
    axes = inprocess.pack_module("kernels_glue.figures").new_figure(400, 300).subplots()
    draw(axes, *args, **kwargs)
    return axes


def test_a_layer_without_a_number_has_a_full_bar_and_says_so() -> None:
    made = [
        results.LayerError(name, "int8", error, 1)
        for name, error in (("a", math.nan), ("b", math.inf), ("c", 0.1), ("d", 0.05))
    ]
    worst = inprocess.pack_module("kernels_glue.compare.worst").worst_of(made)[0]
    axes = axes_of(plot._layers, worst)
    assert [bar.get_width() for bar in axes.patches] == [0.05, 0.1, 0.1, 0.1]  # from below
    [numbers] = axes.child_axes
    texts = [label.get_text() for label in numbers.get_yticklabels()]
    assert texts == ["5.0%", "10.0%", "infinite", "not defined"]
    image = plot.draw(comparison(layers=tuple(made[:1])))
    assert image.shape[1] == 870 and pixels_of(image[:, 470:], ORANGE).sum() > 1000


def test_a_panel_without_a_finite_value_says_so() -> None:
    for draw, made in ((plot._psnr, steps(math.nan, math.nan)), (plot._errors, ())):
        assert [text.get_text() for text in axes_of(draw, steps=made).texts] == [plot.NOTHING]
        assert not axes_of(draw, steps=steps(40.0, math.nan)).texts


def test_nothing_runs_into_each_other() -> None:
    figures = inprocess.pack_module("kernels_glue.figures")
    figure = figures.new_figure(512, 470)
    axes = figure.subplots()
    plot._psnr(axes, steps(*[30.0] * 1000))
    figures.as_image(figure)
    labels = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_visible()]
    assert all(one.x1 + 4 < other.x0 for one, other in itertools.pairwise(labels))
    # The legend hides no line.
    assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1


def test_the_recommended_trial_stands_out() -> None:
    chosen, none = (plot.draw(comparison(recommendation=trials(x)))[:, 470:] for x in (3, None))
    assert pixels_of(chosen, GREEN).sum() > 100 and not pixels_of(none, GREEN).any()
    without_tau = [dataclasses.replace(trial, tau=None) for trial in trials().trials]
    found = results.Recommendation(37.0, tuple(without_tau), without_tau[0])
    assert plot.draw(comparison(recommendation=found)).shape[1] == 470


def test_no_state_of_matplotlib_is_changed() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot.draw(comparison())
    assert dict(matplotlib.rcParams) == before
    assert not getattr(sys.modules.get("matplotlib.pyplot"), "get_fignums", list)()


def test_without_matplotlib_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report, image = present.present(comparison(), "")
    assert image.ndim == 4 and image.shape[3] == 3 and not image.any()
    assert report.shown[-1].startswith("note: the plot was not drawn, matplotlib does not work here (")
    assert report.shown[0] == "PSNR 31.23 dB, SSIM 0.9877 (latents)"
