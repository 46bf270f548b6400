"""The pack's Triton kernels, compiled, on a real GPU: `python tools/dev.py test --gpu`.

The same questions as test_sol_triton.py asks the interpreter, at the sizes that only a GPU reaches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui import inprocess
from sol_data import brute_force, difference, smooth_qkv
from sol_doubles import poison_fresh_memory

pytestmark = pytest.mark.gpu

kernel = inprocess.pack_module("kernels_glue.attention.sol_triton")
tiles = inprocess.pack_module("kernels_glue.attention.sol_tiles")
devices = inprocess.pack_module("kernels_glue.attention.devices")
reference = inprocess.pack_module("kernels_glue.attention.reference")
providers = inprocess.pack_module("kernels_glue.attention.providers")
sol = inprocess.pack_module("kernels_glue.attention.sol")

BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS = (1, 63, 64, 65, 127, 1031, 4097, 33001)
ROUNDING = {BF16: 5e-3, FP16: 1e-3}
MIB = 2**20


@pytest.fixture(autouse=True)
def takes_this_gpu() -> None:
    if why := providers.PROVIDERS["builtin"].missing(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(why)


def tiles_here() -> tuple[Any, ...]:
    return tiles.tiles_for(devices.sm_of(torch.device("cuda", torch.cuda.current_device())))


def on_gpu(
    tokens: int, head_dim: int = 128, heads: int = 2, batch: int = 1, dtype: torch.dtype = BF16, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Correlated [B, T, H, D] as views of one fused projection."""
    made = smooth_qkv(tokens, heads, head_dim, batch, dtype, seed=seed or tokens)
    return torch.stack(made, dim=2).cuda().unbind(2)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return reference.sol_rowwise(*(t.double() for t in (q, k, v)), compute_dtype=torch.float64, **options)


