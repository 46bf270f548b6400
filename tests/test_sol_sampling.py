"""What follows a sampling: whose evaluation runs, and how often the GPU is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from sol_node import OVERRIDE, patch

pytestmark = pytest.mark.core

SolConfig = inprocess.pack_module("kernels_glue.attention.config").SolConfig
LayerSet = inprocess.pack_module("kernels_glue.attention.layers").LayerSet
SinkRule = inprocess.pack_module("kernels_glue.attention.sinks").SinkRule
sampling = inprocess.pack_module("kernels_glue.attention.sampling")

# A flow model without a shift, four steps of which the first two are dense.
SIGMAS = (1.0, 0.75, 0.5, 0.25, 0.0)
MODEL_SAMPLING = SimpleNamespace(percent_to_sigma=lambda percent: 1 - percent)


def session() -> Any:
    no_sinks = SinkRule(None, False, False)
    model = sampling.Model((("blocks", 1),), None, True, False, LayerSet(frozenset()), no_sinks)
    return sampling.Session(SolConfig.of({"dense_steps": 2}), model, lambda report: None)


class Model:
    """What core gives a wrapper of apply_model: calls `inside` in the place of the model."""

    class_obj = SimpleNamespace(diffusion_model=None, model_sampling=MODEL_SAMPLING)

    def __init__(self, inside: Callable[[], Any]):
        self._inside = inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inside()


def evaluate(
    session: Any, inside: Callable[[], Any], *, text: int = 1, t: Any = None, options: Any = None
) -> Any:
    """One evaluation with so many tokens of text, by which it is known again."""
    t = torch.tensor([1.0]) if t is None else t
    given = {OVERRIDE: None, **(options or {"sample_sigmas": torch.tensor(SIGMAS)})}
    return session.apply_model(None, Model(inside), None, t, None, torch.zeros(1, text, 4), None, given)


# --- whose evaluation runs -----------------------------------------------------------------------


def test_each_thread_sees_its_own_evaluation() -> None:
    """As core evaluates the copies of a model on several GPUs."""
    shared = session()
    both_inside = threading.Barrier(2, timeout=30)
    seen: dict[int, list[Any]] = {}

    def run(text: int) -> None:
        def inside() -> None:
            seen[text] = []
            for _ in range(2):  # after the other one began, and after it looked
                both_inside.wait()
                seen[text].append(shared.evaluation().text_tokens)

        evaluate(shared, inside, text=text)
        seen[text].append(shared.evaluation())

    threads = [threading.Thread(target=run, args=(text,)) for text in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == {3: [3, 3, None], 5: [5, 5, None]}


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_inside_of_another_gives_it_back(fails: bool) -> None:
    running = session()
    seen: list[int] = []

    def look() -> None:
        seen.append(running.evaluation().text_tokens)

    def inner() -> None:
        look()
        if fails:
            raise RuntimeError("of the model")

    def outer() -> None:
        look()
        if fails:
            with pytest.raises(RuntimeError, match="of the model"):
                evaluate(running, inner, text=5)
        else:
            evaluate(running, inner, text=5)
        look()

    assert running.evaluation() is None
    evaluate(running, outer, text=3)
    assert seen == [3, 5, 3] and running.evaluation() is None


# --- how often the GPU is waited for -------------------------------------------------------------


class Read(torch.Tensor):
    """A tensor that notes when its values are waited for."""

    reads: list[str]
    waiting = ("tolist", "item", "__float__", "__int__", "__bool__")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in cls.waiting:
            cls.reads.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_schedule_is_read_once_and_a_step_once_for_all_its_evaluations() -> None:
    running = session()
    patcher = SimpleNamespace(get_model_object=lambda name: MODEL_SAMPLING)
    sigmas = torch.tensor(SIGMAS).as_subclass(Read)
    Read.reads = []
    steps: list[tuple[int, bool]] = []

    def look() -> None:
        step = running.evaluation().step
        steps.append((step.index, step.dense))

    for sigma in SIGMAS[:-1]:
        t = torch.full((1,), sigma).as_subclass(Read)
        model_options = {"transformer_options": {"sample_sigmas": sigmas}}
        running.prepare(patcher, t, model_options)
        for _ in range(2):  # core evaluates H3's conditions one after the other
            evaluate(running, look, t=t, options=model_options["transformer_options"])
    assert steps == [step for step in ((0, True), (1, True), (2, False), (3, False)) for _ in range(2)]
    assert Read.reads == ["tolist"] + ["__float__"] * 4


def test_the_step_that_was_prepared_counts_and_not_that_of_another_patch() -> None:
    """The two models of a guider share their options, and one settles the step of both otherwise."""
    running, other = session(), session()
    patcher = SimpleNamespace(get_model_object=lambda name: MODEL_SAMPLING)
    options: dict[str, Any] = {"sample_sigmas": torch.tensor(SIGMAS)}
    running.prepare(patcher, torch.tensor([0.5]), {"transformer_options": options})
    seen: list[int] = []
    for one in (running, other):
        evaluate(
            one,
            lambda one=one: seen.append(one.evaluation().step.index),
            t=torch.tensor([0.25]),
            options=options,
        )
    assert seen == [2, 3]


def test_core_prepares_a_step_for_both_conditions_of_h3(
    comfy: ModuleType, tiny: Callable[..., TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"schedule": 0, "timestep": 0, "evaluation": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return count

    model = tiny("h3")
    patched, _ = patch(comfy, comfy.load_unet(model.path))
    monkeypatch.setattr(sampling, "make_schedule", counted("schedule", sampling.make_schedule))
    for name, method in (("timestep", "_step"), ("evaluation", "_evaluation")):
        monkeypatch.setattr(sampling.Session, method, counted(name, getattr(sampling.Session, method)))
    with torch.inference_mode():
        for run in (1, 2):
            comfy.sample(patched, model, steps=3, cfg=4.0, negative=True)
            assert counts == {"schedule": run, "timestep": 3 * run, "evaluation": 2 * 3 * run}
