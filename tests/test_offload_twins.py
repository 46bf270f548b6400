"""A model without dynamic VRAM around the weights of one that has it. Without a GPU core never makes one that
has, so the patchers here only say so; test_gpu_offload.py has real ones.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui import inprocess
from comfyui.lora import write_lora
from int8_node import LORA_A, quantize
from offload_node import DEEP, bits, offload, on_gpu, placed, same


@pytest.fixture(params=["wan", "h3"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["float", "INT8"])
def dynamic(request: pytest.FixtureRequest, comfy: ModuleType, tiny: Callable[..., Any], family: str) -> Any:
    """(a patcher that says that it has dynamic VRAM, what it takes to sample it)."""
    if on_gpu():
        pytest.skip("needs ComfyUI on a CPU: test_gpu_offload.py has the real thing")
    model = tiny(family, **DEEP[family])
    patcher = comfy.load_unet(model.path)
    if request.param == "INT8":
        patcher = quantize(comfy, patcher)[0]
    patcher.is_dynamic = lambda: True
    yield patcher, model
    comfy.unload_all()


def twin_of(patcher: Any) -> Any:
    return inprocess.pack_module("kernels_glue.offload.twins").twin_of(patcher.model)


def addresses(patcher: Any) -> dict[str, int]:
    leaves = inprocess.pack_module("kernels_glue.offload.leaves").leaves
    named = patcher.model.diffusion_model.named_parameters()
    return {name: leaves(tensor)[0].data_ptr() for name, tensor in named}


def test_it_holds_the_same_tensors_and_computes_the_same(comfy: ModuleType, dynamic: Any) -> None:
    source, model = dynamic
    expected, before, where = comfy.sample(source, model), bits(source), addresses(source)
    streamed, *_ = offload(source, vram_budget_gb=64, resident_blocks=2)
    assert streamed.model is not source.model and not streamed.is_dynamic()
    assert twin_of(streamed) is source.model
    assert addresses(streamed) == where and same(bits(streamed), before)
    assert torch.equal(comfy.sample(streamed, model), expected)
    assert len(placed(streamed).streaming.plan.resident) == 2 and placed(source) is None
    comfy.unload_all()
    assert same(bits(source), before) and same(bits(streamed), before)


def test_weights_in_memory_move_along_and_are_there_once(comfy: ModuleType, dynamic: Any) -> None:
    source, model = dynamic
    for _, tensor in source.model.diffusion_model.named_parameters():
        # A mapped file costs no memory, so its tensors would stay where they are.
        tensor.untyped_storage().__dict__.pop("_comfy_tensor_mmap_refs", None)
    streamed, *_ = offload(source, vram_budget_gb=64, resident_blocks=0)
    comfy.sample(streamed, model)
    comfy.unload_all()
    blocks = [name for name in addresses(source) if "blocks." in name]
    assert blocks and all(addresses(source)[name] == addresses(streamed)[name] for name in blocks)


def test_branches_share_it_and_so_do_later_runs(dynamic: Any) -> None:
    source, _ = dynamic
    roots = inprocess.pack_module("kernels_glue.offload.twins")._roots
    first, *_ = offload(source, vram_budget_gb=64, strategy="stream")
    second, *_ = offload(source, vram_budget_gb=32, strategy="stream")
    assert first.model is second.model
    assert source.model in roots
    model = source.model
    del first, second
    gc.collect()
    assert model in roots  # as long as its source: a node that runs again builds nothing


def test_a_lora_from_before_and_after(comfy: ModuleType, dynamic: Any, tmp_path: Path) -> None:
    source, model = dynamic
    write_lora(tmp_path / "lora.safetensors", model, layers=LORA_A[model.family], seed=1)
    before = comfy.apply_lora(source, tmp_path / "lora.safetensors", 0.8)
    source.is_dynamic = lambda: False
    expected = comfy.sample(before, model)
    comfy.unload_all()
    before.is_dynamic = source.is_dynamic = lambda: True
    first, *_ = offload(before, vram_budget_gb=64, resident_blocks=1)
    assert torch.equal(comfy.sample(first, model), expected)
    streamed, *_ = offload(source, vram_budget_gb=64, resident_blocks=1)
    after = comfy.apply_lora(streamed, tmp_path / "lora.safetensors", 0.8)
    assert torch.equal(comfy.sample(after, model), expected)


def test_tensors_are_cast_to_what_the_model_asked_for(comfy: ModuleType, dynamic: Any) -> None:
    source, _ = dynamic
    norm = next(m for m in source.model.diffusion_model.modules() if type(m).__name__ == "Linear")
    norm.bias_comfy_model_dtype = torch.float64
    name = next(n for n, m in source.model.diffusion_model.named_modules() if m is norm)
    streamed, *_ = offload(source, vram_budget_gb=64, strategy="stream")
    twin = streamed.model.diffusion_model.get_submodule(name)
    if norm.bias is not None:
        assert twin.bias.dtype is torch.float64 and torch.equal(twin.bias, norm.bias.double())


def test_patches_that_hold_layers_are_refused(dynamic: Any) -> None:
    source, _ = dynamic
    blocks = source.model.diffusion_model.blocks
    source.add_object_patch("diffusion_model.blocks.0", blocks[0])
    refusal = inprocess.pack_module("kernels_glue.errors").KitchenSolError
    with pytest.raises(
        refusal, match=r"Layerwise Offload: .*diffusion_model\.blocks\.0.*Put this node before"
    ):
        offload(source, vram_budget_gb=64, strategy="stream")
