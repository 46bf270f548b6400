"""Sol Attention Patch on a real GPU in real ComfyUI: four blocks of MiniMax-H3's width and a Wan, bf16 and
INT8. Run with dynamic VRAM and without: `python tools/dev.py test --gpu`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import shapes_model
import torch
from comfyui import inprocess
from comfyui.builders import TinyModel
from int8_node import difference, quantize
from sol_node import patch, spy_on, tally_of

pytestmark = pytest.mark.gpu

MIB = 2**20
STEPS = 5
MODELS = {
    "wan": (
        "wan",
        {"dim": 1536, "ffn_dim": 4096, "num_layers": 4, "dtype": torch.bfloat16},
        {"width": 832, "height": 480, "length": 17},  # 5 x 30 x 52 tokens
    ),
    "h3": (
        "h3",
        {
            "hidden_size": 5376,
            "num_layers": 4,
            "num_attention_heads": 56,
            "ffn_hidden_size": 14336,
            "time_embed_dim": 64,
        },
        {"width": 1344, "height": 768, "length": 22},  # 7,386 tokens
    ),
}
# The paper's recipe, on the 2,048 tokens of the shipped model.
SHAPES_SOL = {"min_tokens": 1, "dense_percent": 0.2}
# Self-attention calls of one evaluation, one for each block.
BLOCKS = 4

Case = tuple[Any, TinyModel, dict[str, Any]]


@pytest.fixture(params=["bf16", "INT8"])
def weights(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=MODELS)
def case(
    request: pytest.FixtureRequest, weights: str, comfy: ModuleType, tiny: Callable[..., TinyModel]
) -> Iterator[Case]:
    """(patcher, what it takes to sample it, a latent that is long enough)."""
    family, arguments, latent = MODELS[request.param]
    model = tiny(family, **arguments)
    with torch.inference_mode():
        source = comfy.load_unet(model.path)
        yield (source if weights == "bf16" else quantize(comfy, source)[0]), model, latent
    del source
    comfy.unload_all()


every_provider = pytest.mark.parametrize("provider", ["kitchen", "nvlabs", "triton", "builtin"])


@pytest.fixture
def provider() -> str:
    """The one that a pip install brings; tests with every_provider take the others as well."""
    return "kitchen"


@pytest.fixture(autouse=True)
def provider_is_here(provider: str) -> None:
    providers = inprocess.pack_module("kernels_glue.attention.providers").PROVIDERS
    if why := providers[provider].missing(torch.device("cuda")):
        pytest.skip(why)


def skip_unless_it_takes(case: Case, provider: str) -> None:
    """Core computes Wan in fp16 on most cards, and the paper's kernels take bf16 only."""
    patcher = case[0]
    dtype = patcher.get_model_object("manual_cast_dtype") or patcher.model.get_dtype()
    q = torch.empty(1, 64, 1, 128, dtype=dtype, device="cuda")
    providers = inprocess.pack_module("kernels_glue.attention.providers").PROVIDERS
    if why := providers[provider].unfit(q, q, q):
        pytest.skip(f"{provider}: {why}")


def sample(comfy: ModuleType, patcher: Any, case: Case, **options: Any) -> torch.Tensor:
    _, model, latent = case
    return comfy.sample(patcher, model, steps=STEPS, **latent, **options)


