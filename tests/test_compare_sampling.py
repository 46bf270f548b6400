"""Both samplings of a comparison are core's own, and each step is recorded as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from compare_node import STEPS, by_hand, compare, inputs, psnr
from int8_node import quantize
from sol_node import patch

pytestmark = pytest.mark.usefixtures("inference")

MakeTiny = Callable[..., TinyModel]

sampling = inprocess.pack_module("kernels_glue.compare.sampling")
meter = inprocess.pack_module("kernels_glue.compare.meter")


@pytest.mark.core
@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral", "heun", "uni_pc"])
@pytest.mark.parametrize("family", ["wan", "h3", "flux"])
def test_the_bits_are_those_of_samplercustom(
    comfy: ModuleType, tiny: MakeTiny, family: str, sampler: str
) -> None:
    model = tiny(family)
    patcher = comfy.load_unet(model.path)
    given = inputs(comfy, model, sampler=sampler)
    expected = by_hand(patcher, vars(given))
    found = sampling.sample(patcher, given)
    assert torch.equal(comfy.flatten_latent(found.latent["samples"]), expected)
    assert found.steps == STEPS and found.latent.keys() == {"samples"} | (
        given.latent_image.keys() - {"downscale_ratio_spacial", "downscale_ratio_temporal"}
    )


def test_masks_batches_and_cfg(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("flux")
    patcher = comfy.load_unet(model.path)
    mask = torch.zeros(1, 64, 64)
    mask[:, :32] = 1.0
    latent = {"samples": torch.randn(2, 16, 8, 8), "noise_mask": mask, "batch_index": [3, 1]}
    given = inputs(comfy, model, latent_image=latent, cfg=3.0)
    expected = by_hand(patcher, vars(given))
    assert torch.equal(sampling.sample(patcher, given).latent["samples"], expected)
    assert not torch.equal(by_hand(patcher, vars(inputs(comfy, model, latent_image=latent))), expected)


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "h3"])
def test_the_second_stage_starts_from_the_latent_as_it_is(
    comfy: ModuleType, tiny: MakeTiny, family: str
) -> None:
    model = tiny(family)
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source)[0]
    sigmas = torch.linspace(1.0, 0.0, 5)
    first = sampling.sample(source, inputs(comfy, model, sigmas=sigmas[:3])).latent
    given = inputs(comfy, model, sigmas=sigmas[2:], latent_image=first, add_noise=False)
    latent, reference, found = compare(int8, None, given)
    for made, patcher in ((latent, int8), (reference, source)):
        assert torch.equal(comfy.flatten_latent(made["samples"]), by_hand(patcher, vars(given)))
    with_noise = inputs(comfy, model, sigmas=sigmas[2:], latent_image=first)
    assert not torch.equal(by_hand(source, vars(given)), by_hand(source, vars(with_noise)))
    assert [step.sigma for step in found.steps] == pytest.approx([0.5, 0.25])


def path(patcher: Any, given: Any) -> list[tuple[float, torch.Tensor, torch.Tensor]]:
    """The steps as core's sampler tells of them."""
    import comfy.sample
    import comfy.samplers

    told = []
    latent = given.latent_image["samples"]
    latent = comfy.sample.fix_empty_latent_channels(patcher, latent)
    comfy.sample.sample_custom(
        patcher, comfy.sample.prepare_noise(latent, given.noise_seed), given.cfg, given.sampler, given.sigmas,
        given.positive, given.negative, latent, seed=given.noise_seed, disable_pbar=True,
        callback=lambda step, x0, x, total: told.append(
            (float(given.sigmas[step]), flat(x0), flat(x))
        ),
    )  # fmt: skip
    return told


def flat(samples: Any) -> torch.Tensor:
    return inprocess.flatten_latent(samples).reshape(-1)


@pytest.mark.core
@pytest.mark.parametrize("family", ["wan", "h3"])
def test_every_step_against_numpy(comfy: ModuleType, tiny: MakeTiny, family: str) -> None:
    model = tiny(family)
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source)[0]
    given = inputs(comfy, model)
    one, other = path(int8, given), path(source, given)
    latent, reference, found = compare(int8, source, given)
    assert len(found.steps) == STEPS and found.remarks == ()
    for step, mine, theirs in zip(found.steps, one, other, strict=True):
        assert step.sigma == pytest.approx(theirs[0])
        assert step.denoised.psnr == pytest.approx(psnr(mine[1], theirs[1]), abs=1e-3)
        if step.step:
            assert step.latent.psnr == pytest.approx(psnr(mine[2], theirs[2]), abs=1e-3)
    assert [step.step for step in found.steps] == list(range(STEPS))
    assert found.steps[0].latent.psnr == float("inf")  # the same noise
    expected = psnr(flat(latent["samples"]), flat(reference["samples"]))
    assert found.final.psnr == pytest.approx(expected, abs=1e-3)
    assert torch.equal(flat(latent["samples"]), by_hand(int8, vars(given)).reshape(-1))
    assert torch.equal(flat(reference["samples"]), by_hand(source, vars(given)).reshape(-1))


