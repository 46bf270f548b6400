"""Sol attention in plain PyTorch, written from the paper's formulas (arXiv 2607.24027): the yardstick for
the kernels and what runs where there is none.

Queries and keys are cut into blocks of 64 rows; the last one may be shorter, and then only its live rows
count. With s = scale * log2(e), Q̄_i and K̄_j the block means, V̂_j the block sums of V and L_j the live rows:

    score        ŝ_ij = s Q̄_i·K̄_j,   mu_i = mean of ŝ_ij over j
    deviation    `diag`:  s² Σ_d Q̄_id² Var_j(K̄_jd),   `exact`:  s² Q̄_iᵀ Cov_j(K̄) Q̄_i
    exact pair   ŝ_ij > mu_i + tau sqrt(deviation + 1e-6),  or |i - j| <= 1,  or j is a sink

A row of query block i has one base-2 softmax: over the keys of its exact blocks, and over one pooled term
2^e V̂_j of weight L_j 2^e for every other block. The two functions differ in that exponent e:

    sol_rowwise    e = s q_r·K̄_j                                   the paper and its CuTe and Triton kernels
    sol_centroid   e = s (q_r·K̄mean + Q̄_i·(K̄_j - K̄mean))          comfy_kitchen

They are different approximations, so each kernel is compared with its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .sol import BLOCK, NO_ROWS, SolResult, blocks_of

# Scores held at a time; 2**23 of them are 32 MiB in fp32, and there are a few such tensors.
_SCORES = 2**23
_LN2 = math.log(2)
_VARIANCE_FLOOR = 1e-6


def sol_rowwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    tau: float = 1.0,
    thresh_type: str = "diag",
    sink_keys: tuple[int, int] = NO_ROWS,
    sink_queries: tuple[int, int] = NO_ROWS,
    compute_dtype: torch.dtype = torch.float32,
) -> SolResult:
    """Sol attention whose pooled terms are scored by each query row (arXiv 2607.24027).

    Memory grows with T, not with T²; nothing waits for the device.

    Args:
        q, k, v: [B, T, H, D], any strides, any floating dtype, any D; equal T and H.
        scale: factor of the scores; None means D ** -0.5.
        tau: threshold in standard deviations; at -100 the result is dense attention.
        thresh_type: `diag` or `exact`.
        sink_keys: rows [start, stop) that are exact as keys, widened to whole blocks.
        sink_queries: exactly these rows attend to every key exactly.
        compute_dtype: dtype of the arithmetic, torch.float32 or torch.float64.

    Returns:
        `out` [B, T, H, D] in q's dtype, contiguous. `density`: share of the (query block, key block) pairs
        of all samples and heads that are exact by the rule above (threshold, diagonal or key sink); query
        sinks are not counted, as they are rows and not pairs.

    Raises:
        ValueError: an unknown thresh_type, or tensors of different shapes.
    """
    return _over_tiles(q, k, v, scale, tau, thresh_type, sink_keys, sink_queries, compute_dtype, _rowwise)


def sol_centroid(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    tau: float = 1.0,
    thresh_type: str = "diag",
    sink_keys: tuple[int, int] = NO_ROWS,
    sink_queries: tuple[int, int] = NO_ROWS,
    compute_dtype: torch.dtype = torch.float32,
) -> SolResult:
    """Sol attention as comfy_kitchen computes it: pooled terms are scored by the query block's centroid.

    Arguments, result and errors are those of `sol_rowwise`, but for `sink_queries`: as in comfy_kitchen
    every row of a 64-row block that the range touches attends to every key exactly.
    """
    start, stop = blocks_of(sink_queries)
    rows = (start * BLOCK, stop * BLOCK)
    return _over_tiles(q, k, v, scale, tau, thresh_type, sink_keys, rows, compute_dtype, _centroid)


def require_alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, thresh_type: str) -> None:
    """Raises ValueError for tensors that are not [B, T, H, D] alike, and for an unknown thresh_type."""
    if thresh_type not in ("diag", "exact"):
        raise ValueError(f"thresh_type must be diag or exact, got {thresh_type!r}")
    if not q.shape == k.shape == v.shape or q.dim() != 4:
        raise ValueError(f"q, k, v must be [B, T, H, D] alike, got {[tuple(t.shape) for t in (q, k, v)]}")


# --- the two approximations ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Keys:
    """Keys and values of some heads of one sample: [h, T, D], their block means [h, N, D], live rows [N]."""

    k: torch.Tensor
    v: torch.Tensor
    k_mean: torch.Tensor
    v_mean: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class _Queries:
    """Some query blocks of the same heads, with the factor s of the scores in them.

    Attributes:
        q: [h, rows, D].
        mean: [h, blocks, D].
        exact: [h, rows, N], which key blocks a row sees exactly.
    """

    q: torch.Tensor
    mean: torch.Tensor
    exact: torch.Tensor


def _rowwise(queries: _Queries, keys: _Keys) -> torch.Tensor:
    """One softmax over a longer list of keys: a pooled block is its mean key and value, L_j times."""
    by_key = queries.exact.repeat_interleave(BLOCK, dim=-1)[..., : keys.k.shape[1]]
    single = (queries.q @ keys.k.mT).masked_fill(~by_key, -torch.inf)
    pooled = queries.q @ keys.k_mean.mT + keys.lengths.log2()
    weights = torch.cat([single, pooled.masked_fill(queries.exact, -torch.inf)], dim=-1)
    return (weights * _LN2).softmax(dim=-1) @ torch.cat([keys.v, keys.v_mean], dim=1)


def _centroid(queries: _Queries, keys: _Keys) -> torch.Tensor:
    """Numerator and denominator apart; with K centred, the term s q_r·K̄mean of every exponent cancels."""
    centre = keys.k_mean.mean(dim=1, keepdim=True)
    by_key = queries.exact.repeat_interleave(BLOCK, dim=-1)[..., : keys.k.shape[1]]
    single = (queries.q @ (keys.k - centre).mT).masked_fill(~by_key, -torch.inf)
    pooled = _to_rows(queries.mean @ (keys.k_mean - centre).mT, queries.q.shape[1])
    pooled = pooled.masked_fill(queries.exact, -torch.inf)
    highest = torch.maximum(single.amax(-1, keepdim=True), pooled.amax(-1, keepdim=True))
    single = torch.exp2(single - highest)
    pooled = torch.exp2(pooled - highest) * keys.lengths
    return (single @ keys.v + pooled @ keys.v_mean) / (single.sum(-1) + pooled.sum(-1)).unsqueeze(-1)


# --- what they share: blocks, routing, tiles -----------------------------------------------------


def _over_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    tau: float,
    thresh_type: str,
    sink_keys: tuple[int, int],
    sink_rows: tuple[int, int],
    compute_dtype: torch.dtype,
    attend: Callable[[_Queries, _Keys], torch.Tensor],
) -> SolResult:
    """Runs `attend` over samples, heads and query blocks, few enough at a time to bound the scores held."""
    require_alike(q, k, v, thresh_type)
    batch, tokens, heads, head_dim = q.shape
    blocks = -(-tokens // BLOCK)
    s = (head_dim**-0.5 if scale is None else scale) * math.log2(math.e)
    lengths = torch.full((blocks,), BLOCK, dtype=compute_dtype, device=q.device)
    lengths[-1:] = tokens - (blocks - 1) * BLOCK
    position = torch.arange(tokens, device=q.device)
    is_sink = ((position >= sink_rows[0]) & (position < sink_rows[1])).unsqueeze(-1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    exact_pairs = torch.zeros((), dtype=torch.int64, device=q.device)
    for sample, some_heads in itertools.product(range(batch), _cut(heads, BLOCK * BLOCK * blocks * blocks)):
        q_h, k_h, v_h = (t[sample, :, some_heads].transpose(0, 1) for t in (q, k, v))
        k_h, v_h = k_h.to(compute_dtype), v_h.to(compute_dtype)
        keys = _Keys(k_h, v_h, _block_means(k_h, lengths), _block_means(v_h, lengths), lengths)
        for some_blocks in _cut(blocks, BLOCK * BLOCK * blocks * k_h.shape[0]):
            rows = slice(some_blocks.start * BLOCK, min(some_blocks.stop * BLOCK, tokens))
            q_tile = q_h[:, rows].to(compute_dtype) * s
            mean = _block_means(q_tile, lengths[some_blocks])
            pairs = _exact_pairs(mean, keys.k_mean, tau, thresh_type, some_blocks.start, blocks_of(sink_keys))
            exact_pairs += pairs.sum()
            exact = _to_rows(pairs, q_tile.shape[1]) | is_sink[rows]
            result = attend(_Queries(q_tile, mean, exact), keys)
            out[sample, rows, some_heads] = result.transpose(0, 1).to(q.dtype)
    return SolResult(out, exact_pairs / (batch * heads * blocks * blocks))


def _cut(count: int, scores_each: int) -> Iterator[slice]:
    """Cuts `count` heads or query blocks into parts that need at most _SCORES scores, or into single ones."""
    step = max(1, _SCORES // scores_each)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _block_means(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[h, rows, D] -> [h, blocks, D], means over the live rows of each block."""
    heads, count, width = rows.shape
    padded = torch.nn.functional.pad(rows, (0, 0, 0, lengths.shape[0] * BLOCK - count))
    return padded.reshape(heads, -1, BLOCK, width).sum(dim=2) / lengths.unsqueeze(-1)


