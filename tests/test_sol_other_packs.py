"""Attention overrides of other packs: used, left aside, or in the way and said so."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from int8_node import difference
from sol_node import OVERRIDE, patch, shown, spy_on, tally_of, with_override

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("inference")]

KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError
STEPS = 3
SETTINGS = {"dense_steps": 1, "dense_layers": ""}
SPARSE, DENSE = 2 * 2, 2 + 3 * 2  # self-attention of the first step, cross-attention of all


@pytest.fixture
def model(tiny: Callable[..., TinyModel]) -> TinyModel:
    return tiny("wan")


@pytest.fixture
def source(comfy: ModuleType, model: TinyModel) -> Any:
    return comfy.load_unet(model.path)


class Foreign:
    """An override of another pack, which doubles what it computes."""

    def __init__(self, chained: Any = None):
        self.calls = 0
        self._chained = chained

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        if self._chained is not None:
            return self._chained(function, *args, **kwargs)
        return 2 * function(*args, **kwargs)


def test_an_earlier_override_is_named_where_it_is_not_used(
    comfy: ModuleType, source: Any, model: TinyModel
) -> None:
    """Behind a pack that it knows nothing of, the node says why that one has no effect."""
    foreign = Foreign()
    earlier = with_override(source, foreign)
    patched, report = patch(comfy, earlier, **SETTINGS)
    [line] = [line for line in report.splitlines() if "from before this node" in line]
    assert "test_sol_other_packs.Foreign" in line and "not used, because dense_backend is fa" in line
    alone, without = patch(comfy, source, **SETTINGS)
    assert "from before this node" not in without
    bits = comfy.sample(patched, model, steps=STEPS)
    assert torch.equal(bits, comfy.sample(alone, model, steps=STEPS)) and foreign.calls == 0


def test_current_goes_on_using_an_earlier_override(
    comfy: ModuleType, source: Any, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = Foreign()
    earlier = with_override(source, foreign)
    expected = comfy.sample(earlier, model, steps=STEPS)
    assert difference(expected, comfy.sample(source, model, steps=STEPS)) > 0.05
    calls, foreign.calls = foreign.calls, 0
    everything, report = patch(comfy, earlier, dense_backend="current", dense_percent=1)
    assert "dense: current (test_sol_other_packs.Foreign)" in report and "not used" not in report
    assert torch.equal(comfy.sample(everything, model, steps=STEPS), expected)
    assert foreign.calls == calls == SPARSE + DENSE
    foreign.calls = 0
    spy = spy_on(monkeypatch)
    some, _ = patch(comfy, earlier, dense_backend="current", **SETTINGS)
    comfy.sample(some, model, steps=STEPS)
    assert (spy.count, foreign.calls) == (SPARSE, DENSE)
    # Applied twice, it is still the foreign one that is kept, and not the node's own.
    foreign.calls = 0
    twice, _ = patch(comfy, some, dense_backend="current", **SETTINGS)
    comfy.sample(twice, model, steps=STEPS)
    assert (spy.count, foreign.calls) == (2 * SPARSE, DENSE)


def test_twice_with_another_pack_between_goes_by_the_later_settings(
    comfy: ModuleType, tiny: Callable[..., TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`current` passes dense calls on to the other pack, and that one to the earlier node."""
    model = tiny("h3")
    source = comfy.load_unet(model.path)
    settings = {"dense_steps": 1, "dense_layers": "1", "dense_backend": "current"}
    once, _ = patch(comfy, source, **settings)
    first, _ = patch(comfy, source, dense_backend="current", dense_percent=0, dense_layers="")
    foreign = Foreign(first.model_options["transformer_options"][OVERRIDE])
    twice, _ = patch(comfy, with_override(first, foreign), **settings)
    spy = spy_on(monkeypatch)
    bits = comfy.sample(once, model, steps=STEPS)
    assert spy.count == 2  # layer 0 of the last two steps
    assert torch.equal(comfy.sample(twice, model, steps=STEPS), bits)
    assert spy.count == 4 and foreign.calls == 2 + 2


