"""The node in real ComfyUI: what it computes at which calls, by a spy on the kernel and by other code.

The tests know the order in which each tiny model calls attention, and derive from it, and from the steps and
layers, which calls must be sparse.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from int8_node import difference
from sol_node import FAMILIES, LONG, SHORT, patch, sdpa, spy_on, tally_of, with_override

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("inference")]

reference = inprocess.pack_module("kernels_glue.attention.reference")

# The attention calls of one evaluation: the layer of each, None for what is not self-attention of a block.
CALLS = {
    "wan": (0, None, 1, None),  # self- and cross-attention of two blocks
    "h3": (0, 1),
    "flux": (0, 1, 2, 3),  # two double blocks, two single blocks
}
STEPS = 5

MakeTiny = Callable[..., TinyModel]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tiny: MakeTiny) -> TinyModel:
    return tiny(request.param)


def sample(comfy: ModuleType, patcher: Any, model: TinyModel, **options: Any) -> torch.Tensor:
    return comfy.sample(patcher, model, **{"steps": STEPS, **SHORT[model.family], **options})


def text_rows(model: TinyModel, latent: dict[str, dict[str, int]] = SHORT) -> int:
    """Rows before the picture: Flux has the text there, H3 text and audio, Wan nothing."""
    audio = 2 * audio_length(latent) if model.family == "h3" else 0
    return {"wan": 0, "h3": model.context_shape[0] + audio, "flux": model.context_shape[0]}[model.family]


def audio_length(latent: dict[str, dict[str, int]]) -> int:
    """Audio frames of H3: core makes the latent, and its second part is [B, C, 2, T]."""
    from comfy_extras.nodes_minimax_h3 import EmptyMiniMaxH3LatentAV

    made = inprocess.run_node(EmptyMiniMaxH3LatentAV, **latent["h3"])[0]["samples"]
    return made.unbind()[1].shape[-1]


class Substitution:
    """An override of the test's own: dense, but for the calls that must be sparse.

    Args:
        dense_steps, dense_layers: what stays dense.
        latent: pixels and frames that are sampled.
    """

    def __init__(
        self,
        model: TinyModel,
        dense_steps: int,
        dense_layers: set[int],
        latent: dict[str, dict[str, int]] = SHORT,
    ):
        self.order = CALLS[model.family]
        self.dense_steps, self.dense_layers = dense_steps, dense_layers
        self.keys = (0, text_rows(model, latent))
        self.queries = self.keys if model.family == "h3" else (0, 0)
        self.calls = 0

    def __call__(
        self, func: Any, q: Any, k: Any, v: Any, heads: int, mask: Any = None, **options: Any
    ) -> torch.Tensor:
        step, position = divmod(self.calls, len(self.order))
        self.calls += 1
        layer = self.order[position]
        if layer is None or layer in self.dense_layers or step < self.dense_steps:
            return sdpa(func, q, k, v, heads, mask, **options)
        flat = not options.get("skip_reshape")
        q, k, v = (t.view(*t.shape[:2], heads, -1) if flat else t.transpose(1, 2) for t in (q, k, v))
        out = reference.sol_rowwise(q, k, v, tau=1.0, sink_keys=self.keys, sink_queries=self.queries).out
        return out.flatten(2)


def test_tau_far_below_is_dense_everywhere(
    comfy: ModuleType, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = comfy.load_unet(model.path)
    plain = sample(comfy, source, model)
    patched, _ = patch(comfy, source, tau=-100, dense_percent=0, dense_layers="")
    spy = spy_on(monkeypatch)
    out = sample(comfy, patched, model)
    assert difference(out, plain) < 1e-3
    layers = [layer for layer in CALLS[model.family] if layer is not None]
    assert spy.count == STEPS * len(layers)


def test_all_steps_dense_is_the_dense_backend_bit_for_bit(
    comfy: ModuleType, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = comfy.load_unet(model.path)
    spy = spy_on(monkeypatch)
    by_fa = sample(comfy, patch(comfy, source, dense_percent=1)[0], model)
    assert torch.equal(by_fa, sample(comfy, with_override(source, sdpa), model))
    by_current = sample(comfy, patch(comfy, source, dense_percent=1, dense_backend="current")[0], model)
    assert torch.equal(by_current, sample(comfy, source, model))
    assert spy.count == 0


@pytest.mark.parametrize(
    ("settings", "dense_steps", "dense_layers"),
    [
        # Scheduler simple takes even parts of the noise: 20% of 5 steps is one.
        ({}, 1, {0}),
        ({"dense_percent": 0.4, "dense_layers": "-1"}, 2, {-1}),
        ({"dense_steps": 3, "dense_layers": ""}, 3, set()),
    ],
)
def test_sparse_calls_are_those_that_steps_and_layers_predict(
    comfy: ModuleType,
    model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    dense_steps: int,
    dense_layers: set[int],
) -> None:
    order = CALLS[model.family]
    count = max(layer for layer in order if layer is not None) + 1
    dense = {layer % count for layer in dense_layers}
    rows = text_rows(model)
    source = comfy.load_unet(model.path)
    substituted = Substitution(model, dense_steps, dense)
    expected = sample(comfy, with_override(source, substituted), model)
    assert substituted.calls == STEPS * len(order)

    patched, _ = patch(comfy, source, **settings)
    spy = spy_on(monkeypatch)
    out = sample(comfy, patched, model)
    sparse_layers = [layer for layer in order if layer is not None and layer not in dense]
    assert spy.count == (STEPS - dense_steps) * len(sparse_layers)
    assert difference(out, expected) < 1e-3
    assert difference(out, sample(comfy, source, model)) > 2e-3
    for _, options in spy.calls:
        assert (options.sink_keys, options.sink_queries) == ((0, rows), substituted.queries)
    # The node's own counters agree with the spy, and name every dense call.
    tally = tally_of(patched)
    assert tally.sparse.total() == spy.count
    assert tally.dense.total() == tally.reasons.total() == STEPS * len(order) - spy.count


def test_sparse_differs_from_dense_by_what_it_leaves_out(comfy: ModuleType, model: TinyModel) -> None:
    source = comfy.load_unet(model.path)
    long = {**LONG[model.family], "steps": 2}
    plain = sample(comfy, source, model, **long)
    out = sample(comfy, patch(comfy, source, dense_percent=0, dense_layers="")[0], model, **long)
    expected = sample(comfy, with_override(source, Substitution(model, 0, set(), LONG)), model, **long)
    assert 1e-2 < difference(out, plain) < 0.5
    assert difference(out, expected) < 1e-3


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpm_2", "dpmpp_sde", "dpmpp_2m"])
def test_every_evaluation_of_a_sampler_goes_by_its_own_sigma(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    """Samplers with two evaluations a step use sigmas between those of the schedule."""
    from comfy.patcher_extension import WrappersMP

    model = tiny("wan")
    patched, _ = patch(comfy, comfy.load_unet(model.path), dense_percent=0.5)
    threshold = patched.get_model_object("model_sampling").percent_to_sigma(0.5)
    sigmas: list[float] = []

    def note(executor: Any, x: Any, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sigmas.append(float(t[0]))
        return executor(x, t, *args, **kwargs)

    patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", note)
    spy = spy_on(monkeypatch)
    comfy.sample(patched, model, steps=6, sampler=sampler)
    sparse = [sigma for sigma in sigmas if not sigma > threshold * (1 + 1e-6)]
    assert 0 < len(sparse) < len(sigmas)
    assert spy.count == len(sparse)  # one sparse layer of two


def test_tau_follows_its_curve_over_the_sparse_steps(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("wan")
    patched, _ = patch(
        comfy, comfy.load_unet(model.path), curve="linear", tau=0.5, tau_end=2.0, dense_steps=2
    )
    spy = spy_on(monkeypatch)
    comfy.sample(patched, model, steps=6)
    assert [options.tau for _, options in spy.calls] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_both_halves_of_a_batch_are_sparse(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wan evaluates the positive and the negative text together."""
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    spy = spy_on(monkeypatch)
    options = {"cfg": 4.0, "negative": True, **SHORT["wan"]}
    patched, _ = patch(comfy, source, tau=-100)
    out = comfy.sample(patched, model, **options)
    assert {shape[0] for shape, _ in spy.calls} == {2}
    assert difference(out, comfy.sample(source, model, **options)) < 1e-3


