"""Scores of a comparison against numpy's formulas, known cases and scikit-image itself."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from comfyui import inprocess
from torch.utils._python_dispatch import TorchDispatchMode

metrics = inprocess.pack_module("kernels_glue.compare.metrics")
perception = inprocess.pack_module("kernels_glue.compare.perception")
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError

INF, NAN = math.inf, math.nan


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(tensor: torch.Tensor, size: float = 0.1) -> torch.Tensor:
    return tensor + size * noise(*tensor.shape, seed=99)


def nested(*streams: torch.Tensor) -> Any:
    from comfy.nested_tensor import NestedTensor

    return NestedTensor(streams)


def by_numpy(model: torch.Tensor, reference: torch.Tensor, peak: float | None = None) -> list[float]:
    """PSNR, cosine and relative L2 by their definitions."""
    a, b = (np.asarray(t.double().numpy(), dtype=np.longdouble).ravel() for t in (model, reference))
    peak = b.max() - b.min() if peak is None else peak
    psnr = 20 * np.log10(peak) - 10 * np.log10(np.mean((a - b) ** 2))
    cosine = (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
    return [
        float(x)
        for x in (psnr, cosine, np.linalg.norm((a - b).astype(float)) / np.linalg.norm(b.astype(float)))
    ]


def values(score: Any) -> list[float]:
    return [score.psnr, score.cosine, score.relative_l2]


def equal_or_nan(found: list[float], expected: list[float]) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(found, expected, strict=True))


# --- PSNR, cosine, relative error ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 16, 3, 8, 8), (2, 4, 9, 7), (5,)])
def test_the_scores_are_those_of_the_formulas(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    reference = (3 * noise(*shape) + 1).to(dtype)
    model = near(reference).to(dtype)
    assert values(metrics.score(model, reference)) == pytest.approx(by_numpy(model, reference), rel=1e-9)


def test_many_pieces_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = noise(2, 5, 7, 9).transpose(1, 3)  # not contiguous, and nothing divides it
    model = near(reference)
    monkeypatch.setattr(metrics, "_CHUNK", 16)
    assert max(a.numel() for a, _ in metrics._pieces(model, reference)) <= 16
    assert values(metrics.score(model, reference)) == pytest.approx(by_numpy(model, reference), rel=1e-12)


def test_a_small_error_beside_a_large_mean_is_not_lost() -> None:
    """In fp32 the squares of 1e4 would hide a difference of 1e-3."""
    reference = 1e4 + torch.rand(50_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = reference + 1e-3
    found = metrics.score(model, reference)
    assert found.relative_l2 == pytest.approx(1e-7, rel=1e-3)
    assert found.psnr == pytest.approx(60, abs=0.01)


class Allocations(TorchDispatchMode):
    """The bytes of the largest result of an operation that is no view."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, result.nbytes)
        return result


def test_no_copy_of_a_large_tensor_is_made() -> None:
    reference = noise(5, 1000, 1000)
    model = near(reference).transpose(0, 2).contiguous().transpose(0, 2)
    with Allocations() as made:
        found = metrics.score(model, reference)
    assert math.isfinite(found.psnr)
    assert metrics._CHUNK < made.largest <= 8 * metrics._CHUNK  # of 40 MB in float64


@pytest.mark.parametrize("tensor", [noise(1, 4, 8, 8), torch.zeros(1, 4, 8, 8), torch.ones(3)])
def test_equal_tensors_are_perfect(tensor: torch.Tensor) -> None:
    assert values(metrics.score(tensor.clone(), tensor)) == [INF, 1.0, 0.0]


