"""Sol Attention Patch among other nodes: each does its work, in either order, and the text says what lost."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import builders
from comfyui.builders import TinyModel
from comfyui.weights import random_tensor
from int8_node import LORA_A, difference, quantize
from sol_node import OVERRIDE, patch, shown, spy_on, tally_of

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("inference")]

MakeTiny = Callable[..., TinyModel]
KEY = "kitchen_sol_attention"  # of the node's callbacks and wrappers
STEPS = 3
# What a sampling of the tiny Wan with these settings must have: layers 0 and 1, steps 1 and 2 of 3.
SETTINGS = {"dense_steps": 1, "dense_layers": ""}
SPARSE = 2 * 2
# 3 latent frames of 10 x 10 patches: five blocks of tokens.
LATENT = {"width": 160, "height": 160, "length": 9}


@pytest.fixture
def model(tiny: MakeTiny) -> TinyModel:
    return tiny("wan")


def sample(comfy: ModuleType, patcher: Any, model: TinyModel, **options: Any) -> torch.Tensor:
    latent = LATENT if model.family in ("wan", "vace") else {}
    return comfy.sample(patcher, model, **{"steps": STEPS, **latent, **options})


# --- applied twice -------------------------------------------------------------------------------


def test_twice_is_once_with_the_later_settings(
    comfy: ModuleType, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = comfy.load_unet(model.path)
    once, report = patch(comfy, source, tau=0.5, **SETTINGS)
    first, _ = patch(comfy, source, tau=2.0, dense_backend="current")
    twice, report_of_twice = patch(comfy, first, tau=0.5, **SETTINGS)
    assert report_of_twice == report
    spy = spy_on(monkeypatch)
    bits = sample(comfy, once, model)
    assert spy.count == SPARSE
    assert torch.equal(sample(comfy, twice, model), bits)
    assert spy.count == 2 * SPARSE
    assert {options.tau for _, options in spy.calls} == {0.5}
    for kind in ("callbacks", "wrappers"):
        found = getattr(twice, kind)
        mine = {moment: keys[KEY] for moment, keys in found.items() if KEY in keys}
        assert len(mine) == (3 if kind == "callbacks" else 1)
        assert all(len(functions) == 1 for functions in mine.values())
    # The first application, which another branch may use, is as it was.
    alone, _ = patch(comfy, source, tau=2.0, dense_backend="current")
    assert torch.equal(sample(comfy, first, model), sample(comfy, alone, model))


def test_two_patches_of_one_model_count_apart(comfy: ModuleType, tiny: MakeTiny, model: TinyModel) -> None:
    source = comfy.load_unet(model.path)
    one, _ = patch(comfy, source, **SETTINGS)
    other, _ = patch(comfy, source, dense_percent=1)
    third, _ = patch(comfy, comfy.load_unet(tiny("flux").path), dense_percent=1)
    for _ in range(2):  # counts begin anew
        for patcher, sampled in ((one, model), (other, model), (third, tiny("flux"))):
            sample(comfy, patcher, sampled)
        assert tally_of(one).sparse.total() == SPARSE
        assert (tally_of(other).sparse.total(), tally_of(other).dense.total()) == (0, STEPS * 4)
        assert (tally_of(third).sparse.total(), tally_of(third).dense.total()) == (0, STEPS * 4)


# --- the source ----------------------------------------------------------------------------------


def options_of(patcher: Any) -> Any:
    """A deep copy of what a patcher carries, with functions as they are."""
    return copy.deepcopy((patcher.model_options, patcher.callbacks, patcher.wrappers, patcher.object_patches))


def test_the_source_keeps_its_bits_and_its_options(comfy: ModuleType, model: TinyModel) -> None:
    source = comfy.load_unet(model.path)
    bits, options = sample(comfy, source, model), options_of(source)
    for settings in (SETTINGS, {"dense_percent": 1}):
        patched, _ = patch(comfy, source, **settings)
        first = sample(comfy, patched, model)
        assert torch.equal(sample(comfy, source, model), bits)
        comfy.unload_all()
        assert torch.equal(sample(comfy, patched, model), first)
        comfy.unload_all()
        assert torch.equal(sample(comfy, source, model), bits)
        assert options_of(source) == options
    assert OVERRIDE not in source.model_options.get("transformer_options", {})


def test_two_loaders_and_one_patch(comfy: ModuleType, tiny: MakeTiny, model: TinyModel) -> None:
    """The other one has head_dim 160, which no Sol kernel takes."""
    wide = tiny("z_image", dim=320, axes_dims=[32, 64, 64])
    source, other = comfy.load_unet(model.path), comfy.load_unet(wide.path)
    before, options = sample(comfy, other, wide), options_of(other)
    patched, _ = patch(comfy, source, **SETTINGS)
    sparse = sample(comfy, patched, model)
    assert torch.equal(sample(comfy, other, wide), before)
    assert torch.equal(sample(comfy, patched, model), sparse)
    assert options_of(other) == options
    # Where it is patched itself, every call is dense: the reference, too, keeps to what kernels take.
    patched_wide, _ = patch(comfy, other, **SETTINGS)
    assert difference(sample(comfy, patched_wide, wide), before) < 1e-3
    tally = tally_of(patched_wide)
    assert not tally.sparse
    assert tally.reasons["reference: head_dim 160, not 64 or 128"] == SPARSE


def test_no_module_gains_an_attribute(comfy: ModuleType, model: TinyModel) -> None:
    """A patched forward that sets attributes on modules is a graph break and outlives the patch."""
    source = comfy.load_unet(model.path)
    sample(comfy, source, model)  # core sets its own at the first load

    def attributes() -> dict[str, dict[str, Any]]:
        modules = source.model.named_modules()
        plain = (bool, int, float, str, type(None))
        return {
            name: {k: v if isinstance(v, plain) else type(v) for k, v in vars(module).items()}
            for name, module in modules
        }

    before = attributes()
    patched, _ = patch(comfy, source, **SETTINGS)
    assert attributes() == before
    sample(comfy, patched, model)
    assert patched.model is source.model and attributes() == before


# --- LoRA and INT8 -------------------------------------------------------------------------------


def test_lora_before_and_after(
    comfy: ModuleType, model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders.write_lora(tmp_path / "lora.safetensors", model, LORA_A["wan"])
    source = comfy.load_unet(model.path)
    plain, _ = patch(comfy, source, **SETTINGS)
    without = sample(comfy, plain, model)
    spy = spy_on(monkeypatch)
    after = comfy.apply_lora(plain, tmp_path / "lora.safetensors", 1.0)
    before, _ = patch(comfy, comfy.apply_lora(source, tmp_path / "lora.safetensors", 1.0), **SETTINGS)
    bits = sample(comfy, after, model)
    assert spy.count == SPARSE
    assert torch.equal(sample(comfy, before, model), bits)
    assert spy.count == 2 * SPARSE
    assert difference(bits, without) > 0.01
    assert torch.equal(sample(comfy, plain, model), without)


@pytest.mark.parametrize("family", ["wan", "h3"])
def test_int8_before_and_after(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = tiny(family)
    source = comfy.load_unet(model.path)
    spy = spy_on(monkeypatch)
    first, _ = patch(comfy, quantize(comfy, source)[0], **SETTINGS)
    second, _ = quantize(comfy, patch(comfy, source, **SETTINGS)[0])
    bits = sample(comfy, first, model)
    assert spy.count == SPARSE
    assert torch.equal(sample(comfy, second, model), bits)
    assert spy.count == 2 * SPARSE
    sparse = sample(comfy, patch(comfy, source, **SETTINGS)[0], model)
    assert 1e-4 < difference(bits, sparse) < 0.03


# --- core's nodes --------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
def test_a_shift_moves_the_threshold_with_the_noise(
    comfy: ModuleType, model: TinyModel, monkeypatch: pytest.MonkeyPatch, shift: float, when: str
) -> None:
    """Scheduler simple takes even parts of the shifted noise, so the number of dense steps stays."""
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    def shifted(patcher: Any) -> Any:
        return comfy.run_node(ModelSamplingSD3, model=patcher, shift=shift)[0]

    source = comfy.load_unet(model.path)
    spy = spy_on(monkeypatch)
    if when == "after":
        result = shifted(patch(comfy, source, dense_percent=0.5)[0])
    else:
        result = patch(comfy, shifted(source), dense_percent=0.5)[0]
    comfy.sample(result, model, steps=8)
    assert spy.count == 4
    threshold = shift * 0.5 / (1 + (shift - 1) * 0.5)  # what the shift makes of the middle of the noise
    assert result.get_model_object("model_sampling").percent_to_sigma(0.5) == pytest.approx(threshold)
    # Another scheduler has other steps above that noise.
    spy.calls.clear()
    comfy.sample(result, model, steps=8, scheduler="linear_quadratic")
    import comfy.samplers as samplers

    sigmas = samplers.calculate_sigmas(result.get_model_object("model_sampling"), "linear_quadratic", 8)
    assert spy.count == sum(float(sigma) <= threshold * (1 + 1e-5) for sigma in sigmas[:-1])


def test_flux_shift(comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    model = tiny("flux")
    size = {"max_shift": 1.15, "base_shift": 0.5, "width": 1024, "height": 1024}
    patched, _ = patch(comfy, comfy.load_unet(model.path), dense_percent=0.25)
    shifted = comfy.run_node(ModelSamplingFlux, model=patched, **size)[0]
    spy = spy_on(monkeypatch)
    comfy.sample(shifted, model, steps=4)
    assert spy.count == 3 * 3  # all steps but one, all layers but one
    assert shifted.get_model_object("model_sampling").percent_to_sigma(0.25) != pytest.approx(
        patched.get_model_object("model_sampling").percent_to_sigma(0.25)
    )


def test_a_unet_patch_has_no_part_in_it(comfy: ModuleType, model: TinyModel) -> None:
    from comfy_extras.nodes_model_downscale import PatchModelAddDownscale

    settings = {"block_number": 3, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 0.35}
    methods = {"downscale_after_skip": True, "downscale_method": "bicubic", "upscale_method": "bicubic"}
    patched, _ = patch(comfy, comfy.load_unet(model.path), **SETTINGS)
    after = comfy.run_node(PatchModelAddDownscale, model=patched, **settings, **methods)[0]
    assert torch.equal(sample(comfy, after, model), sample(comfy, patched, model))


@pytest.mark.parametrize("when", ["before", "after"])
def test_context_windows(
    comfy: ModuleType, model: TinyModel, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    module = importlib.import_module("comfy_extras.nodes_context_windows")
    windows = {"context_length": 5, "context_overlap": 4, "context_schedule": "standard_static"}
    windows |= {"context_stride": 1, "closed_loop": False, "fuse_method": "pyramid", "freenoise": True}

    def windowed(patcher: Any) -> Any:
        return comfy.run_node(module.WanContextWindowsManualNode, model=patcher, **windows)[0]

    source = comfy.load_unet(model.path)
    expected = comfy.sample(windowed(source), model, steps=STEPS, length=13)
    if when == "after":
        result = windowed(patch(comfy, source, tau=-100, **SETTINGS)[0])
    else:
        result = patch(comfy, windowed(source), tau=-100, **SETTINGS)[0]
    spy = spy_on(monkeypatch)
    assert difference(comfy.sample(result, model, steps=STEPS, length=13), expected) < 1e-3
    # 4 latent frames in windows of 2 that overlap by 1: three evaluations a step.
    assert spy.count == 3 * SPARSE


def test_side_blocks_share_the_index_of_the_block_at_which_they_join(
    comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    import node_helpers

    model = tiny("vace")
    [shape] = model.latent_shapes
    frames = random_tensor("frames", torch.Size((1, 32, *shape[2:])), seed=1) * 5
    values = {"vace_frames": [frames], "vace_mask": [torch.ones((1, 64, *shape[2:]))], "vace_strength": [1.0]}
    positive = node_helpers.conditioning_set_values(comfy.conditioning(model), values, append=True)
    source = comfy.load_unet(model.path)
    plain = comfy.sample(source, model, positive=positive, steps=2)
    counts = {}
    for dense_layers in ("", "0", "1", "-1"):
        patched, _ = patch(comfy, source, tau=-100, dense_percent=0, dense_layers=dense_layers)
        with monkeypatch.context() as during:
            spy = spy_on(during)
            assert difference(comfy.sample(patched, model, positive=positive, steps=2), plain) < 1e-3
        counts[dense_layers] = spy.count
    # Two blocks and one side block; the latter runs with the first block.
    assert counts == {"": 2 * 3, "0": 2 * 1, "1": 2 * 2, "-1": 2 * 2}


# --- a guider for two models ---------------------------------------------------------------------


def test_a_guider_for_two_models(
    comfy: ModuleType, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Core gives both of its models the options of the first one."""
    from comfy import samplers

    custom = importlib.import_module("comfy_extras.nodes_custom_sampler")
    if not hasattr(custom, "DualModelGuider"):
        pytest.skip("this ComfyUI has no guider for two models")
    source = comfy.load_unet(model.path)
    other = comfy.load_unet(model.path)
    positive, negative = comfy.conditioning(model), comfy.conditioning(model, seed=4)
    latent = comfy.empty_latent(model)["samples"]
    sigmas = samplers.calculate_sigmas(source.get_model_object("model_sampling"), "simple", STEPS)
    noise = random_tensor("noise", latent.shape, seed=1)

    def guided(first: Any, second: Any) -> torch.Tensor:
        guider = custom.DualModelGuider.execute(first, positive, 4.0, second, negative)[0]
        return guider.sample(noise, latent, samplers.sampler_object("euler"), sigmas, seed=1)

    plain = guided(source, other)
    spy = spy_on(monkeypatch)
    main, _ = patch(comfy, source, tau=-100, **SETTINGS)
    assert difference(guided(main, other), plain) < 1e-3
    assert spy.count == 2 * SPARSE and tally_of(main).sparse.total() == 2 * SPARSE

    spy.calls.clear()
    second, texts = shown(other, dense_percent=1.0)
    assert torch.equal(guided(source, second), plain)
    assert spy.count == 0
    assert texts[-1].startswith("WARNING: this model was sampled without this node; a guider for two models")

    # Both patched: the first one's settings count, and its steps, not those of the second.
    assert difference(guided(main, second), plain) < 1e-3
    assert spy.count == 2 * SPARSE
