"""q, k and v for tests of Sol attention, and Sol attention by brute force in fp64."""

from __future__ import annotations

import math

import torch

BLOCK = 64


def smooth_qkv(
    tokens: int,
    heads: int = 2,
    head_dim: int = 32,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, T, H, D] tensors as a DiT makes them: neighbours alike, q looking for k of the same place.

    Fields of low frequencies over T (period 128 tokens and more), half of them common to q, k and v, plus
    noise. With D = 64 at tau 1 the row-wise approximation is 0.12 off dense attention and the centroid one
    0.21, about as on data of real models. On independent noise block means vanish, and neither is close.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    position = torch.arange(tokens, dtype=torch.float64)
    frequencies = 2 * math.pi * torch.rand(6, generator=generator, dtype=torch.float64) / 128
    waves = torch.cat([(position.outer(frequencies)).cos(), (position.outer(frequencies)).sin()], dim=1)
    made = []
    mixing = noise(batch, heads, 12, head_dim) / 6**0.5
    for size in (0.7, 0.7, 1.0):
        field = torch.einsum("tw,bhwd->bthd", waves, mixing + noise(*mixing.shape) / 6**0.5)
        made.append((size * (field + 0.5 * noise(batch, tokens, heads, head_dim))).to(dtype))
    return made[0], made[1], made[2]


def brute_force(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tau: float,
    by_centroid: bool = False,
    thresh_type: str = "diag",
    sink_blocks: range = range(0),
    sink_queries: range = range(0),
    scale: float | None = None,
) -> tuple[torch.Tensor, float]:
    """(Sol attention in fp64, density): each pooled block is written out as L_j copies of its mean."""
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty_like(q)
    exact_pairs = pairs = 0
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            keys, values = k[b, :, h].split(BLOCK), v[b, :, h].split(BLOCK)
            means = torch.stack([block.mean(0) for block in keys])
            for i, rows in enumerate(q[b, :, h].split(BLOCK)):
                centroid = rows.mean(0)
                exact = _exact_blocks(i, centroid, means, scale, tau, thresh_type, sink_blocks)
                exact_pairs, pairs = exact_pairs + sum(exact), pairs + len(exact)
                of_block = torch.arange(i * BLOCK, i * BLOCK + len(rows))
                is_sink = torch.tensor([int(t) in sink_queries for t in of_block])
                single = (rows @ k[b, :, h].T).split(BLOCK, dim=1)
                pooled = rows @ means.T
                if by_centroid:
                    centre = means.mean(0)
                    pooled = (rows @ centre).unsqueeze(1) + centroid @ (means - centre).T
                for some, open_blocks in ((~is_sink, exact), (is_sink, [True] * len(exact))):
                    logits, weighed = [], []
                    for j, value in enumerate(values):
                        copies = pooled[:, j : j + 1].expand(-1, len(value))
                        logits.append((single[j] if open_blocks[j] else copies)[some])
                        weighed.append(value if open_blocks[j] else value.mean(0).expand(len(value), -1))
                    weights = (torch.cat(logits, dim=1) * scale).softmax(1)
                    out[b, of_block[some], h] = weights @ torch.cat(weighed)
    return out, exact_pairs / pairs


def _exact_blocks(
    i: int,
    centroid: torch.Tensor,
    means: torch.Tensor,
    scale: float,
    tau: float,
    thresh_type: str,
    sink_blocks: range,
) -> list[bool]:
    s = scale * math.log2(math.e)
    scores = s * means @ centroid
    if thresh_type == "diag":
        variance = float((centroid**2 * means.var(dim=0, correction=0)).sum()) * s**2
    else:
        covariance = torch.cov(means.T, correction=0).reshape(len(centroid), -1)
        variance = float(centroid @ covariance @ centroid) * s**2
    threshold = float(scores.mean()) + tau * math.sqrt(variance + 1e-6)
    return [float(score) > threshold or abs(i - j) <= 1 or j in sink_blocks for j, score in enumerate(scores)]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|, in fp64."""
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Dense attention of [B, T, H, D] tensors by PyTorch, in fp64."""
    out = torch.nn.functional.scaled_dot_product_attention(
        *(t.double().transpose(1, 2) for t in (q, k, v)), scale=scale
    )
    return out.transpose(1, 2)