def test_directions() -> None:
    reference = noise(100)
    assert metrics.score(2 * reference, reference).cosine == pytest.approx(1.0) and (
        metrics.score(2 * reference, reference).cosine <= 1
    )
    assert metrics.score(-reference, reference).cosine == pytest.approx(-1.0)
    assert metrics.score(-reference, reference).relative_l2 == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("model", "reference", "expected"),
    [
        ([1.0, 2.0], [0.0, 0.0], [NAN, NAN, INF]),  # no range, no direction, no length
        ([0.0, 0.0], [1.0, 2.0], [10 * math.log10(1 / 2.5), NAN, 1.0]),
        ([1.0, NAN], [1.0, 2.0], [NAN, NAN, NAN]),
        ([1.0, 2.0], [1.0, INF], [NAN, NAN, NAN]),
        ([INF, 2.0], [INF, 2.0], [NAN, NAN, NAN]),
        ([], [], [NAN, NAN, NAN]),
    ],
)
def test_what_is_not_defined_is_nan(
    model: list[float], reference: list[float], expected: list[float]
) -> None:
    found = values(metrics.score(torch.tensor(model), torch.tensor(reference)))
    assert equal_or_nan([round(x, 9) for x in found], [round(x, 9) for x in expected])


def test_sound_and_video_count_as_one_vector() -> None:
    video, sound = noise(1, 24, 2, 8, 8), 5 * noise(1, 32, 2, 10, seed=1)
    models = near(video), near(sound, 0.3)
    found = metrics.score(nested(*models), nested(video, sound))
    joined = [torch.cat([t.flatten() for t in side]) for side in (models, (video, sound))]
    assert values(found) == pytest.approx(by_numpy(*joined), rel=1e-9)


@pytest.mark.parametrize("side", [0, 1])
def test_other_shapes_are_refused_with_both_named(side: int) -> None:
    pair = [noise(1, 16, 2, 8, 8), noise(1, 4, 8, 8)]
    if side:
        pair = [nested(noise(1, 24, 1, 8, 8), noise(1, 32, 2, 4)), noise(1, 4, 8, 8)]
    with pytest.raises(KitchenSolError) as caught:
        metrics.score(*pair)
    shape = "1x24x1x8x8 and 1x32x2x4" if side else "1x16x2x8x8"
    assert f"has the shape {shape}, the reference's 1x4x8x8." in str(caught.value)


# --- the results ---------------------------------------------------------------------------------


def test_an_offset_of_a_tenth_is_20_db_on_images() -> None:
    reference = torch.rand(3, 16, 16, 3, generator=torch.Generator().manual_seed(0)) * 0.5
    found = metrics.final(reference + 0.1, reference, images=True, lpips=False)
    assert found.psnr == pytest.approx(20.0, abs=1e-4)
    assert found.images and found.lpips is None and found.remarks == ()
    assert metrics.final_psnr(reference + 0.1, reference, images=True) == pytest.approx(20.0, abs=1e-4)


def test_ssim_of_images_is_scikit_images() -> None:
    ssim = pytest.importorskip("skimage.metrics").structural_similarity
    # Of less than half of the range that counts.
    reference = torch.rand(4, 24, 17, 3, generator=torch.Generator().manual_seed(0)) * 0.4
    model = near(reference).clamp(0, 1)
    expected = [
        ssim(reference[i].numpy(), model[i].numpy(), data_range=1.0, channel_axis=2) for i in range(4)
    ]
    found = metrics.final(model, reference, images=True, lpips=False)
    assert found.ssim == pytest.approx(float(np.mean(expected)), abs=1e-5)
    video = metrics.final(model[None], reference[None], images=True, lpips=False)  # [B, T, H, W, 3]
    assert video.ssim == found.ssim


@pytest.mark.parametrize("shape", [(2, 4, 3, 12, 10), (2, 4, 12, 10)])
def test_ssim_of_latents_is_the_mean_over_channels_and_frames(shape: tuple[int, ...]) -> None:
    ssim = pytest.importorskip("skimage.metrics").structural_similarity
    reference = noise(*shape)
    model = near(reference, 0.5)
    planes = [t.reshape(-1, *shape[-2:]).numpy() for t in (reference, model)]
    peak = float(reference.max() - reference.min())
    expected = np.mean([ssim(a, b, data_range=peak) for a, b in zip(*planes, strict=True)])
    found = metrics.final(model, reference, images=False, lpips=True)
    assert found.ssim == pytest.approx(float(expected), abs=1e-5)
    assert 0.1 < found.ssim < 0.99
    assert not found.images and found.lpips is None
    [psnr, *_] = by_numpy(model, reference)
    assert found.psnr == metrics.final_psnr(model, reference, images=False) == pytest.approx(psnr, rel=1e-9)


