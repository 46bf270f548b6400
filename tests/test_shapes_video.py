"""The nodes of the shipped video model: captions in, frames out, in core's own nodes and on the server."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import shapes_model
import torch
from comfyui import graphs
from comfyui.quick_int8 import quick_int8
from comfyui.server import ComfyServer
from comfyui.testnodes import shapes_nodes
from comfyui.testnodes.shapes import caption_conditioning, fold, frames_of, latent_of

# 32 x 32 pixels and two frames: 128 tokens.
TINY = {"size": 32, "frames": 2}


def _video(frames: int = 3, batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, frames, 8, 12, 3, generator=torch.Generator().manual_seed(0))


# --- in process ---------------------------------------------------------------------------------


def test_frames_survive_a_latent_and_the_node(comfy: ModuleType) -> None:
    video = _video(batch=2)
    image = comfy.run_node(shapes_nodes.TestShapesVideo, samples={"samples": latent_of(video)})[0]
    assert image.shape == (6, 8, 12, 3)
    assert torch.allclose(image, video.flatten(0, 1), atol=1e-6)


def test_latents_are_in_the_units_of_wans_vae() -> None:
    """Channel by channel, by the constants of core's Wan 2.1: out = in * std + mean."""
    import comfy.latent_formats

    wan = comfy.latent_formats.Wan21()
    mean, std = (part.flatten() for part in (wan.latents_mean, wan.latents_std))
    model_units = fold(_video())
    for channel in range(16):
        found = latent_of(_video())[:, channel]
        assert torch.allclose(found, model_units[:, channel] * std[channel] + mean[channel], atol=1e-5)


def test_cores_vae_nodes_take_the_vae(comfy: ModuleType) -> None:
    import nodes

    video = _video()[0]
    latent = comfy.run_node(nodes.VAEEncode, vae=shapes_nodes.ShapesVAE(), pixels=video)[0]
    assert latent["samples"].shape == (1, 16, 3, 4, 6)
    image = comfy.run_node(nodes.VAEDecode, vae=shapes_nodes.ShapesVAE(), samples=latent)[0]
    assert torch.allclose(image, video, atol=1e-6)


def test_frames_are_in_the_range_of_images() -> None:
    frames = frames_of(torch.randn(1, 16, 2, 4, 4) * 30)
    assert frames.min() == 0 and frames.max() == 1


@pytest.mark.parametrize("shape", [(1, 16, 4, 4), (1, 12, 2, 4, 4)])
def test_latents_of_other_models_are_refused(comfy: ModuleType, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"not \[1, 1.*EmptyHunyuanLatentVideo"):
        comfy.run_node(shapes_nodes.TestShapesVideo, samples={"samples": torch.zeros(shape)})


def test_the_caption_node_gives_conditioning(comfy: ModuleType) -> None:
    found = comfy.run_node(shapes_nodes.TestShapesCaption, text="red circle, blue square")[0]
    assert torch.equal(found[0][0], caption_conditioning("red circle, blue square")[0][0])