def test_a_later_override_that_takes_everything_is_a_warning(
    comfy: ModuleType,
    source: Any,
    model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    patched, texts = shown(source, **SETTINGS)
    spy = spy_on(monkeypatch)
    replaced = with_override(patched, Foreign())
    out = comfy.sample(replaced, model, steps=STEPS)
    assert torch.equal(out, comfy.sample(with_override(source, Foreign()), model, steps=STEPS))
    assert spy.count == 0
    first = texts[-1].splitlines()[0]
    assert first.startswith("WARNING: test_sol_other_packs.Foreign was set after this node and takes all")
    assert [record.levelname for record in caplog.records if "set after this node" in record.message] == [
        "WARNING"
    ]
    # Without it the same patch is sparse, and warns no more.
    comfy.sample(patched, model, steps=STEPS)
    assert spy.count == SPARSE and "WARNING" not in texts[-1]

    strict, _ = shown(source, strict=True, **SETTINGS)
    with pytest.raises(KitchenSolError, match=r"strict is on, and .*Foreign was set after .*Put this node"):
        comfy.sample(with_override(strict, Foreign()), model, steps=STEPS)
    comfy.sample(strict, model, steps=STEPS)


def test_a_later_override_that_passes_on_is_a_note(
    comfy: ModuleType, source: Any, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched, texts = shown(source, strict=True, **SETTINGS)
    foreign = Foreign(patched.model_options["transformer_options"][OVERRIDE])
    spy = spy_on(monkeypatch)
    bits = comfy.sample(with_override(patched, foreign), model, steps=STEPS)
    assert torch.equal(bits, comfy.sample(patched, model, steps=STEPS))
    assert spy.count == 2 * SPARSE and foreign.calls == SPARSE + DENSE
    assert "note: test_sol_other_packs.Foreign was set after this node and passes calls on to it" in texts[0]
    assert "WARNING" not in texts[0] and "Foreign" not in texts[1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_override_that_installs_itself_at_every_step(
    comfy: ModuleType, source: Any, model: TinyModel, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """As core's native sparse attention does it, whichever node comes first."""
    from comfy.patcher_extension import CallbacksMP

    foreign = Foreign()

    def install(patcher: Any, timestep: Any, model_options: dict[str, Any]) -> None:
        model_options["transformer_options"][OVERRIDE] = foreign

    def installed(patcher: Any) -> Any:
        clone = patcher.clone()
        clone.add_callback_with_key(CallbacksMP.ON_PREPARE_STATE, "foreign", install)
        return clone

    spy = spy_on(monkeypatch)
    if when == "before":
        result, texts = shown(installed(source), **SETTINGS)
    else:
        patched, texts = shown(source, **SETTINGS)
        result = installed(patched)
    out = comfy.sample(result, model, steps=STEPS)
    assert torch.equal(out, comfy.sample(with_override(source, foreign), model, steps=STEPS))
    assert spy.count == 0 and foreign.calls == 2 * (SPARSE + DENSE)
    assert texts[-1].startswith("WARNING: test_sol_other_packs.Foreign was set after this node")


def test_an_override_that_is_taken_away_is_said(comfy: ModuleType, source: Any, model: TinyModel) -> None:
    patched, texts = shown(source, **SETTINGS)
    clone = patched.clone()
    del clone.model_options["transformer_options"][OVERRIDE]
    bits = comfy.sample(clone, model, steps=STEPS)
    assert torch.equal(bits, comfy.sample(source, model, steps=STEPS))
    assert texts[-1].startswith("WARNING: a patch that takes it out was set after this node")
    # A wrapper that is nearer to the model: nobody sees it but by the calls that do not come.
    from comfy.patcher_extension import WrappersMP

    def hide(executor: Any, *args: Any, **kwargs: Any) -> Any:
        *others, options = args
        return executor(*others, {k: v for k, v in options.items() if k != OVERRIDE}, **kwargs)

    hidden = patched.clone()
    hidden.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", hide)
    assert torch.equal(comfy.sample(hidden, model, steps=STEPS), bits)
    assert texts[-1].startswith("WARNING: the model made no attention call that reaches this node")
    assert tally_of(patched).calls == 0
