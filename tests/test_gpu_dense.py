"""The dense attention backends on a real GPU, against the definition in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui import inprocess
from dense_checks import call_of, error, exact, qkv, read_call

pytestmark = pytest.mark.gpu

dense = inprocess.pack_module("kernels_glue.attention.dense")
fa = inprocess.pack_module("kernels_glue.attention.dense.fa")
flash = inprocess.pack_module("kernels_glue.attention.dense.flash_packages")
sage = inprocess.pack_module("kernels_glue.attention.dense.sage")
sdpa = inprocess.pack_module("kernels_glue.attention.dense.sdpa")
timings = inprocess.pack_module("kernels_glue.attention.timings")

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
CANDIDATES = (*flash.FLASH_ATTENTION, sdpa.CUDNN, sdpa.FLASH, sdpa.PLAIN)
# 128k + {0, 1, 64, 65, 127}: on SM 9.0 kernels have aborted the process at such lengths.
KEY_LENGTHS = (1, 64, 65, 127, 128, 1280, 1281, 1344, 1345, 1407)
# bf16 has 8 bits; sage and kitchen_int8 quantize q, k and more to INT8.
EXACT, QUANTIZED = 0.01, 0.06


@pytest.fixture(autouse=True)
def device_is_idle() -> Iterator[None]:
    """An asynchronous failure belongs to the test that caused it."""
    yield
    torch.cuda.synchronize()


def _candidate(candidate: Any, call: Any) -> None:
    if why := candidate.missing(CUDA) or candidate.unfit(call):
        pytest.skip(f"{candidate.name}: {why}")


def _backend(name: str, call: Any) -> Any:
    backend = dense.BACKENDS[name]
    if why := backend.missing(CUDA):
        pytest.skip(why)
    assert backend.unfit(call) == ""
    return backend


def _fused(heads: int, rows: int, head_dim: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """[1, T, 3 * H * D], as a model's qkv projection gives it."""
    return torch.cat(
        [t.transpose(1, 2).flatten(2) for t in qkv(1, heads, rows, head_dim, dtype=dtype, device="cuda")],
        dim=-1,
    )


# --- exact kernels --------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128, 160])
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
def test_exact_kernels_at_every_key_length(candidate: Any, head_dim: int) -> None:
    _candidate(candidate, call_of(*qkv(2, 3, 100, head_dim, dtype=BF16, device="cuda")))
    for keys in KEY_LENGTHS:
        q, k, v = qkv(2, 3, 100, head_dim, keys=keys, dtype=BF16, device="cuda")
        for options in ({}, {"scale": 0.2}):
            call = call_of(q, k, v, **options)
            if not candidate.unfit(call):
                assert error(candidate.run(call), exact(q, k, v, **options)) < EXACT, (keys, options)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"enable_gqa": True}], ids=str)
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
def test_exact_kernels_causal_and_grouped(candidate: Any, options: dict[str, Any]) -> None:
    key_heads = 2 if "enable_gqa" in options else 4
    q, k, v = qkv(2, 4, 333, 128, key_heads=key_heads, dtype=BF16, device="cuda")
    call = call_of(q, k, v, **options)
    _candidate(candidate, call)
    assert error(candidate.run(call), exact(q, k, v, causal="is_causal" in options)) < EXACT


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
def test_exact_kernels_on_views_of_fused_qkv(candidate: Any) -> None:
    fused = _fused(4, 1100, 128)
    before = fused.clone()
    call = read_call(*fused.split(512, dim=-1), 4)
    _candidate(candidate, call)
    assert error(candidate.run(call), exact(call.q, call.k, call.v)) < EXACT
    assert torch.equal(fused, before)


@pytest.mark.parametrize("name", ["fa", "sage_attn", "kitchen_int8"])
def test_views_beyond_32_bits(name: str, tmp_path: Path) -> None:
    """One head of H3's fused qkv at a length whose offsets do not fit 32 bits."""
    rows = 100_400
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB")
    fused = torch.zeros((1, rows, 3, 56, 128), dtype=BF16, device="cuda")
    source = qkv(1, 1, rows, 128, dtype=BF16, device="cuda")
    views = [fused[:, :, i, 55:].transpose(1, 2) for i in range(3)]
    for view, tensor in zip(views, source, strict=True):
        view.copy_(tensor)
    q = views[0][:, :, -300:]
    call = call_of(q, *views[1:])
    expected = exact(q, *source[1:])
    if name == "fa":
        for candidate in CANDIDATES:
            if not candidate.missing(CUDA) and not candidate.unfit(call):
                assert error(candidate.run(call), expected) < EXACT, candidate.name
        mask = torch.ones((300, rows), dtype=torch.bool, device="cuda")  # the memory-efficient kernel
        assert error(sdpa.plain(call_of(q, *views[1:], mask)), expected) < EXACT
    else:
        backend = _backend(name, call)
        assert error(backend.run(call).out, expected) < 2 * QUANTIZED