@pytest.mark.parametrize(("text", "named"), [("pink circle", "not pink circle"), ("red", "not 'red'")])
def test_the_caption_node_refuses_what_was_not_taught(comfy: ModuleType, text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        comfy.run_node(shapes_nodes.TestShapesCaption, text=text)


def test_the_cases_go_through_all_captions_and_repeat() -> None:
    cases = shapes_model.cases(24)
    assert len({case.caption for case in cases[:12]}) == 12
    assert [case.caption for case in cases[:12]] == [case.caption for case in cases[12:]]
    assert len({word for case in cases[:2] for word in case.caption.split()}) == 4


def test_missing_weights_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = shapes_model.WEIGHTS.with_name("absent.safetensors")
    monkeypatch.setattr(shapes_model, "WEIGHTS", absent)
    with pytest.raises(FileNotFoundError, match=r"^the shipped model is not there: get tests/models/absent"):
        shapes_model.model()


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", None])
def test_damaged_weights_are_one_sentence(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: the first half of the file."""
    damaged = tmp_path / "tests" / "models" / "damaged.safetensors"
    damaged.parent.mkdir(parents=True)
    whole = shapes_model.WEIGHTS.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2] if content is None else content)
    monkeypatch.setattr(shapes_model, "WEIGHTS", damaged)
    with pytest.raises(ValueError, match=r"^the shipped model is damaged .*: get tests/models/damaged"):
        shapes_model.model()


def test_quick_products_have_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    for inputs in (256, 1024, 2048):
        a = torch.randint(-128, 128, (40, inputs), generator=generator, dtype=torch.int8)
        b = torch.randint(-128, 128, (inputs, 24), generator=generator, dtype=torch.int8)
        a[0], b[:, 0] = -128, -128  # the largest sum that there can be
        slow = torch._int_mm(a, b)
        with quick_int8():
            assert torch.equal(torch._int_mm(a, b), slow)
    assert int(slow[0, 0]) == 2048 * 128**2


def test_a_video_does_not_depend_on_its_batch(comfy: ModuleType) -> None:
    model = comfy.load_unet(shapes_model.model().path)
    both = shapes_model.sample(model, shapes_model.cases(2), steps=2, **TINY)
    assert both.shape == (2, 2, 32, 32, 3)
    for case, video in zip(shapes_model.cases(2), both, strict=True):
        alone = shapes_model.sample(model, [case], steps=2, **TINY)[0]
        assert torch.allclose(alone, video, atol=1e-3)
    assert not torch.allclose(both[0], both[1], atol=0.1)


# --- on the server ------------------------------------------------------------------------------


def test_the_server_draws_the_same_video(comfy: ModuleType, server: ComfyServer) -> None:
    """KSampler, the three nodes, core's VAE Decode, and Kitchen Compare Models with the VAE, in one graph."""
    tiny = shapes_model.model()
    server.add_model(tiny)
    [case] = shapes_model.cases(1)
    int8 = {"group_size": "256", "layers": "blocks", "ignored_layers": "", "lora": "keep", "device": "auto"}
    graph = graphs.sampling_graph(
        tiny,
        model_nodes=[("KitchenInt8QuantizeModel", int8)],
        steps=2,
        seed=case.seed,
        cfg=shapes_model.CFG,
        latent=shapes_model.latent_inputs(**TINY),
    )
    graph["positive"] = graphs.node("TestShapesCaption", text=case.caption)
    graph["negative"] = graphs.node("TestShapesCaption", text="")
    graph["sampler"]["inputs"]["model"] = ["unet", 0]
    graph["frames"] = graphs.node("TestShapesVideo", samples=["sampler", 0])
    graph["vae"] = graphs.node("TestShapesVAE")
    graph["decoded"] = graphs.node("VAEDecode", samples=["sampler", 0], vae=["vae", 0])
    graph["encoded"] = graphs.node("VAEEncode", pixels=["decoded", 0], vae=["vae", 0])
    graph["again"] = graphs.node("TestSaveLatent", samples=["encoded", 0], filename="shapes_again")
    graph["picture"] = graphs.node("SaveImage", images=["frames", 0], filename_prefix="shapes")
    graph["solver"] = graphs.node("KSamplerSelect", sampler_name="euler")
    graph["sigmas"] = graphs.node("BasicScheduler", model=["unet", 0], scheduler="simple", steps=2, denoise=1)
    graph["compare"] = graphs.node(
        "KitchenCompareModels",
        model=["model_1", 0],
        add_noise=True,
        noise_seed=case.seed,
        cfg=shapes_model.CFG,
        positive=["positive", 0],
        negative=["negative", 0],
        sampler=["solver", 0],
        sigmas=["sigmas", 0],
        latent_image=["empty", 0],
        vae=["vae", 0],
        layers=False,
        keep_psnr=0.0,
        lpips="off",
        filename_prefix="",
    )
    graph["report"] = graphs.node("PreviewAny", source=["compare", 2])
    run = server.run(graph).raise_for_errors()

    expected = shapes_model.sample(comfy.load_unet(tiny.path), [case], steps=2, **TINY)
    assert torch.allclose(frames_of(server.latent()), expected, atol=1e-3)
    assert torch.allclose(frames_of(server.latent("shapes_again")), expected, atol=1e-3)
    assert len(run.outputs["picture"]["images"]) == TINY["frames"]

    assert "(images)" in run.outputs["report"]["text"][0].splitlines()[0]


def test_the_server_stops_at_a_caption_that_was_not_taught(server: ComfyServer) -> None:
    graph = {
        "caption": graphs.node("TestShapesCaption", text="red cube"),
        "shown": graphs.node("PreviewAny", source=["caption", 0]),
    }
    [error] = server.run(graph).errors
    assert error.node_id == "caption"
    assert "circle, square, triangle, not red cube" in error.exception_message