def _to_rows(values: torch.Tensor, rows: int) -> torch.Tensor:
    """[h, blocks, X] -> [h, rows, X]: every row gets what its block has."""
    return values.repeat_interleave(BLOCK, dim=1)[:, :rows]


def _exact_pairs(
    q_mean: torch.Tensor,
    k_mean: torch.Tensor,
    tau: float,
    thresh_type: str,
    first_block: int,
    sinks: tuple[int, int],
) -> torch.Tensor:
    """Which pairs are exact: [h, query blocks, N] booleans for query blocks from `first_block` on."""
    centred = k_mean - k_mean.mean(dim=1, keepdim=True)
    above_mean = q_mean @ centred.mT
    if thresh_type == "diag":
        variance = q_mean.square() @ centred.square().mean(dim=1).unsqueeze(-1)
    else:  # Q̄ᵀ Cov(K̄) Q̄ is the variance of the scores themselves
        variance = above_mean.square().mean(dim=-1, keepdim=True)
    i = torch.arange(first_block, first_block + q_mean.shape[1], device=q_mean.device).unsqueeze(-1)
    j = torch.arange(k_mean.shape[1], device=q_mean.device)
    forced = ((i - j).abs() <= 1) | ((j >= sinks[0]) & (j < sinks[1]))
    return (above_mean > tau * (variance + _VARIANCE_FLOOR).sqrt()) | forced
