"""torch.compile by core's nodes: refused before Kitchen INT8 Quantize Model, right after it.

Not marked `core`: compiling takes tens of seconds on a CPU. It needs a C++ compiler.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import int8_checks as checks
import pytest
import torch
from comfyui import builders
from comfyui.builders import TinyModel
from int8_node import LORA_A, difference, quantize

MakeTiny = Callable[..., TinyModel]
ONE_BLOCK = {"wan": {"num_layers": 1}, "flux": {"depth": 1, "depth_single_blocks": 1}}
# Dynamo gives up on a function that it has compiled this often.
LIMIT = 8

needs_compiler = pytest.mark.skipif(
    sys.platform == "win32" or not (shutil.which("g++") or shutil.which("clang++")),
    reason="torch.compile needs a C++ compiler",
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No compiled code from or for another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(comfy: ModuleType, model: Any) -> Any:
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    return comfy.run_node(TorchCompileModel, model=model, backend="inductor")[0]


@pytest.mark.core
def test_torch_compile_before_the_node_is_refused(comfy: ModuleType, tiny: MakeTiny) -> None:
    source = comfy.load_unet(tiny("wan").path)
    message = r"a compiled model, bound to its unquantized layers\. Put this node before TorchCompileModel\.$"
    with pytest.raises(ValueError, match=message):
        quantize(comfy, compiled(comfy, source))


@needs_compiler
@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_torch_compile_after_the_node_gives_the_uncompiled_sample_and_stays_int8(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path, family: str, with_lora: bool
) -> None:
    tiny_model = tiny(family, **ONE_BLOCK[family])
    source = comfy.load_unet(tiny_model.path)
    model = quantize(comfy, source)[0]
    plain = comfy.sample(source, tiny_model, steps=2)
    unquantized = plain
    if with_lora:
        layers = [name for name in LORA_A[family] if name in checks.int8_modules(model)]
        builders.write_lora(tmp_path / "lora.safetensors", tiny_model, layers)
        model = comfy.apply_lora(model, tmp_path / "lora.safetensors", 1.0)
        patched = comfy.apply_lora(source, tmp_path / "lora.safetensors", 1.0)
        unquantized = comfy.sample(patched, tiny_model, steps=2)
        assert difference(unquantized, plain) > 0.05
    expected = comfy.sample(model, tiny_model, steps=2)
    torch._dynamo.utils.counters.clear()
    after = compiled(comfy, model)
    with checks.watched(after, plain=False) as seen:
        result = comfy.sample(after, tiny_model, steps=2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it was compiled at all
    # Not equal: 1e-6 in front of an INT8 layer puts some inputs on the other side of a rounding step, which
    # is 1e-4 behind it, and so on up to the size of the INT8 error itself.
    assert difference(result, expected) < 0.01
    assert difference(result, unquantized) < 0.03
    # Still INT8; a compiled graph may hand the kernel a copy of the weight, so the sum counts.
    assert sum(seen.int8_linear.values()) == 2 * len(checks.int8_modules(model)) and not seen.dequantized
    assert torch.equal(comfy.sample(model, tiny_model, steps=2), expected)


@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "block by block"])
def test_a_lora_on_60_blocks_does_not_recompile_block_after_block(
    comfy: ModuleType, tiny: MakeTiny, tmp_path: Path, whole: bool
) -> None:
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

    def compilations(blocks: int) -> dict[str, int]:
        """How often each function is compiled for a model of so many blocks, each with a LoRA."""
        tiny_model = tiny("wan", num_layers=blocks, dim=128, ffn_dim=128)
        layers = [f"blocks.{i}.{layer}" for i in range(blocks) for layer in ("self_attn.q", "ffn.2")]
        builders.write_lora(tmp_path / "lora.safetensors", tiny_model, layers)
        model = quantize(comfy, comfy.load_unet(tiny_model.path))[0]
        model = comfy.apply_lora(model, tmp_path / "lora.safetensors", 1.0)
        expected = comfy.sample(model, tiny_model, steps=1)
        clone = model.clone(disable_dynamic=True)
        keys = ["diffusion_model"] if whole else [f"diffusion_model.blocks.{i}" for i in range(blocks)]
        torch._dynamo.reset()
        FRAME_COMPILE_COUNTER.clear()
        # As TorchCompileModel does it, but for the backend: what counts is Dynamo, before any backend.
        set_torch_compile_wrapper(
            model=clone, backend="eager", options={"guard_filter_fn": skip_torch_compile_dict}, keys=keys
        )
        assert difference(comfy.sample(clone, tiny_model, steps=1), expected) < 1e-5
        assert len(checks.int8_modules(clone)) == 10 * blocks
        return {str(frame): count for frame, count in FRAME_COMPILE_COUNTER.items()}

    few, many = compilations(2), compilations(60)
    print(f"compilations: {sum(few.values())} for 2 blocks, {sum(many.values())} for 60")
    assert torch._dynamo.config.recompile_limit == LIMIT
    assert 0 < max(many.values()) < LIMIT
    assert sum(many.values()) <= sum(few.values()) + 10