def test_fa_has_the_bits_of_core_where_a_mask_leaves_no_choice() -> None:
    from comfy.ldm.modules.attention import attention_pytorch

    q, k, v = (t.transpose(1, 2).flatten(2) for t in qkv(2, 4, 200, 128, dtype=BF16, device="cuda"))
    mask = torch.randn((200, 200), device="cuda", dtype=BF16)
    call = read_call(q, k, v, 4, mask)
    result = dense.BACKENDS["fa"].run(call)
    assert result.kernel == "SDPA"
    assert torch.equal(call.output(result.out), attention_pytorch(q, k, v, 4, mask))


@pytest.mark.parametrize("rows", [300, 16_384])
def test_fa_chooses_by_timing_and_keeps_it(rows: int, tmp_path: Path) -> None:
    store = timings.TimingStore(tmp_path / "timings.json")
    q, k, v = qkv(1, 8, rows, 128, dtype=BF16, device="cuda")
    call = call_of(q, k, v)
    backend = fa.FaBackend(store=store)
    result = backend.run(call)
    few = slice(0, 256)
    assert error(result.out[:, :, few], exact(q[:, :, few], k, v)) < EXACT
    measured = store.get(backend._key(call))
    here = {c.name for c in CANDIDATES if not c.missing(CUDA) and not c.unfit(call)}
    assert measured.ms.keys() | measured.errors.keys() == here
    assert result.kernel == measured.chosen == min(measured.ms, key=measured.ms.get)
    assert all(ms > 0 for ms in measured.ms.values())
    print(backend.timing_text(call))

    def never(*args: Any) -> float:
        raise AssertionError("timed again")

    again = fa.FaBackend(store=timings.TimingStore(store.path), milliseconds=never)
    assert torch.equal(again.run(call).out, result.out)


def test_fa_computes_fp32_and_odd_head_dims(tmp_path: Path) -> None:
    backend = fa.FaBackend(store=timings.TimingStore(tmp_path / "timings.json"))
    for dtype, head_dim, limit in [(torch.float32, 128, 1e-3), (BF16, 36, EXACT), (BF16, 320, EXACT)]:
        q, k, v = qkv(2, 2, 150, head_dim, dtype=dtype, device="cuda")
        assert error(backend.run(call_of(q, k, v)).out, exact(q, k, v)) < limit, (dtype, head_dim)


# --- quantized backends ---------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 96, 128, 160])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["sage_attn", "kitchen_int8"])
def test_quantized_backends_at_every_key_length(name: str, dtype: torch.dtype, head_dim: int) -> None:
    if name == "sage_attn" and head_dim == 160:
        pytest.skip("not a head_dim of sageattention")
    for keys in KEY_LENGTHS:
        tensors = qkv(2, 3, 100, head_dim, keys=keys, dtype=dtype, device="cuda")
        before = [t.clone() for t in tensors]
        call = call_of(*tensors)
        if "keys" in dense.BACKENDS[name].unfit(call):
            continue  # sageattention 1.x counts keys that are not there
        out = _backend(name, call).run(call).out
        assert out.dtype == dtype
        assert error(out, exact(*tensors)) < QUANTIZED, keys
        assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("name", ["sage_attn", "kitchen_int8"])
def test_quantized_backends_on_views_of_fused_qkv(name: str) -> None:
    fused = _fused(4, 1151, 128)
    before = fused.clone()
    call = read_call(*fused.split(512, dim=-1), 4)
    assert error(_backend(name, call).run(call).out, exact(call.q, call.k, call.v)) < QUANTIZED
    assert torch.equal(fused, before)


@pytest.mark.parametrize("largest", [2_000.0, 1e6])
def test_sage_does_not_overflow(largest: float) -> None:
    q, k, v = qkv(1, 3, 1024, 128, dtype=BF16, device="cuda")
    q = 0.01 * q
    v[:, 1] = largest
    call = call_of(q, k, v)
    out = _backend("sage_attn", call).run(call).out
    expected = exact(q, k, v)
    for head in range(3):
        assert error(out[:, head], expected[:, head]) < QUANTIZED, head


def test_sage_causal_and_scale() -> None:
    q, k, v = qkv(1, 2, 777, 128, dtype=BF16, device="cuda")
    call = call_of(q, k, v, scale=0.05, is_causal=True)
    assert (
        error(_backend("sage_attn", call).run(call).out, exact(q, k, v, scale=0.05, causal=True)) < QUANTIZED
    )


@pytest.mark.parametrize("mask", [(300, 200), (2, 300, 200), (2, 4, 300, 200), (1, 1, 1, 200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, BF16], ids=str)
def test_kitchen_int8_with_masks_and_grouped_heads(mask: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = qkv(2, 4, 300, 128, keys=200, key_heads=2, dtype=BF16, device="cuda")
    made = torch.randn(mask, generator=torch.Generator().manual_seed(3)).cuda()
    made = (made > 0) if dtype == torch.bool else made.to(dtype)
    call = call_of(q, k, v, made, enable_gqa=True)
    seen = made.unsqueeze(1) if made.ndim == 3 else made
    assert error(_backend("kitchen_int8", call).run(call).out, exact(q, k, v, seen)) < QUANTIZED
