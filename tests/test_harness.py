"""The harness itself: tiny models load and sample, the server agrees with the in-process run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from comfyui import builders, graphs
from comfyui.builders import TinyModel
from comfyui.server import ComfyServer, PromptRejected, ServerDied
from int8_node import difference

pytestmark = pytest.mark.core

MakeTiny = Callable[..., TinyModel]
LORA_LAYERS = {
    "wan": ["blocks.0.self_attn.q", "blocks.1.ffn.2"],
    "vace": ["blocks.0.self_attn.q", "vace_blocks.0.ffn.0", "blocks.1.ffn.2"],
    "h3": ["blocks.0.attn.qkv_proj", "blocks.1.mlp.fc2"],
    "flux": ["double_blocks.0.img_attn.qkv", "single_blocks.1.linear2"],
    "sdxl": ["input_blocks.3.1.proj_in", "input_blocks.5.1.proj_out"],
    "chroma": ["double_blocks.0.img_attn.qkv", "single_blocks.1.linear2"],
    "qwen_image": ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.img_mlp.net.2"],
    "hunyuan_video": ["double_blocks.0.img_attn.qkv", "single_blocks.1.linear2"],
    "lumina2": ["layers.0.attention.qkv", "layers.1.feed_forward.w2"],
    "z_image": ["layers.0.attention.qkv", "layers.1.feed_forward.w2"],
    "ltx": ["transformer_blocks.0.attn1.to_q", "transformer_blocks.1.ff.net.2"],
}


@pytest.fixture(params=["wan", "vace", "h3", "flux"])
def dit(request: pytest.FixtureRequest, tiny: MakeTiny) -> TinyModel:
    """A few families, for what takes the same paths for all of them."""
    return tiny(request.param)


@pytest.fixture(params=list(builders.FAMILIES))
def model(request: pytest.FixtureRequest, tiny: MakeTiny) -> TinyModel:
    return tiny(request.param)


def test_samples_are_finite_and_deterministic(comfy: ModuleType, model: TinyModel) -> None:
    samples = comfy.sample(comfy.load_unet(model.path), model)
    assert samples.numel() == sum(torch.Size(shape).numel() for shape in model.latent_shapes)
    assert torch.isfinite(samples).all()
    # SDXL's noise schedule starts at sigma 14.6 and its latents are scaled by 1/0.13 (write_sdxl).
    assert 0.05 < samples.std() < (200 if model.family == "sdxl" else 20)
    assert torch.equal(comfy.sample(comfy.load_unet(model.path), model), samples)
    assert difference(comfy.sample(comfy.load_unet(model.path), model, seed=8), samples) > 0.1


def test_empty_latent_has_the_declared_shapes(comfy: ModuleType, model: TinyModel) -> None:
    samples = comfy.empty_latent(model)["samples"]
    parts = samples.unbind() if getattr(samples, "is_nested", False) else [samples]
    assert tuple(tuple(part.shape) for part in parts) == model.latent_shapes


def test_files_depend_on_the_seed_only(dit: TinyModel, tmp_path: Path) -> None:
    write = builders.FAMILIES[dit.family]
    again, other = write(tmp_path / "a"), write(tmp_path / "b", seed=1)
    assert again.path.read_bytes() == dit.path.read_bytes()
    assert other.path.read_bytes() != dit.path.read_bytes()


def test_conditioning_and_negative_matter(comfy: ModuleType, dit: TinyModel) -> None:
    patcher = comfy.load_unet(dit.path)
    plain = comfy.sample(patcher, dit)
    other_text = comfy.sample(patcher, dit, positive=comfy.conditioning(dit, seed=5))
    guided = comfy.sample(patcher, dit, cfg=4.0, negative=True)
    assert difference(other_text, plain) > 1e-3
    assert difference(guided, plain) > 1e-3


def test_lora_moves_the_samples(comfy: ModuleType, model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    factors = builders.write_lora(path, model, LORA_LAYERS[model.family])
    base = comfy.load_unet(model.path)
    plain = comfy.sample(base, model)
    with_lora = comfy.apply_lora(base, path, 1.0)
    assert len(with_lora.patches) == len(factors) == len(LORA_LAYERS[model.family])
    assert difference(comfy.sample(with_lora, model), plain) > 0.05
    assert torch.equal(comfy.sample(base, model), plain)


def test_lora_factors_reproduce_the_patched_weight(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("wan", dtype=torch.float32)
    path = tmp_path / "lora.safetensors"
    layer = "blocks.0.ffn.0"
    up, down, alpha = builders.write_lora(path, model, [layer], rank=8, alpha=4.0)[layer]
    base = comfy.build_unet(model.path, torch.float32)
    key = f"diffusion_model.{layer}.weight"
    weight = base.get_key_patches("diffusion_model.")[key][0][0].double()
    patched = comfy.apply_lora(base, path, 0.7).patch_weight_to_device(key, return_weight=True)
    expected = weight.cpu() + 0.7 * alpha / 8 * up.double() @ down.double()
    assert difference(patched.cpu(), expected) < 1e-6
    assert difference(expected, weight.cpu()) > 0.1


def test_build_unet_computes_in_the_chosen_dtype(comfy: ModuleType, dit: TinyModel) -> None:
    patcher = comfy.build_unet(dit.path, torch.bfloat16)
    assert patcher.model.get_dtype_inference() == torch.bfloat16
    samples = comfy.sample(patcher, dit)
    in_fp32 = comfy.sample(comfy.build_unet(dit.path, torch.float32), dit)
    assert 1e-5 < difference(samples, in_fp32) < 0.05
    stored = comfy.build_unet(dit.path, torch.bfloat16, torch.float32)
    assert difference(comfy.sample(stored, dit), in_fp32) < 1e-5


def test_h3_keeps_its_fp32_layers(comfy: ModuleType, tiny: MakeTiny) -> None:
    from safetensors.torch import load_file

    weights = load_file(str(tiny("h3").path))
    single = {name for name, tensor in weights.items() if tensor.dtype == torch.float32}
    islands = ("video_patch_proj", "audio_patch_proj", "time_embedder", "video_out", "audio_out", "inv_freq")
    assert single == {name for name in weights if any(island in name for island in islands)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
def test_other_weight_dtypes_load(comfy: ModuleType, tiny: MakeTiny, dtype: torch.dtype) -> None:
    model = tiny("wan", dtype=dtype)
    samples = comfy.sample(comfy.load_unet(model.path), model)
    reference = comfy.sample(comfy.load_unet(tiny("wan").path), tiny("wan"))
    assert difference(samples, reference) < (0.3 if dtype.itemsize == 1 else 0.02)


def test_partial_residency_lasts_through_sampling(comfy: ModuleType, tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("wan", num_layers=4)
    path = tmp_path / "lora.safetensors"
    builders.write_lora(path, model, ["blocks.0.self_attn.q", "blocks.3.ffn.2"])
    # Dynamic VRAM has no budget, so ask for the legacy patcher where it is on.
    base = comfy.build_unet(model.path, torch.float32, disable_dynamic=True)
    patcher = comfy.apply_lora(base, path, 1.0)
    full = comfy.sample(patcher, model)
    limit = patcher.model_size() // 2
    assert 0 < comfy.load_partially(patcher, limit) <= limit
    assert difference(comfy.sample(patcher, model), full) < 1e-5
    assert patcher.loaded_size() <= limit and patcher.model.model_lowvram
    comfy.unload_all()
    assert patcher.loaded_size() == 0


def test_run_node_sets_hidden_inputs(comfy: ModuleType) -> None:
    from comfy_api.latest import io

    class Reports(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id="Reports",
                inputs=[io.Int.Input("value")],
                outputs=[io.String.Output(), io.Int.Output()],
                hidden=[io.Hidden.unique_id],
            )

        @classmethod
        def execute(cls, value: int) -> io.NodeOutput:
            return io.NodeOutput(cls.hidden.unique_id, value + 1, ui={"text": ["shown"]})

    result = comfy.run_node(Reports, unique_id="42", value=1)
    assert result == ("42", 2)
    assert result.ui == {"text": ["shown"]}


def test_server_gives_the_bits_of_the_in_process_run(
    comfy: ModuleType, server: ComfyServer, dit: TinyModel
) -> None:
    server.add_model(dit)
    result = server.run(graphs.sampling_graph(dit, cfg=2.0, save_as=dit.path.stem)).raise_for_errors()
    assert {"sampler", "save"} <= set(result.executed)  # an earlier graph may have loaded the model
    assert result.outputs["save"]["latent_file"] == [f"{dit.path.stem}.safetensors"]
    expected = comfy.sample(comfy.load_unet(dit.path), dit, cfg=2.0)
    assert torch.equal(server.latent(dit.path.stem), expected)


def test_server_runs_model_nodes_and_caches(
    comfy: ModuleType, server: ComfyServer, tiny: MakeTiny, tmp_path: Path
) -> None:
    model = tiny("wan")
    server.add_model(model)
    path = tmp_path / "chain_lora.safetensors"
    builders.write_lora(path, model, LORA_LAYERS["wan"])
    chain = [("LoraLoaderModelOnly", {"lora_name": server.add_lora(path), "strength_model": 1.0})]
    graph = graphs.sampling_graph(model, model_nodes=chain, save_as="chain")
    graph["stats"] = graphs.node("TestTensorStats", samples=["sampler", 0])
    first = server.run(graph).raise_for_errors()
    assert "model_1" in first.executed
    [text] = first.texts_of("stats")
    assert "finite True" in text and first.outputs["stats"]["stats"] == [text]
    expected = comfy.sample(comfy.apply_lora(comfy.load_unet(model.path), path, 1.0), model)
    assert torch.equal(server.latent("chain"), expected)

    second = server.run(graphs.sampling_graph(model, model_nodes=chain, seed=8, save_as="chain"))
    assert {"unet", "model_1"} <= second.raise_for_errors().cached
    assert second.executed == ("sampler", "save")


def test_server_reports_errors_and_goes_on(server: ComfyServer, tiny: MakeTiny) -> None:
    model = tiny("wan")
    server.add_model(model)
    graph = graphs.sampling_graph(model)
    graph["positive"]["inputs"]["width"] = 17
    result = server.run(graph)
    assert [error.node_id for error in result.errors] == ["sampler"]
    assert "RuntimeError" in result.errors[0].exception_type and result.errors[0].traceback
    with pytest.raises(RuntimeError, match="node sampler"):
        result.raise_for_errors()

    graph["sampler"]["inputs"]["steps"] = -1
    with pytest.raises(PromptRejected, match=r"node sampler .KSampler.*steps"):
        server.run(graph)
    server.run(graphs.sampling_graph(model)).raise_for_errors()


def test_server_survives_a_timeout(server: ComfyServer, tiny: MakeTiny) -> None:
    model = tiny("wan")
    server.add_model(model)
    with pytest.raises(TimeoutError):
        server.run(graphs.sampling_graph(model, steps=10000), timeout=1.0)
    server.run(graphs.sampling_graph(model, seed=9), timeout=30.0).raise_for_errors()


def test_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = ComfyServer(tmp_path, pack=None, extra_args=["--no-such-argument"])
    with pytest.raises(ServerDied, match="no-such-argument"):
        broken.start()
    assert not broken.alive
