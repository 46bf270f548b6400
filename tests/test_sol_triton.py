"""The pack's Triton kernels in Triton's interpreter: the reference, both limits, odd shapes and values.

What only a GPU shows (long sequences, the compiled kernels, speed) is in test_gpu_sol_triton.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comfyui import inprocess
from sol_data import brute_force, dense, difference, smooth_qkv
from sol_doubles import far, of_fused, poison_fresh_memory
from triton_interpreter import compute_in_bf16

triton = pytest.importorskip("triton")
tl = triton.language

sol_triton = inprocess.pack_module("kernels_glue.attention.sol_triton")
means = inprocess.pack_module("kernels_glue.attention.sol_means")
tiles = inprocess.pack_module("kernels_glue.attention.sol_tiles")
reference = inprocess.pack_module("kernels_glue.attention.reference")

BF16, FP16 = torch.bfloat16, torch.float16
# By tensor descriptors, and by pointers with the values in halves; groups so small that there are several.
DESCRIBED, POINTED = tiles.Tile(16, 1, 1, 1, True), tiles.Tile(16, 2, 1, 1)
OTHERS = [tiles.Tile(16, 2, 1, 1, True), tiles.Tile(16, 1, 1, 1)]
BOTH = pytest.mark.parametrize("tile", [DESCRIBED, POINTED], ids=["descriptors", "pointers"])
ALL = pytest.mark.parametrize("tile", [DESCRIBED, POINTED, *OTHERS], ids=str)
# Rounding of the weights and of the output to the dtype of q.
ROUNDING = {BF16: 5e-3, FP16: 1e-3}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    compute_in_bf16(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Any = DESCRIBED, **options: Any) -> Any:
    return sol_triton.sol_triton(q, k, v, tile=tile, **options)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """The row-wise reference in fp64."""
    return reference.sol_rowwise(*(t.double() for t in (q, k, v)), compute_dtype=torch.float64, **options)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Any = DESCRIBED, **options: Any) -> Any:
    """Runs the kernels, compares with the reference and returns the reference's result."""
    result, right = run(q, k, v, tile, **options), expected(q, k, v, **options)
    assert result.out.dtype == q.dtype and result.out.shape == q.shape and result.out.is_contiguous()
    assert difference(result.out, right.out) < ROUNDING[q.dtype]
    # Means are rounded to bf16 once: a pair may lie on the threshold then, and one does in these tests.
    pairs = q.shape[0] * q.shape[2] * (-(-q.shape[1] // 64)) ** 2
    one = 1.5 / pairs if q.dtype == BF16 else 1e-6
    assert float(result.density) == pytest.approx(float(right.density), abs=one)
    return right


# --- the reference -------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (63, 3), (64, 1), (65, 2), (127, 1), (200, 2)])
def test_short_sequences(tokens: int, batch: int, dtype: torch.dtype, tile: Any) -> None:
    check(*smooth_qkv(tokens, 2, 64, batch, dtype, seed=tokens), tile, tau=0.5)


@ALL
@pytest.mark.parametrize("thresh_type", ["diag", "exact"])
@pytest.mark.parametrize(("tokens", "head_dim", "dtype"), [(1031, 128, BF16), (1100, 64, FP16)])
def test_routing(tokens: int, head_dim: int, dtype: torch.dtype, thresh_type: str, tile: Any) -> None:
    """17 and 18 blocks: an odd and an even number, and more than a group."""
    tensors = smooth_qkv(tokens, 1, head_dim, 1, dtype, seed=tokens)
    right = check(*tensors, tile, tau=0.7, thresh_type=thresh_type)
    assert 0.25 < float(right.density) < 0.5
    assert difference(right.out, dense(*tensors)) > 0.02  # pooled blocks matter


def test_the_two_thresholds_differ() -> None:
    tensors = smooth_qkv(1031, 1, 64, 1, FP16, seed=5)
    assert float(run(*tensors, tau=0.5).density) != float(run(*tensors, tau=0.5, thresh_type="exact").density)


def test_more_blocks_than_one_group_of_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sol_triton, "_MEANS", 8)
    check(*smooth_qkv(64 * 20 + 5, 1, 64, 1, FP16, seed=1), tau=1.5)


@BOTH
@pytest.mark.parametrize("scale", [0.02, 0.4])
def test_scale(scale: float, tile: Any) -> None:
    tensors = smooth_qkv(449, 1, 64, 1, FP16, seed=2)
    check(*tensors, tile, tau=0.5, scale=scale)


# --- both limits ---------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_everything_exact_is_dense(dtype: torch.dtype, tile: Any) -> None:
    tensors = smooth_qkv(449, 1, 64, 1, dtype, seed=3)
    result = run(*tensors, tile, tau=-100.0)
    assert difference(result.out, dense(*tensors)) < ROUNDING[dtype]
    assert float(result.density) == 1


@BOTH
def test_nothing_exact_is_the_pooled_formula_and_the_diagonal(tile: Any) -> None:
    q, k, v = smooth_qkv(449, 1, 64, 1, FP16, seed=4)
    result = run(q, k, v, tile, tau=100.0)
    right, density = brute_force(q, k, v, tau=100.0)
    assert difference(result.out, right) < ROUNDING[FP16]
    assert float(result.density) == pytest.approx(density) == pytest.approx((3 * 8 - 2) / 64)


# --- sinks ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("keys", [(0, 0), (0, 70), (200, 201), (400, 449)], ids=str)
@pytest.mark.parametrize("queries", [(0, 0), (0, 100), (0, 128), (100, 101), (130, 449)], ids=str)
def test_sinks(keys: tuple[int, int], queries: tuple[int, int], tile: Any) -> None:
    tensors = smooth_qkv(449, 1, 64, 1, FP16, seed=6)
    check(*tensors, tile, tau=1.5, sink_keys=keys, sink_queries=queries)


def test_query_sinks_do_not_touch_their_neighbours() -> None:
    tensors = smooth_qkv(449, 1, 64, 2, FP16, seed=7)
    without, with_sinks = run(*tensors, tau=1.5).out, run(*tensors, tau=1.5, sink_queries=(100, 300)).out
    rows = torch.arange(449)
    outside = (rows < 100) | (rows >= 300)
    assert torch.equal(with_sinks[:, outside], without[:, outside])
    assert difference(with_sinks[:, ~outside], dense(*tensors)[:, ~outside]) < ROUNDING[FP16]


def test_query_sinks_reach_no_further_than_the_sequence() -> None:
    tensors = smooth_qkv(130, 1, 64, 1, FP16, seed=16)
    whole = run(*tensors, tau=1.5, sink_queries=(100, 130)).out
    assert torch.equal(run(*tensors, tau=1.5, sink_queries=(100, 900)).out, whole)
    first = run(*tensors, tau=1.5, sink_queries=(0, 30)).out
    assert torch.equal(run(*tensors, tau=1.5, sink_queries=(-5, 30)).out, first)


# --- memory --------------------------------------------------------------------------------------


def test_views_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a fused projection and of another order of dimensions by descriptors; by pointers what these cannot
    describe: views off the 16 bytes that a copy begins on, and those that repeat.
    """
    q, k, v = smooth_qkv(200, 2, 64, 2, FP16, seed=8)
    plain = run(q, k, v, POINTED, tau=0.5).out
    described = []
    describe = sol_triton._described
    monkeypatch.setattr(
        sol_triton, "_described", lambda *tensor: described.append(tensor) or describe(*tensor)
    )

    def by_descriptors(*tensors: torch.Tensor) -> bool:
        described.clear()
        assert difference(run(*tensors, tau=0.5).out, plain) < 1e-3
        assert len(described) in (0, 5)
        return bool(described)

    assert by_descriptors(q, k, v) and by_descriptors(*of_fused(q, k, v))
    assert by_descriptors(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)))
    crooked = torch.zeros(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape).copy_(k)
    wide = torch.full((2, 200, 2, 67), torch.nan, dtype=v.dtype)[..., :64].copy_(v)
    assert not by_descriptors(q, crooked, v) and not by_descriptors(q, k, wide)
    one = [t[:1, :, :1] for t in (q, k, v)]
    plain = run(*one, POINTED, tau=0.5).out
    # Of a dimension of one element any stride is as good.
    assert by_descriptors(*(t.as_strided(t.shape, (3, t.stride(1), 5, 1)) for t in one))
    plain = run(*(t.expand(2, -1, 2, -1).contiguous() for t in one), POINTED, tau=0.5).out
    assert not by_descriptors(*(t.expand(2, -1, 2, -1) for t in one))


@pytest.mark.parametrize("tokens", [65, 449])
def test_every_element_is_written_and_no_scratch_is_read_before(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = smooth_qkv(tokens, 2, 64, 2, FP16, seed=9)
    plain = run(*tensors, tau=0.7, sink_queries=(3, 60)).out
    poison_fresh_memory(monkeypatch)
    assert torch.equal(run(*tensors, tau=0.7, sink_queries=(3, 60)).out, plain)


def test_exact_blocks_are_listed_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn does for 32,768 tokens, so a turn is of two blocks here."""
    kernels = inprocess.pack_module("kernels_glue.attention.sol_kernels")
    monkeypatch.setattr(kernels, "_FLAGS_AT_A_TIME", tl.constexpr(2))
    right = check(*smooth_qkv(577, 2, 64, 1, FP16, seed=12), tau=0.7)
    assert 0.4 < float(right.density) < 0.9


def test_bits_repeat() -> None:
    tensors = smooth_qkv(449, 2, 64, 2, FP16, seed=10)
    one = run(*tensors, tau=0.7)
    again = run(*tensors, tau=0.7)
    assert torch.equal(one.out, again.out) and float(one.density) == float(again.density)


def test_inputs_stay_as_they_are() -> None:
    tensors = smooth_qkv(200, 1, 64, 1, FP16)
    before = [t.clone() for t in tensors]
    run(*tensors, sink_queries=(0, 10), sink_keys=(0, 10))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_no_tokens() -> None:
    nothing = torch.zeros(1, 0, 2, 64, dtype=BF16)
    assert run(nothing, nothing, nothing).out.shape == nothing.shape


# --- extreme values ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_channel_far_above_the_others(dtype: torch.dtype, tile: Any) -> None:
    q, k, v = smooth_qkv(449, 1, 64, 1, torch.float64, seed=11)
    for tensor in (q, k, v):
        tensor[..., 5] *= 50
    check(*(t.to(dtype) for t in (q, k, v)), tile, tau=0.7)


@BOTH
def test_channels_that_are_large_and_nearly_constant(tile: Any) -> None:
    """As trained models have them. In bf16 a block's mean beside 40 has no room for what makes it differ."""
    q, k, v = smooth_qkv(1031, 1, 64, 1, BF16, seed=15)
    q[..., 7:11] += 40
    k[..., 7:11] += 40
    right = check(q, k, v, tile, tau=0.7)
    assert 0.1 < float(right.density) < 0.9


def test_a_centroid_far_from_zero_routes_exactly() -> None:
    """In one number of 16 bits it would put a pair on the other side of the threshold."""
    q, k, v = smooth_qkv(1031, 1, 64, 1, torch.float64, seed=17)
    q[..., 7:11] += 40
    check(*(t.to(FP16) for t in (q, k, v)), tau=0.3)


def test_what_centring_left_out_of_the_exponents_is_exact() -> None:
    """Pooled terms stand beside exact ones, so an error of their exponents is one of their share."""
    q, k, v = smooth_qkv(1031, 1, 64, 1, BF16, seed=15)
    q[..., 7] = 40
    k[..., 7] = 40 + 0.25 * (torch.arange(1031) % 2)[None, :, None]
    for tau in (0.7, 100.0):
        check(q, k, v, tau=tau)


@triton.jit
def _parts(numbers, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 16)
    parts = means.in_parts(tl.load(numbers + row + 0 * column), COUNT, out.dtype.element_ty)
    tl.store(out + row * 16 + column, parts)


@pytest.mark.parametrize(
    ("dtype", "count", "error"), [(BF16, 2, 2**-16), (BF16, 3, 2**-24), (FP16, 2, 2**-19), (FP16, 3, 2**-24)]
)
def test_parts_of_a_16_bit_dtype_add_up_to_fp32_numbers(dtype: torch.dtype, count: int, error: float) -> None:
    """Cutting leaves less than 2^-7 of a number, and rounding 2^-9 (bf16) or 2^-12 (fp16) of what is left."""
    numbers = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 10
    numbers += numbers.sign()  # fp16 has smallest numbers
    parts = torch.full((64, 16), torch.nan, dtype=dtype)
    _parts[(1,)](numbers, parts, COUNT=count)
    assert not parts[:, count:].any()
    assert ((parts.double().sum(1) - numbers.double()).abs() <= error * numbers.double().abs()).all()


@BOTH
def test_deviations_far_below_the_floor(tile: Any) -> None:
    """Blocks that differ by less than a thousandth of a bit are the same, whatever their deviation is."""
    q, k, v = smooth_qkv(449, 1, 64, 1, FP16, seed=17)
    right = check(q, (k.double() * 2.0**-14).half(), v, tile, tau=0.7)
    assert float(right.density) == pytest.approx((3 * 8 - 2) / 64)


@BOTH
def test_keys_that_are_all_the_same(tile: Any) -> None:
    """No deviation: nothing is above the threshold but what must be, and every weight is equal."""
    q, _, v = smooth_qkv(449, 1, 64, 1, FP16, seed=12)
    k = torch.ones_like(q)
    result = run(q, k, v, tile).out
    assert difference(result, v.double().mean(1, keepdim=True).expand_as(v)) < ROUNDING[FP16]


@BOTH
def test_zeros(tile: Any) -> None:
    q, k, v = smooth_qkv(449, 1, 64, 1, FP16, seed=13)
    nothing = torch.zeros_like(q)
    for tensors in ((nothing, k, v), (q, nothing, v)):
        assert difference(run(*tensors, tile).out, dense(*tensors)) < ROUNDING[FP16]
    assert not run(q, k, nothing, tile).out.any()


@BOTH
def test_the_largest_bf16_numbers(tile: Any) -> None:
    """A mean of the largest number is the largest number, however many there are."""
    q, k, v = smooth_qkv(449, 1, 64, 1, BF16, seed=14)
    largest = torch.finfo(BF16).max
    assert (run(q, k, torch.full_like(v, largest), tile).out == largest).all()
    # One key above all others: q, k and the mean of its block are near the end of the range.
    # Exponents near 10^9: the softmax is one key's.
    huge = torch.zeros_like(k)
    huge[:, 200] = largest
    tiny = torch.full_like(q, 2.0**-102)
    result = run(tiny, huge, v, tile, sink_keys=(192, 256)).out
    assert difference(result, v[:, 200:201].expand_as(v)) < ROUNDING[BF16]
    # Block means as far apart as they can be.
    tiny, signs = torch.full_like(q, 2.0**-126), torch.ones_like(k)
    check(tiny, signs * largest, v, tile, tau=0.7)
    signs[:, 64:128] = -1
    check(tiny, signs * largest, v, tile, tau=0.7)
    check(tiny, -signs * largest, v, tile, tau=0.7)
    check(tiny, signs * largest, v, tile, tau=0.7, scale=4.0)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k, v: (q, k[:, :64], v), "alike"),
        (lambda q, k, v: (q[0], k[0], v[0]), "alike"),
        (lambda q, k, v: (q.float(), k.float(), v.float()), "bf16 or fp16 alike"),
        (lambda q, k, v: (q, k.half(), v), "bf16 or fp16 alike"),
        (lambda q, k, v: (q[..., :32], k[..., :32], v[..., :32]), "head_dim must be 64 or 128, got 32"),
        (lambda q, k, v: (q, k.mT.contiguous().mT, v), "contiguous last dimension"),
        (lambda q, k, v: (q, k, far(v)), "less than 33554432 elements apart"),
    ],
)
def test_tensors_that_are_refused(change: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(*change(*smooth_qkv(65, 64, 64, 1, BF16)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"thresh_type": "none"}, "thresh_type"),
        ({"scale": 0.0}, "scale must be finite and above 0"),
        ({"scale": float("inf")}, "scale must be finite and above 0"),
        ({"tau": float("nan")}, "tau must be a number"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(*smooth_qkv(65, 1, 64, 1, BF16), **options)