@pytest.mark.core
def test_without_a_reference_it_is_the_model_without_the_nodes(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    patched = patch(comfy, quantize(comfy, source)[0], dense_steps=1)[0]
    given = inputs(comfy, model)
    texts: list[str] = []
    latent, reference, found = compare(patched, None, given, progress=texts.append)
    assert torch.equal(reference["samples"], by_hand(source, vars(given)))
    assert torch.equal(latent["samples"], by_hand(patched, vars(given)))
    assert 20 < found.final.psnr < 80
    counts = [f"{who}: {step} of 3 steps" for who in ("reference", "model") for step in range(4)]
    assert texts == counts
    assert found.model.weight_bytes < 0.8 * found.reference.weight_bytes
    for usage in (found.model, found.reference):
        assert usage.seconds_per_step > 0 and usage.first_step_seconds > 0 and usage.host_bytes >= 0
        assert (usage.peak_device_bytes is None) == (source.load_device.type == "cpu")


@pytest.mark.core
def test_a_model_against_itself(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    for reference, remark in (
        (None, "the model carries no node of this pack, so it is compared with itself"),
        (source, "`reference` is the same model, so it is compared with itself"),
    ):
        *_, found = compare(source, reference, inputs(comfy, model))
        assert found.remarks == (remark,)
        assert found.final.psnr == float("inf")
        assert {(step.denoised.psnr, step.denoised.cosine) for step in found.steps} == {(float("inf"), 1.0)}


def test_no_evaluation_is_added(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    calls: list[str] = []

    def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("call")
        return executor(*args, **kwargs)

    source.add_wrapper("diffusion_model", counted)
    int8 = quantize(comfy, source)[0]
    compare(int8, None, inputs(comfy, model), layers=True)
    assert len(calls) == 2 * STEPS


def test_nothing_stays_on_the_inputs(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    patched = patch(comfy, source, min_tokens=1)[0]
    given = inputs(comfy, model)

    def state() -> Any:
        patchers = [(p.model_options, p.callbacks, p.wrappers, p.attachments) for p in (source, patched)]
        return copy.copy(vars(given.sampler)), copy.deepcopy(patchers), given.latent_image.keys()

    before = state()
    compare(patched, None, given, layers=True)
    assert repr(state()) == repr(before)


def test_samplers_that_write_into_what_they_told_of(comfy: ModuleType, tiny: MakeTiny) -> None:
    from comfy.samplers import KSAMPLER

    model = tiny("wan")
    source = comfy.load_unet(model.path)

    def writes(run: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any, disable: Any) -> Any:
        for i in range(2):
            out = run(x, sigmas[i : i + 1], **extra_args)
            callback({"i": i, "x": x, "denoised": out})
            x.add_(1)
            out.zero_()
        return x

    *_, found = compare(source, source.clone(), inputs(comfy, model, sampler=KSAMPLER(writes)))
    scores = [score for step in found.steps for score in (step.denoised, step.latent)]
    assert [(score.psnr, score.cosine) for score in scores] == [(float("inf"), 1.0)] * 4


# --- time ------------------------------------------------------------------------------------------


class Clock:
    """A patcher on the CPU whose step 0, 1, ... takes so many seconds, and twice as long in between."""

    load_device = torch.device("cpu")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float):
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(meter.time, "perf_counter", lambda: self.now)

    def model_size(self) -> int:
        return 0

    def usage(self, disturbed: set[int]) -> Any:
        made = meter.Meter(self, disturbed)
        made.begin()
        for seconds in self.seconds:
            self.now += seconds
            made.step()
            self.now += 2 * seconds
            made.resume()
        return made.usage()


@pytest.mark.parametrize(
    ("seconds", "disturbed", "expected"),
    [
        ((9.0, 1.0, 2.0, 4.0), set(), 2.0),
        ((9.0, 1.0, 5.0, 4.0), {0, 2, 3}, 1.0),  # where layers were looked at
        ((9.0, 1.0, 3.0), {0, 1, 2}, 2.0),  # there is no other
        ((9.0,), {0}, 9.0),
    ],
)
def test_a_step_takes(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], disturbed: set[int], expected: float
) -> None:
    usage = Clock(monkeypatch, *seconds).usage(disturbed)
    assert (usage.seconds_per_step, usage.first_step_seconds) == (expected, seconds[0])


# --- what cannot be compared ---------------------------------------------------------------------


@pytest.mark.core
def test_another_family(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    one, other = comfy.load_unet(model.path), comfy.load_unet(tiny("flux").path)
    with pytest.raises(
        ValueError, match=r"Kitchen Compare Models: the model is a WAN21 and the reference a Flux"
    ):
        compare(one, other, inputs(comfy, model))


@pytest.mark.core
def test_a_schedule_without_a_step(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    for sigmas in (torch.tensor([1.0]), torch.tensor([])):
        with pytest.raises(ValueError, match=rf"sigmas has {len(sigmas)} values?, which is no step"):
            compare(comfy.load_unet(model.path), None, inputs(comfy, model, sigmas=sigmas))


def test_numbers_that_are_none(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source, broken = comfy.load_unet(model.path), comfy.load_unet(model.path)
    broken.model.diffusion_model.head.head.bias.fill_(float("nan"))
    *_, found = compare(broken, source, inputs(comfy, model))
    assert found.warnings == (
        "the result of the model has NaN or infinite values, so its scores mean nothing",
    )
    assert found.final.psnr != found.final.psnr and found.remarks == ()


class Decoder:
    """A VAE: the first three channels of a latent, as images."""

    def __init__(self, error: str = "", good: int = 0):
        self.error, self.good = error, good

    def decode(self, samples: torch.Tensor) -> torch.Tensor:
        self.good -= 1
        if self.error and self.good < 0:
            raise RuntimeError(self.error)
        return samples[:, :3].movedim(1, -1).sigmoid()


@pytest.mark.core
def test_images(comfy: ModuleType, tiny: MakeTiny) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    int8 = quantize(comfy, source)[0]
    latent, reference, found = compare(int8, source, inputs(comfy, model), vae=Decoder())
    one, other = (Decoder().decode(x["samples"]).double() for x in (latent, reference))
    assert found.final.images
    assert found.final.psnr == pytest.approx(-10 * ((one - other) ** 2).mean().log10().item(), abs=1e-3)
    for good in (0, 1):  # the first result, or the second
        vae = Decoder("no such channels", good)
        *_, found = compare(int8, source, inputs(comfy, model), vae=vae)
        assert not found.final.images
        assert found.remarks == (
            "the VAE cannot decode the results, so latents are compared (RuntimeError: no such channels)",
        )


def test_samplers_that_adapt_their_steps(comfy: ModuleType, tiny: MakeTiny) -> None:
    """dpm_fast and the like choose their own; a sampler may also tell of none."""
    from comfy.samplers import KSAMPLER

    model = tiny("wan")
    source = comfy.load_unet(model.path)
    counts = iter((4, 2, 0, 0))

    def odd(run: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any, disable: Any) -> Any:
        for i in range(next(counts)):
            out = run(x, sigmas[:1], **extra_args)
            callback({"i": i, "x": x, "denoised": out})
        return x

    given = inputs(comfy, model, sampler=KSAMPLER(odd))
    *_, found = compare(source, source.clone(), given)
    assert len(found.steps) == 2
    assert found.remarks == (
        "the sampler took 2 steps for the model and 4 for the reference; the first 2 of each are compared",
    )
    texts: list[str] = []
    *_, found = compare(source, source.clone(), given, progress=texts.append)
    assert texts == [
        text for who in ("reference", "model") for text in (f"{who}: 0 of 3 steps", f"{who}: done in 0 steps")
    ]
    assert found.steps == () and "the sampler tells nothing of its steps" in found.remarks[0]
    assert found.model.seconds_per_step > 0


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpm_fast", "dpm_adaptive"])
def test_the_sigma_of_a_step_is_one_that_the_model_saw(
    comfy: ModuleType, tiny: MakeTiny, sampler: str
) -> None:
    model = tiny("wan")
    source = comfy.load_unet(model.path)
    seen: list[float] = []

    def look(executor: Any, *args: Any, **kwargs: Any) -> Any:
        [options] = [x for x in (*args, *kwargs.values()) if isinstance(x, dict) and "sigmas" in x]
        seen.append(options["sigmas"][0].item())
        return executor(*args, **kwargs)

    int8 = quantize(comfy, source)[0]
    int8.add_wrapper("diffusion_model", look)
    sigmas = torch.linspace(0.9, 0.1, 5)
    texts: list[str] = []
    given = inputs(comfy, model, sigmas=sigmas, sampler=sampler)
    *_, found = compare(int8, source, given, progress=texts.append, layers=True)
    ours = [step.sigma for step in found.steps]
    assert ours and set(ours) <= set(seen)
    looked = [x for x in found.remarks if "layers were looked at" in x]
    if sampler in ("euler", "heun"):
        assert ours == pytest.approx(sigmas[:-1].tolist()) and not looked
        assert texts[-1] == "model: 4 of 4 steps"
        return
    steps = len(ours)
    assert steps != 4 and texts[-1] == f"model: done in {steps} steps"
    assert not [text for text in texts if text.startswith("model: 5 of 4")]
    where = "step 1" if sampler == "dpm_fast" else "steps 1, 3, 4"
    assert looked == [
        f"the schedule has 4 steps and the sampler took {steps}; layers were looked at in {where} alone"
    ]
    # Errors of INT8 have the adaptive one take steps of another size.
    apart = [
        x for x in found.remarks if x.startswith("the sampler took the two models through different sigmas")
    ]
    assert len(apart) == (sampler == "dpm_adaptive")