@every_provider
def test_sparse_calls_are_those_that_steps_layers_and_evaluations_give(
    comfy: ModuleType, case: Case, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_it_takes(case, provider)
    source, model, _ = case
    patched, report = patch(comfy, source, provider=provider, min_tokens=1, dense_layers="0,-1", strict=True)
    assert f"sparse: {provider}" in report
    spy = spy_on(monkeypatch, provider)
    out = sample(comfy, patched, case, cfg=3.0, negative=True)
    assert torch.isfinite(out).all()
    # Euler evaluates once a step; Wan takes both texts as one batch or, short of memory, one by one.
    evaluations = spy.count / ((STEPS - 1) * (BLOCKS - 2))
    assert evaluations == (2 if model.family == "h3" or spy.calls[0][0][0] == 1 else 1)
    tally = tally_of(patched)
    assert tally.sparse == {provider: spy.count}
    assert tally.reasons["dense step"] == BLOCKS * evaluations
    assert tally.reasons["dense layer"] == 2 * (STEPS - 1) * evaluations
    assert set(tally.reasons) <= {"dense step", "dense layer", "cross-attention"}


@every_provider
def test_tau_far_below_is_dense_to_the_rounding_of_the_kernel(
    comfy: ModuleType, case: Case, provider: str
) -> None:
    """The INT8 kernel of comfy_kitchen is 1% to 2% off a layer, the bf16 ones 0.5%."""
    skip_unless_it_takes(case, provider)
    source = case[0]
    plain = sample(comfy, source, case)
    patched, _ = patch(comfy, source, provider=provider, min_tokens=1, tau=-100)
    out = sample(comfy, patched, case)
    assert tally_of(patched).sparse.total() == (STEPS - 1) * (BLOCKS - 1)
    assert 0 < difference(out, plain) < 0.02


@pytest.mark.parametrize("provider", ["builtin"])
def test_builtin_is_as_close_to_dense_as_the_best_other_kernel(
    comfy: ModuleType, case: Case, provider: str
) -> None:
    """By the distance of whole samples, which is PSNR in other words.

    Kernels of the same algorithm differ by their rounding, which random weights amplify.
    """
    kernels = inprocess.pack_module("kernels_glue.attention.providers").PROVIDERS
    source = case[0]
    plain = sample(comfy, source, case)
    errors = {}
    for name in ("builtin", "kitchen", "nvlabs", "triton"):
        if kernels[name].missing(torch.device("cuda")):
            continue
        patched, _ = patch(comfy, source, provider=name, min_tokens=1, tau=1)
        out = sample(comfy, patched, case)
        if tally_of(patched).sparse[name]:
            errors[name] = difference(out, plain)
    decibels = {name: -20 * math.log10(error) for name, error in errors.items()}
    print({name: round(value, 2) for name, value in decibels.items()})
    assert decibels["builtin"] >= decibels.get("kitchen", 0.0)
    assert decibels["builtin"] > max(decibels.values()) - 0.5


def test_all_steps_dense_is_the_dense_backend_bit_for_bit(
    comfy: ModuleType, case: Case, provider: str
) -> None:
    source = case[0]
    patched, _ = patch(comfy, source, provider=provider, dense_percent=1, dense_backend="current")
    assert torch.equal(sample(comfy, patched, case), sample(comfy, source, case))


def test_the_sample_repeats_its_bits_and_the_source_keeps_its_own(
    comfy: ModuleType, case: Case, provider: str
) -> None:
    source = case[0]
    plain = sample(comfy, source, case)
    patched, _ = patch(comfy, source, provider=provider, min_tokens=1)
    first = sample(comfy, patched, case)
    assert torch.equal(sample(comfy, patched, case), first)
    assert torch.equal(sample(comfy, source, case), plain)
    comfy.unload_all()
    assert torch.equal(sample(comfy, patched, case), first)


def test_auto_takes_a_kernel_and_says_so(comfy: ModuleType, case: Case, provider: str) -> None:
    patched, report = patch(comfy, case[0], provider="auto", min_tokens=1, profile=True)
    sample(comfy, patched, case)
    tally = tally_of(patched)
    assert tally.sparse.total() == (STEPS - 1) * (BLOCKS - 1)
    assert next(iter(tally.sparse)) in report.splitlines()[0]
    assert all(ms > 0 for ms in tally.times().values()) and len(tally.times()) >= 2


def test_a_sparse_sampling_peaks_no_higher_than_a_dense_one_and_the_workspace(
    comfy: ModuleType, case: Case, provider: str
) -> None:
    source = case[0]
    patched, _ = patch(comfy, source, provider=provider, min_tokens=1, dense_percent=0, dense_layers="")
    peaks = {}
    for name, patcher in (("dense", source), ("sparse", patched)):
        sample(comfy, patcher, case)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sample(comfy, patcher, case)
        peaks[name] = torch.cuda.max_memory_allocated() - before
    [tokens] = tally_of(patched).tokens
    heads = case[1].config.get("num_attention_heads") or case[1].config["num_heads"]
    workspace = workspace_of(provider, tokens, heads)
    assert peaks["sparse"] <= peaks["dense"] + workspace + 16 * MIB


def workspace_of(provider: str, tokens: int, heads: int) -> int:
    """Bytes that a kernel says it needs for a call; twice the size of q where it does not say."""
    if provider == "kitchen":
        from comfy_kitchen.backends.cuda import _C

        return int(_C.sol_attn_plan(1, tokens, heads)["total"])
    return 2 * tokens * heads * 128 * 2


def test_memory_returns_to_the_start(comfy: ModuleType, case: Case, provider: str) -> None:
    source, _, _ = case
    sample(comfy, source, case)
    comfy.unload_all()
    start = torch.cuda.memory_allocated()
    patched, _ = patch(comfy, source, provider=provider, min_tokens=1)
    sample(comfy, patched, case)
    del patched
    gc.collect()
    comfy.unload_all()
    assert torch.cuda.memory_allocated() - start < 16 * MIB


@pytest.mark.parametrize("provider", ["builtin"])
@pytest.mark.parametrize("tau", [1.0, 1.5])
def test_builtin_is_as_close_on_the_shipped_model(comfy: ModuleType, provider: str, tau: float) -> None:
    """A model that has learned something: PSNR of its frames against those of dense attention."""
    kernels = inprocess.pack_module("kernels_glue.attention.providers").PROVIDERS
    final = inprocess.pack_module("kernels_glue.compare.metrics").final
    with torch.inference_mode():
        source = comfy.load_unet(shapes_model.model().path)
        cases = shapes_model.cases(12)
        exact = shapes_model.sample(source, cases)
        decibels = {}
        for name in ("builtin", "kitchen", "nvlabs", "triton"):
            if kernels[name].missing(torch.device("cuda")):
                continue
            options = {**SHAPES_SOL, "provider": name, "tau": tau}
            patched = shapes_model.applied(source, sol=options)
            frames = shapes_model.sample(patched, cases)
            if tally_of(patched).sparse[name]:
                scores = [
                    final(one, other, images=True, lpips=False).psnr
                    for one, other in zip(frames, exact, strict=True)
                ]
                decibels[name] = sum(scores) / len(scores)
    print({name: round(value, 2) for name, value in decibels.items()})
    assert "builtin" in decibels and decibels["builtin"] > 15
    assert decibels["builtin"] > max(decibels.values()) - 0.5