def test_frames_go_by_their_own_channels() -> None:
    """A swap of channels and frames would mix [B, C, T]: one broken frame of three costs a third."""
    reference = noise(1, 5, 3, 16, 16)
    model = reference.clone()
    model[:, :, 1] = noise(1, 5, 16, 16, seed=5)
    found = metrics.final(model, reference, images=False, lpips=False)
    assert found.ssim == pytest.approx(2 / 3, abs=0.05)


@pytest.mark.parametrize(("side", "window"), [(3, 3), (4, 3), (5, 5), (6, 5), (7, 7), (8, 7)])
def test_the_window_shrinks_with_the_frame(side: int, window: int) -> None:
    ssim = pytest.importorskip("skimage.metrics").structural_similarity
    reference = noise(1, 1, side, 20)
    model = near(reference, 0.5)
    peak = float(reference.max() - reference.min())
    expected = ssim(reference[0, 0].numpy(), model[0, 0].numpy(), data_range=peak, win_size=window)
    found = metrics.final(model, reference, images=False, lpips=False)
    assert found.ssim == pytest.approx(float(expected), abs=1e-5) and found.remarks == ()


def test_the_video_is_what_ssim_looks_at_of_sound_and_video() -> None:
    video, sound = noise(1, 24, 2, 8, 8), noise(1, 32, 2, 10, seed=1)
    model = nested(near(video, 0.5), near(sound, 2.0))
    found = metrics.final(model, nested(video, sound), images=False, lpips=False)
    whole = nested(video, sound)
    peak = max(float(t.max()) for t in whole.unbind()) - min(float(t.min()) for t in whole.unbind())
    alone, _ = perception.structural_similarity(near(video, 0.5), video, peak, False)
    assert found.ssim == alone
    assert found.psnr == metrics.score(model, whole).psnr


@pytest.mark.parametrize(
    ("model", "reference", "remark"),
    [
        (noise(1, 4, 9), noise(1, 4, 9, seed=1), "no SSIM: this latent has no frames"),
        (noise(1, 4, 2, 9), noise(1, 4, 2, 9, seed=1), "no SSIM: frames of 2 x 9 are too small for it"),
        (noise(1, 4, 9, 9), torch.ones(1, 4, 9, 9), "no SSIM: all values of the reference are the same"),
    ],
)
def test_where_there_is_no_ssim_it_says_why(
    model: torch.Tensor, reference: torch.Tensor, remark: str
) -> None:
    found = metrics.final(model, reference, images=False, lpips=False)
    assert math.isnan(found.ssim) and found.remarks == (remark,)


def test_equal_results_are_perfect_and_broken_ones_not_defined() -> None:
    same = noise(1, 4, 9, 9)
    found = metrics.final(same.clone(), same, images=False, lpips=False)
    assert (found.psnr, found.ssim, found.remarks) == (INF, 1.0, ())
    broken = same.clone()
    broken[0, 0, 0, 0] = NAN
    for pair in ((broken, same), (same, broken)):
        found = metrics.final(*pair, images=False, lpips=True)
        assert math.isnan(found.psnr) and math.isnan(found.ssim) and found.lpips is None


