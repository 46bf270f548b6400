"""Which steps are dense and what tau is at the others, against core's own percent_to_sigma and schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from comfyui import inprocess

inprocess.start()
config = inprocess.pack_module("kernels_glue.attention.config")
schedule = inprocess.pack_module("kernels_glue.attention.schedule")


def sampling(shift: float = 3.0) -> Any:
    """Core's flow sampling, as Wan and MiniMax-H3 have it."""
    from comfy.model_sampling import CONST, ModelSamplingDiscreteFlow

    model_sampling = type("Sampling", (ModelSamplingDiscreteFlow, CONST), {})()
    model_sampling.set_parameters(shift=shift)
    return model_sampling


def made(sigmas: Sequence[float], to_sigma: Callable[[float], float] | None = None, **settings: Any) -> Any:
    to_sigma = to_sigma or sampling().percent_to_sigma
    return schedule.make_schedule(config.SolConfig.of(settings), sigmas, to_sigma)


def schedule_of(steps: int, scheduler: str = "simple", shift: float = 3.0) -> list[float]:
    from comfy.samplers import calculate_sigmas

    return calculate_sigmas(sampling(shift), scheduler, steps).tolist()


def dense(made: Any) -> list[bool]:
    return [step.dense for step in made.steps]


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
@pytest.mark.parametrize(("steps", "percent", "first_sparse"), [(20, 0.2, 4), (10, 0.5, 5), (25, 0.2, 5)])
def test_percent_is_the_part_of_the_steps_of_an_even_schedule(
    shift: float, steps: int, percent: float, first_sparse: int
) -> None:
    """Scheduler simple goes through the noise evenly in core's percents, whatever the shift."""
    found = made(schedule_of(steps, shift=shift), sampling(shift).percent_to_sigma, dense_percent=percent)
    assert dense(found) == [index < first_sparse for index in range(steps)]
    assert found.sparse_steps == steps - first_sparse


@pytest.mark.parametrize("scheduler", ["karras", "beta", "sgm_uniform", "normal"])
@pytest.mark.parametrize("percent", [0.0, 0.13, 0.2, 0.77, 1.0])
def test_percent_is_a_sigma_for_every_scheduler(scheduler: str, percent: float) -> None:
    sigmas = schedule_of(17, scheduler)
    threshold = sampling().percent_to_sigma(percent)
    # No entry of these schedules is the threshold itself, where the last digit would decide.
    assert all(math.isnan(s) or abs(s - threshold) > 1e-4 or percent in (0.0, 1.0) for s in sigmas)
    assert dense(made(sigmas, dense_percent=percent)) == [s > threshold for s in sigmas[:-1]]


def test_percent_zero_and_one() -> None:
    assert not any(dense(made(schedule_of(8), dense_percent=0)))
    assert all(dense(made(schedule_of(8), dense_percent=1)))


def test_less_denoise_and_two_samplers_mean_the_same_sigmas() -> None:
    """Denoise 0.5 begins in the middle, two samplers share one schedule: the same sigmas stay dense."""
    whole = schedule_of(20)
    by_sigma = {
        sigma: step.dense for sigma, step in zip(whole, made(whole, dense_percent=0.6).steps, strict=False)
    }
    for part in (whole[10:], whole[:8], whole[7:]):
        found = made(part, dense_percent=0.6)
        assert dense(found) == [by_sigma[sigma] for sigma in part[:-1]]


def test_four_steps_may_leave_nothing_sparse() -> None:
    assert (
        made(schedule_of(4, shift=1.0), sampling(1.0).percent_to_sigma, dense_percent=0.8).sparse_steps == 0
    )
    assert made(schedule_of(4), dense_steps=4).sparse_steps == 0
    assert made(schedule_of(4), dense_steps=3).sparse_steps == 1


def test_steps_go_before_percent() -> None:
    found = made(schedule_of(10), dense_steps=3, dense_percent=1.0)
    assert dense(found) == [True] * 3 + [False] * 7
    assert not any(dense(made(schedule_of(10), dense_steps=0, dense_percent=1.0)))
    assert all(dense(made(schedule_of(10), dense_steps=99)))


def test_evaluations_between_two_entries_belong_to_the_step_that_has_begun() -> None:
    sigmas = schedule_of(10)
    found = made(sigmas, dense_steps=3)
    for index in range(9):
        between = (sigmas[index] + sigmas[index + 1]) / 2
        assert found.step(between).index == index
        assert found.step(between).dense == (index < 3)


def test_float32_and_float64_sigmas_are_the_same_step() -> None:
    sigmas = schedule_of(10)
    found = made([torch.tensor(s, dtype=torch.float32).item() for s in sigmas], dense_steps=4)
    for index, sigma in enumerate(sigmas[:-1]):
        for nudge in (1 - 1e-7, 1.0, 1 + 1e-7):
            assert found.step(sigma * nudge).index == index


def test_a_rising_schedule_counts_its_steps_upwards() -> None:
    """Inversion (unsampling) runs the schedule backwards."""
    found = made(schedule_of(6)[::-1], dense_steps=2)
    assert [step.index for step in found.steps] == [0, 1, 2, 3, 4, 5]
    assert dense(found) == [True, True, False, False, False, False]


def test_without_a_schedule_percent_still_holds_and_steps_are_safe() -> None:
    by_percent = made([], dense_percent=0.2)
    threshold = sampling().percent_to_sigma(0.2)
    assert by_percent.step(threshold * 1.1).dense and not by_percent.step(threshold * 0.9).dense
    assert made([], dense_steps=2).step(0.1).dense and not made([], dense_steps=0).step(0.1).dense


# --- tau ----------------------------------------------------------------------------------------


def taus(curve: str, steps: int = 10, dense_steps: int = 3) -> list[float]:
    found = made(schedule_of(steps), curve=curve, tau=0.5, tau_end=2.5, dense_steps=dense_steps)
    return [step.tau for step in found.steps if not step.dense]


def test_curves_run_over_the_sparse_steps_only() -> None:
    """Seven sparse steps: sixths of the way."""
    assert taus("constant") == [0.5] * 7
    assert taus("linear") == pytest.approx([0.5 + 2 * i / 6 for i in range(7)])
    assert taus("cosine") == pytest.approx([1.5 - math.cos(math.pi * i / 6) for i in range(7)])
    assert taus("step") == [0.5] * 3 + [2.5] * 4


@pytest.mark.parametrize("curve", ["linear", "cosine", "step"])
def test_a_single_sparse_step_has_the_first_tau(curve: str) -> None:
    assert taus(curve, steps=4, dense_steps=3) == [0.5]


@pytest.mark.parametrize("curve", ["linear", "cosine"])
def test_curves_begin_and_end_where_they_should(curve: str) -> None:
    found = taus(curve)
    assert (found[0], found[-1]) == (0.5, 2.5) and found == sorted(found)