def check(tensors: tuple[torch.Tensor, ...], tile: Any = None, **options: Any) -> Any:
    result, right = kernel.sol_triton(*tensors, tile=tile, **options), expected(*tensors, **options)
    assert result.out.isfinite().all()
    assert difference(result.out, right.out) < ROUNDING[tensors[0].dtype]
    # Means are rounded once, by a thousandth of the deviation of the scores (2^-9 / sqrt(3) in bf16), and one
    # pair in 2,000 is as close to the threshold.
    batch, tokens, heads, _ = tensors[0].shape
    pairs = batch * heads * (-(-tokens // 64)) ** 2
    assert float(result.density) == pytest.approx(float(right.density), abs=max(5e-4, 2.5 / pairs))
    return right


# --- the reference and both limits ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_equals_the_reference(tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    for batch in (1, 2, 3) if tokens < 5000 else (1, 2):
        check(on_gpu(tokens, head_dim, batch=batch, dtype=dtype), tau=1.0)


def test_every_cut_computes_the_same() -> None:
    tensors = on_gpu(4097)
    for tile in (*tiles_here(), *tiles.tiles_for(None)):
        for thresh_type in ("diag", "exact"):
            check(tensors, tile, tau=0.7, thresh_type=thresh_type)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_everything_exact_is_dense(tokens: int) -> None:
    q, k, v = on_gpu(tokens)
    result = kernel.sol_triton(q, k, v, tau=-100.0)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(t.float().transpose(1, 2) for t in (q, k, v))
    ).transpose(1, 2)
    assert difference(result.out, exact) < ROUNDING[BF16]
    assert float(result.density) == 1


@pytest.mark.parametrize("tokens", [449, 1031])
def test_nothing_exact_is_the_pooled_formula_and_the_diagonal(tokens: int) -> None:
    tensors = on_gpu(tokens)
    result = kernel.sol_triton(*tensors, tau=100.0)
    right, density = brute_force(*(t.cpu() for t in tensors), tau=100.0)
    assert difference(result.out, right) < ROUNDING[BF16]
    assert float(result.density) == pytest.approx(density)


@pytest.mark.parametrize("queries", [(0, 0), (0, 700), (4000, 4001), (30000, 33001)], ids=str)
@pytest.mark.parametrize("keys", [(0, 0), (0, 356), (16000, 16100), (32900, 33001)], ids=str)
def test_sinks(keys: tuple[int, int], queries: tuple[int, int]) -> None:
    check(on_gpu(33001, heads=1), tau=1.0, sink_keys=keys, sink_queries=queries)


# --- memory --------------------------------------------------------------------------------------


def test_views_and_crooked_pointers() -> None:
    """A misaligned load would poison the CUDA context, so the error would show here or in the next call."""
    q, k, v = (t.contiguous() for t in on_gpu(1031, batch=2))
    plain = kernel.sol_triton(q, k, v).out
    fused = torch.stack([q, k, v], dim=2).unbind(2)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    shifted = [
        torch.zeros(t.numel() + 1, dtype=BF16, device="cuda")[1:].view(t.shape).copy_(t) for t in (q, k, v)
    ]
    wide = [
        torch.full((2, 1031, 2, 131), torch.nan, dtype=BF16, device="cuda")[..., :128].copy_(t)
        for t in (q, k, v)
    ]
    for tensors in (fused, turned, shifted, wide):
        # Other loads may add the rows of a block in another order.
        assert difference(kernel.sol_triton(*tensors).out, plain) < 2e-3
    torch.cuda.synchronize()


def test_offsets_beyond_32_bits() -> None:
    """The last rows of a fused projection whose elements are more than 2**31."""
    tokens, heads = 110_000, 56
    fused = torch.zeros(1, tokens, 3, heads, 128, dtype=BF16, device="cuda")
    assert fused.numel() > 2**31
    few = on_gpu(8192, heads=1)
    last = slice(tokens - 8192, tokens)
    for part, tensor in enumerate(few):
        fused[:, last, part, -1:] = tensor
    views = [t[:, last, -1:] for t in fused.unbind(2)]
    assert difference(kernel.sol_triton(*views).out, kernel.sol_triton(*few).out) < 2e-3
    whole = kernel.sol_triton(*fused.unbind(2), tau=1.5).out
    alone = kernel.sol_triton(*(t[:, :, -1:].contiguous() for t in fused.unbind(2)), tau=1.5).out
    assert difference(whole[:, :, -1:], alone) < 2e-3


def test_every_element_is_written_and_no_scratch_is_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = on_gpu(4097, batch=2)
    plain = kernel.sol_triton(*tensors, sink_queries=(5, 300)).out
    poison_fresh_memory(monkeypatch)
    assert torch.equal(kernel.sol_triton(*tensors, sink_queries=(5, 300)).out, plain)


def test_scratch_is_a_small_part_of_the_inputs() -> None:
    q, k, v = on_gpu(32868, heads=8)
    kernel.sol_triton(q, k, v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = kernel.sol_triton(q, k, v).out
    scratch = torch.cuda.max_memory_allocated() - before - out.nbytes
    print(f"scratch {scratch / MIB:.1f} MiB, {scratch / (3 * q.nbytes):.2%} of q, k and v")
    assert scratch < 0.05 * 3 * q.nbytes


def test_bits_repeat_whoever_computes_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = on_gpu(33001)
    one, again = kernel.sol_triton(*tensors), kernel.sol_triton(*tensors)
    monkeypatch.setattr(kernel, "_multiprocessors", lambda device: 1)
    few = kernel.sol_triton(*tensors)
    for other in (again, few):
        assert torch.equal(one.out, other.out) and float(one.density) == float(other.density)


def test_nothing_waits_for_the_device() -> None:
    tensors = on_gpu(4097)
    kernel.sol_triton(*tensors)  # compiles
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel.sol_triton(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_lengths_share_their_compiled_kernels() -> None:
    """A user's lengths differ from graph to graph, and compiling takes seconds."""
    from importlib import import_module

    kernel.sol_triton(*on_gpu(4097))
    kernels = import_module(f"{kernel.__package__}.sol_kernels")
    cache = kernels.attend.device_caches[torch.cuda.current_device()][0]
    before = len(cache)
    for tokens in (1031, 4096, 64 * 16, 1, 65):
        kernel.sol_triton(*on_gpu(tokens))
        kernel.sol_triton(*on_gpu(tokens), sink_keys=(0, 16), sink_queries=(0, 1))
    assert len(cache) == before


# --- extreme values ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_channel_far_above_the_others(dtype: torch.dtype) -> None:
    q, k, v = on_gpu(4097, dtype=torch.float64)
    for tensor in (q, k, v):
        tensor[..., 5] *= 50
    check(tuple(t.to(dtype) for t in (q, k, v)), tau=0.7)


def test_equal_keys_zeros_and_the_largest_numbers() -> None:
    q, k, v = on_gpu(1031)
    mean = v.double().mean(1, keepdim=True).expand_as(v)
    assert difference(kernel.sol_triton(q, torch.ones_like(k), v).out, mean) < ROUNDING[BF16]
    assert difference(kernel.sol_triton(q, torch.zeros_like(k), v).out, mean) < ROUNDING[BF16]
    assert not kernel.sol_triton(q, k, torch.zeros_like(v)).out.any()
    largest = torch.finfo(BF16).max
    assert (kernel.sol_triton(q, k, torch.full_like(v, largest)).out == largest).all()
    # Exponents near 10^9: the softmax is one key's. Farther out they are rounded too much, see _absorb.
    huge = torch.zeros_like(k)
    huge[:, 200] = largest
    result = kernel.sol_triton(torch.full_like(q, 2.0**-102), huge, v, sink_keys=(192, 256)).out
    assert difference(result, v[:, 200:201].expand_as(v)) < ROUNDING[BF16]


# --- as a provider -------------------------------------------------------------------------------


def test_the_choice_of_a_cut_is_timed_once(tmp_path: Any) -> None:
    store = inprocess.pack_module("kernels_glue.attention.timings").TimingStore(tmp_path / "tiles.json")
    choice = inprocess.pack_module("kernels_glue.attention.measured").MeasuredChoice("tiles", "", store)
    provider = inprocess.pack_module("kernels_glue.attention.providers.builtin").BuiltinSol(
        tiles.TileChooser(choice)
    )
    q, k, v = on_gpu(8192, heads=4)
    asked = sol.SolOptions(1.0, 128**-0.5)
    out = provider.run(q, k, v, asked).out
    text = store.path.read_text()
    print(text)
    assert difference(out, expected(q, k, v).out) < ROUNDING[BF16]
    assert torch.equal(provider.run(q, k, v, asked).out, out) and store.path.read_text() == text


def test_closer_to_dense_than_the_centroid_kernel() -> None:
    """What a better approximation at the same tau is for; both on the same correlated data."""
    kitchen = providers.PROVIDERS["kitchen"]
    if why := kitchen.missing(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(why)
    q, k, v = on_gpu(16384)
    exact = expected(q, k, v, tau=-100.0).out
    asked = sol.SolOptions(1.0, 128**-0.5)
    errors = {
        name: difference(providers.PROVIDERS[name].run(q, k, v, asked).out, exact)
        for name in ("builtin", "kitchen")
    }
    print(errors)
    assert errors["builtin"] < errors["kitchen"]