def test_h3_evaluates_its_texts_apart_and_counts_its_layers_anew(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Core runs H3's conditions one after the other: two evaluations for one notice of the step."""
    model = tiny("h3")
    patched, _ = patch(comfy, comfy.load_unet(model.path))
    spy = spy_on(monkeypatch)
    comfy.sample(patched, model, steps=STEPS, cfg=4.0, negative=True)
    assert spy.count == 2 * (STEPS - 1)  # layer 1 of both, but for the first step
    assert {shape[0] for shape, _ in spy.calls} == {1}


def test_less_denoise_keeps_the_same_noise_levels_dense(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At denoise 0.5 the sampler begins behind the first fifth of the noise: nothing is dense by step."""
    model = tiny("wan")
    patched, _ = patch(comfy, comfy.load_unet(model.path), dense_percent=0.2)
    spy = spy_on(monkeypatch)
    comfy.sample(patched, model, steps=4, denoise=0.5)
    assert spy.count == 4
    assert "dense step" not in tally_of(patched).reasons


def test_two_samplers_on_one_schedule_are_as_dense_as_one(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wan 2.2: one model for the noisy steps and one for the rest."""
    import nodes

    model = tiny("wan")
    high, _ = patch(comfy, comfy.load_unet(model.path), dense_percent=0.5)
    low, _ = patch(comfy, comfy.load_unet(model.path), dense_percent=0.5)
    positive, latent = comfy.conditioning(model), comfy.empty_latent(model)
    spy = spy_on(monkeypatch)
    counts = []
    for patcher, part in ((high, {"last_step": 3}), (low, {"start_step": 3, "disable_noise": True})):
        latent = nodes.common_ksampler(
            patcher, 7, 8, 1.0, "euler", "simple", positive, positive, latent, force_full_denoise=True, **part
        )[0]
        counts.append(spy.count)
    # Steps 0 to 3 of 8 are dense, whoever samples them; one layer of two is sparse.
    assert counts == [0, 4]