def test_many_frames_are_sampled_evenly_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("skimage")
    monkeypatch.setattr(perception, "MAX_FRAMES", 5)
    reference = torch.rand(9, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    model = reference.clone()
    model[1::2] = 0  # every second frame is broken, and none of them is looked at
    found = metrics.final(model, reference, images=True, lpips=False)
    assert found.ssim == pytest.approx(1.0)
    assert found.remarks == ("SSIM: of 5 of 9 frames, evenly spaced",)


def test_frames_of_latents_are_sampled_with_all_their_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("skimage")
    monkeypatch.setattr(perception, "MAX_FRAMES", 3)
    reference = noise(1, 4, 5, 8, 8)
    model = reference.clone()
    model[:, :, 1::2] = 0  # frames 0, 2 and 4 are looked at
    model[:, 1, 2] = 0
    found = metrics.final(model, reference, images=False, lpips=False)
    assert found.ssim == pytest.approx(1 - 1 / 12, abs=0.02)  # one plane of twelve
    assert found.remarks == ("SSIM: of 3 of 5 frames, evenly spaced",)


@pytest.mark.parametrize(("count", "limit"), [(1, 4), (4, 4), (5, 4), (1000, 64), (65, 64)])
def test_sampled_frames(count: int, limit: int) -> None:
    chosen = list(perception.sampled(count, limit))
    assert len(set(chosen)) == len(chosen) == min(count, limit) and chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (0, count - 1)
    gaps = np.diff(chosen)
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


def test_without_scikit_image_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "skimage"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "skimage", None)
    reference = noise(1, 4, 9, 9)
    found = metrics.final(near(reference), reference, images=False, lpips=False)
    assert math.isnan(found.ssim) and math.isfinite(found.psnr)
    assert found.remarks[0].startswith("no SSIM: scikit-image does not work here (ModuleNotFoundError: ")


# --- LPIPS ---------------------------------------------------------------------------------------


def package(network: Any) -> ModuleType:
    """A stand-in for the package lpips, whose weights cannot be fetched in a test."""
    module = ModuleType("lpips")
    module.LPIPS = network
    module.__spec__ = sys.__spec__
    return module


class Network(torch.nn.Module):
    """Mean absolute difference, of what lpips takes: [1, 3, H, W] in -1..1."""

    def __init__(self, net: str, verbose: bool) -> None:
        super().__init__()
        assert net == "alex" and not verbose
        self.weight = torch.nn.Parameter(torch.rand(3))  # random numbers, as the real one draws

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert not self.training and a.shape == b.shape == (1, 3, 8, 6)
        assert a.dtype == torch.float32 and a.min() >= -1 and a.max() <= 1 and a.min() < -0.5
        return (a - b).abs().mean().reshape(1, 1, 1, 1)


def test_lpips_gets_frames_in_its_own_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lpips", package(Network))
    reference = torch.rand(2, 8, 6, 3, generator=torch.Generator().manual_seed(0)) * 0.8
    state = torch.random.get_rng_state()
    found = metrics.final(reference + 0.1, reference, images=True, lpips=True)
    assert found.lpips == pytest.approx(0.2, abs=1e-5)  # twice the difference in 0..1
    assert torch.equal(torch.random.get_rng_state(), state)
    assert metrics.final(reference + 0.1, reference, images=True, lpips=False).lpips is None


def test_whatever_fails_about_lpips_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(**options: Any) -> Any:
        raise OSError("no network\nand a long story")

    reference = torch.rand(1, 8, 6, 3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setitem(sys.modules, "lpips", package(offline))
    found = metrics.final(reference * 0.9, reference, images=True, lpips=True)
    assert found.lpips is None and math.isfinite(found.ssim)
    assert found.remarks == ("no LPIPS: the package lpips does not work here (OSError: no network)",)

    without_spec = package(offline)
    without_spec.__spec__ = None
    monkeypatch.setitem(sys.modules, "lpips", without_spec)
    found = metrics.final(reference * 0.9, reference, images=True, lpips=True)
    assert found.lpips is None and math.isfinite(found.ssim)
    assert found.remarks[0].startswith("no LPIPS: the package lpips does not work here (ValueError: ")

    monkeypatch.delitem(sys.modules, "lpips")
    monkeypatch.setattr(perception.importlib.util, "find_spec", lambda name: None)
    found = metrics.final(reference * 0.9, reference, images=True, lpips=True)
    assert found.lpips is None
    assert found.remarks == ("no LPIPS: the package lpips is not installed (pip install lpips)",)
