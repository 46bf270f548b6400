"""The two references for Sol attention, against brute force in fp64 and against dense attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comfyui import inprocess
from sol_data import BLOCK, brute_force, dense, difference, smooth_qkv
from torch.utils._python_dispatch import TorchDispatchMode

reference = inprocess.pack_module("kernels_glue.attention.reference")
rowwise, centroid = reference.sol_rowwise, reference.sol_centroid
BOTH = pytest.mark.parametrize("sol", [rowwise, centroid], ids=["rowwise", "centroid"])
THRESH = pytest.mark.parametrize("thresh_type", ["diag", "exact"])
EXACT = 1e-12  # fp64 against fp64


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small take longer when two threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_fp64(sol: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return sol(q.double(), k.double(), v.double(), compute_dtype=torch.float64, **options)


@BOTH
@THRESH
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 449])
def test_equals_brute_force(sol: Any, thresh_type: str, tokens: int) -> None:
    q, k, v = smooth_qkv(tokens, batch=2, head_dim=24)
    expected, density = brute_force(q, k, v, tau=0.5, thresh_type=thresh_type, by_centroid=sol is centroid)
    result = in_fp64(sol, q, k, v, tau=0.5, thresh_type=thresh_type)
    assert difference(result.out, expected) < EXACT
    assert float(result.density) == pytest.approx(density, rel=1e-6)
    if tokens == 449:
        assert 0.3 < density < 0.9  # both kinds of blocks were there


@BOTH
@pytest.mark.parametrize(("tokens", "heads"), [(1031, 2), (4097, 1)])
def test_long_ragged_sequences_equal_brute_force(sol: Any, tokens: int, heads: int) -> None:
    q, k, v = smooth_qkv(tokens, heads=heads, head_dim=8, seed=3)
    expected, density = brute_force(q, k, v, tau=1.0, by_centroid=sol is centroid)
    result = in_fp64(sol, q, k, v)
    assert difference(result.out, expected) < EXACT
    assert float(result.density) == pytest.approx(density, rel=1e-6)
    single = sol(q, k, v)
    assert single.out.dtype == torch.float32
    assert difference(single.out, expected) < 1e-5


@BOTH
def test_sinks_equal_brute_force(sol: Any) -> None:
    """Key sinks widen to blocks in both; query sinks are rows in the row-wise one and blocks in the other."""
    q, k, v = smooth_qkv(449)
    rows = range(128, 256) if sol is centroid else range(150, 200)
    expected, density = brute_force(
        q, k, v, tau=1.5, by_centroid=sol is centroid, sink_blocks=range(5, 7), sink_queries=rows
    )
    result = in_fp64(sol, q, k, v, tau=1.5, sink_keys=(383, 385), sink_queries=(150, 200))
    other, other_density = brute_force(q, k, v, tau=1.5, by_centroid=sol is centroid)
    assert difference(result.out, expected) < EXACT
    assert float(result.density) == pytest.approx(density, rel=1e-6)
    assert difference(other, expected) > 0.02 and density > other_density


@BOTH
@THRESH
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 1031])
def test_every_block_exact_is_dense_attention(sol: Any, thresh_type: str, tokens: int) -> None:
    q, k, v = smooth_qkv(tokens, batch=2)
    result = in_fp64(sol, q, k, v, tau=-100.0, thresh_type=thresh_type, scale=0.3)
    assert difference(result.out, dense(q, k, v, scale=0.3)) < EXACT
    assert float(result.density) == 1.0


def test_only_the_diagonal_exact_is_attention_to_block_means() -> None:
    """tau = 100, row by row: for the far blocks dense attention sees means in place of keys and values."""
    q, k, v = (t.double() for t in smooth_qkv(10 * BLOCK))
    means = [t.unflatten(1, (10, BLOCK)).mean(2).repeat_interleave(BLOCK, dim=1) for t in (k, v)]
    result = in_fp64(rowwise, q, k, v, tau=100.0).out
    for i in range(10):
        near = slice(max(i - 1, 0) * BLOCK, (i + 2) * BLOCK)
        k_i, v_i = means[0].clone(), means[1].clone()
        k_i[:, near], v_i[:, near] = k[:, near], v[:, near]
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        assert difference(result[:, rows], dense(q[:, rows], k_i, v_i)) < EXACT


def test_the_two_approximations_differ_as_measured() -> None:
    """On correlated data at tau 1 the row-wise tail is closer to dense, by about a factor of two."""
    q, k, v = smooth_qkv(2048, head_dim=64)
    exact = dense(q, k, v)
    by_row, by_block = rowwise(q, k, v).out, centroid(q, k, v).out
    assert 0.05 < difference(by_row, exact) < 0.2
    assert 1.3 < difference(by_block, exact) / difference(by_row, exact) < 2.5
    assert difference(by_row, by_block) > 0.05


def test_the_two_approximations_agree_where_a_blocks_queries_are_alike() -> None:
    q, k, v = smooth_qkv(640)
    alike = q.unflatten(1, (10, BLOCK))[:, :, :1].expand(-1, -1, BLOCK, -1, -1).flatten(1, 2)
    by_row, by_block = in_fp64(rowwise, alike, k, v), in_fp64(centroid, alike, k, v)
    assert difference(by_row.out, by_block.out) < EXACT
    assert difference(by_row.out, dense(alike, k, v)) > 0.01


@BOTH
def test_views_and_half_precision(sol: Any) -> None:
    """Views of a fused [B, H, T, 3 D] bf16 projection give what copies give, in bf16."""
    fused = torch.cat([t.transpose(1, 2) for t in smooth_qkv(321, dtype=torch.bfloat16)], dim=-1)
    views = [t.transpose(1, 2) for t in fused.chunk(3, dim=-1)]
    before = fused.clone()
    result = sol(*views).out
    assert result.dtype == torch.bfloat16 and result.is_contiguous()
    assert torch.equal(result, sol(*(t.contiguous() for t in views)).out)
    expected, _ = brute_force(*views, tau=1.0, by_centroid=sol is centroid)
    assert difference(result, expected) < 4e-3  # one rounding to bf16
    assert torch.equal(fused, before)


@BOTH
def test_large_scores_do_not_overflow(sol: Any) -> None:
    q, k, v = smooth_qkv(449)
    expected, _ = brute_force(q * 30, k * 30, v, tau=0.5, by_centroid=sol is centroid)
    assert difference(in_fp64(sol, q * 30, k * 30, v, tau=0.5).out, expected) < 1e-9


@BOTH
def test_cutting_into_tiles_changes_nothing(sol: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = smooth_qkv(449, heads=3)
    options = {"sink_keys": (70, 80), "sink_queries": (200, 300)}
    whole = in_fp64(sol, q, k, v, **options)
    for scores in (1, 2 * BLOCK * BLOCK * 8, 2 * BLOCK * BLOCK * 64):  # a block, two blocks, two heads
        monkeypatch.setattr(reference, "_SCORES", scores)
        tiled = in_fp64(sol, q, k, v, **options)
        assert difference(tiled.out, whole.out) < EXACT
        assert float(tiled.density) == float(whole.density)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() > 0:
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@BOTH
@THRESH
def test_16k_tokens_stay_small_and_nothing_waits_for_the_device(sol: Any, thresh_type: str) -> None:
    """On the meta device, which has no values: reading one, as a synchronisation does, raises."""
    q, k, v = (torch.empty(1, 16384, 2, 128, device="meta") for _ in range(3))
    with Largest() as seen:
        result = sol(q, k, v, thresh_type=thresh_type, sink_keys=(0, 70), sink_queries=(3, 70))
    assert result.out.shape == q.shape and result.density.shape == ()
    assert 0 < seen.numel < 16384 * 16384 // 8


@BOTH
def test_wrong_input_is_refused(sol: Any) -> None:
    q, k, v = smooth_qkv(65)
    with pytest.raises(ValueError, match="thresh_type must be diag or exact, got 'full'"):
        sol(q, k, v, thresh_type="full")
    with pytest.raises(ValueError, match="must be"):
        sol(q, k[:, :64], v)
