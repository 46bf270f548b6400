"""The Sol kernels on a real GPU, each against its own reference: `python tools/dev.py test --gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui import inprocess
from sol_data import dense, difference, smooth_qkv

pytestmark = pytest.mark.gpu

providers = inprocess.pack_module("kernels_glue.attention.providers")
sol = inprocess.pack_module("kernels_glue.attention.sol")
reference = inprocess.pack_module("kernels_glue.attention.reference")

LENGTHS = (64, 65, 127, 128, 191, 255, 1031, 4097)
SCALE = 128**-0.5
# Its reference and the rounding of each kernel: INT8 scores and probabilities; bf16 or INT8 scores.
KERNELS = {
    "kitchen": (reference.sol_centroid, 0.03),
    "nvlabs": (reference.sol_rowwise, 0.02),
    "triton": (reference.sol_rowwise, 0.03),
    "builtin": (reference.sol_rowwise, 0.005),
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> tuple[Any, Any, float]:
    provider = providers.PROVIDERS[request.param]
    if problem := provider.missing(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(problem)
    return provider, *KERNELS[request.param]


def views(tokens: int, batch: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Correlated q, k and v as views of one fused projection on the GPU."""
    made = smooth_qkv(tokens, head_dim=128, batch=batch, seed=tokens)
    return list(torch.stack(made, dim=2).to("cuda", dtype).unbind(2))


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_kernel_equals_its_reference(kernel: Any, tokens: int, batch: int, sinks: bool) -> None:
    provider, expected_by, tolerance = kernel
    q, k, v = views(tokens, batch, torch.bfloat16)
    rows: dict[str, tuple[int, int]] = {"sink_keys": (10, tokens // 3)} if sinks else {}
    if sinks and provider.exact_queries:
        rows["sink_queries"] = (tokens // 2, tokens)
    asked = sol.SolOptions(0.7, SCALE, **rows)
    assert provider.unsupported(asked) == provider.unfit(q, k, v) == ""
    result = provider.run(q, k, v, asked).out
    expected = expected_by(*(t.float() for t in (q, k, v)), tau=0.7, **rows).out
    assert result.dtype == q.dtype and result.shape == q.shape
    assert difference(result, expected) < tolerance
    cosine = torch.nn.functional.cosine_similarity(result.double().flatten(), expected.double().flatten(), 0)
    assert float(cosine) > 0.999


@pytest.mark.parametrize("tokens", [127, 1031])
def test_everything_exact_is_dense_to_the_kernels_rounding(kernel: Any, tokens: int) -> None:
    provider, _, tolerance = kernel
    q, k, v = views(tokens, 2, torch.bfloat16)
    result = provider.run(q, k, v, sol.SolOptions(-100.0, SCALE)).out
    assert difference(result, dense(q, k, v)) < tolerance


def test_fp16_and_crooked_views(kernel: Any) -> None:
    """A misaligned load would poison the CUDA context, so the error would show here or in the next call."""
    provider, expected_by, tolerance = kernel
    if provider.name not in ("builtin", "kitchen"):
        pytest.skip("takes no fp16")
    q, k, v = views(1031, 1, torch.float16)
    crooked = torch.zeros(k.numel() + 1, dtype=k.dtype, device="cuda")[1:].view(k.shape)
    crooked.copy_(k)
    result = provider.run(q, crooked, v, sol.SolOptions(0.7, SCALE)).out
    torch.cuda.synchronize()
    expected = expected_by(*(t.float() for t in (q, k, v)), tau=0.7).out
    assert difference(result, expected) < tolerance


@pytest.mark.parametrize("function", [reference.sol_rowwise, reference.sol_centroid])
def test_references_do_not_wait_for_the_device(function: Any) -> None:
    q, k, v = views(4097, 1, torch.bfloat16)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = function(q, k, v, sink_keys=(0, 70), sink_queries=(3, 70))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    on_cpu = function(*(t.cpu() for t in (q, k, v)), sink_keys=(0, 70), sink_queries=(3, 70))
    assert difference(result.out, on_cpu.out) < 4e-3
    assert float(result.density) == pytest.approx(float(on_cpu.density), abs=2e-3)
