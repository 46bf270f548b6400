"""Sol attention in Triton: what is launched, in what order, with which memory (kernels: sol_kernels.py)."""

from __future__ import annotations

import hashlib
import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .devices import sm_of
from .reference import require_alike
from .sol import BLOCK, HEAD_DIMS, NO_ROWS, SolResult, blocks_of
from .sol_tiles import Tile, tiles_for
from .strides import INT32_REACH, on_16_bytes

DTYPES = (torch.bfloat16, torch.float16)
# Room above the largest softmax weight, as a power of two. bf16 has fp32's exponents, so weights can be that
# much smaller, and sums of 2^16 of its largest numbers still fit; fp16 values are small enough as they are.
_SHIFT = {torch.bfloat16: 16.0, torch.float16: 0.0}

# Elements from one row to the next; the kernels count those of a block in 32 bits.
_ROW_REACH = INT32_REACH // BLOCK

# For each multiprocessor; registers leave room for no more.
_PROGRAMS = 2
# Means of keys that a program centres at a time, and how many of their columns, of which a cache line has 32.
_MEANS, _COLUMNS = 256, 32


def sol_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    tau: float = 1.0,
    thresh_type: str = "diag",
    sink_keys: tuple[int, int] = NO_ROWS,
    sink_queries: tuple[int, int] = NO_ROWS,
    tile: Tile | None = None,
) -> SolResult:
    """Sol attention as `reference.sol_rowwise` defines it, by Triton kernels (arXiv 2607.24027).

    Args:
        q, k, v: [B, T, H, D] alike, bf16 or fp16, D 64 or 128, any strides with a contiguous last dimension
            (rows less than 2^25 elements apart). Views of a fused projection are read as they are; rows that
            start on 16 bytes are read faster.
        scale: factor of the scores, finite and above 0; None means D ** -0.5.
        tau: threshold in standard deviations; at -100 the result is dense attention.
        thresh_type: `diag` or `exact`.
        sink_keys: rows [start, stop) that are exact as keys, widened to whole blocks.
        sink_queries: exactly these rows attend to every key exactly.
        tile: how the kernel is launched; None is the first of `tiles_for` the device.

    Returns:
        `out` [B, T, H, D] in q's dtype, contiguous, and `density` as `sol_rowwise` counts it. Nothing waits
        for the device.

    Raises:
        ValueError: tensors or options that the kernels do not take.
        ImportError: Triton is not installed, or cannot be imported.
    """
    from . import sol_kernels as kernels

    _require(q, k, v, scale, tau, thresh_type)
    tile = tile or tiles_for(sm_of(q.device))[0]
    batch, tokens, heads, head_dim = q.shape
    blocks, lanes = -(-tokens // BLOCK), batch * heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return SolResult(out, torch.zeros((), device=q.device))
    s = (head_dim**-0.5 if scale is None else scale) * math.log2(math.e)
    tiles = lanes * blocks
    programs = min(_PROGRAMS * _multiprocessors(q.device), tiles)
    descriptors = tile.descriptors and all(map(_copies_blocks, (q, k, v)))
    start, stop = max(sink_queries[0], 0), min(sink_queries[1], tokens)
    skip = (start, stop) if start < stop else (tokens, 0)
    with _on(q.device):
        k_mean, v_mean, *moments = prepare(k, v)
        flags = torch.empty(programs, blocks, dtype=torch.int8, device=q.device)
        entries = torch.empty(programs, blocks + 1, dtype=torch.int32, device=q.device)
        exact_pairs, next_tile = torch.zeros(2, dtype=torch.int64, device=q.device).split(1)
        tensors, means, part = (q, k, v), (k_mean, v_mean), head_dim // tile.halves
        if descriptors:
            tensors = [_described(t, (1, BLOCK, 1, w)) for t, w in ((q, head_dim), (k, head_dim), (v, part))]
            means = [_described(t, (1, tile.group, w)) for t, w in ((k_mean, head_dim), (v_mean, part))]
        kernels.attend[(programs,)](
            *tensors, out, *means, *moments, flags, entries, next_tile.view(torch.int32), exact_pairs,
            tokens, blocks, heads, tiles, s, float(tau), *blocks_of(sink_keys), *skip,
            *_strides(q, k, v, out),
            D=head_dim, GROUP=tile.group, HALVES=tile.halves, DESCRIPTORS=descriptors,
            EXACT_VARIANCE=thresh_type == "exact", SHIFT=_SHIFT[q.dtype],
            POOLED_STAGES=tile.pooled_stages, EXACT_STAGES=tile.exact_stages, num_warps=tile.warps,
        )  # fmt: skip
        if start < stop:
            kernels.attend_exactly[(-(-(stop - start) // BLOCK) * lanes,)](
                *tensors, out, tokens, heads, s, start, stop, *_strides(q, k, v, out),
                D=head_dim, HALVES=tile.halves, DESCRIPTORS=descriptors, SHIFT=_SHIFT[q.dtype],
                STAGES=tile.exact_stages, num_warps=tile.warps,
            )  # fmt: skip
    return SolResult(out, exact_pairs[0] / (lanes * blocks * blocks))


def prepare(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the kernel needs to know of the keys and values before it starts, from one pass over them.

    Args:
        k, v: [B, T, H, D] as `sol_triton` takes them, on the current device.

    Returns:
        Block means of k, centred and halved, and of v: 2 x [B * H, blocks, D]. Of the former, before that:
        the mean over the blocks, in parts that add up to it, [B * H, D, 16]; the deviation, [B * H, D], fp32.
    """
    from . import sol_means as kernels

    batch, tokens, heads, head_dim = k.shape
    blocks, lanes = -(-tokens // BLOCK), batch * heads
    k_mean = torch.empty(lanes, blocks, head_dim, dtype=torch.float32, device=k.device)
    centred, v_mean = torch.empty(2, lanes, blocks, head_dim, dtype=k.dtype, device=k.device)
    centre = torch.empty(lanes, head_dim, kernels.PARTS.value, dtype=k.dtype, device=k.device)
    spread = torch.empty(lanes, head_dim, dtype=torch.float32, device=k.device)
    kernels.block_means[(lanes * blocks,)](
        k, v, k_mean, v_mean, tokens, blocks, heads, *_strides(k, v), D=head_dim, num_warps=1
    )
    kernels.centre_keys[(lanes, head_dim // _COLUMNS)](
        k_mean, centred, centre, spread, blocks, D=head_dim, W=_COLUMNS, GROUP=_MEANS
    )
    return centred, v_mean, centre, spread


@cache
def revision() -> str:
    """Of the kernels and their launches: what was timed with another one does not hold."""
    files = [Path(__file__).with_name(f"{name}.py") for name in ("sol_kernels", "sol_means", "sol_triton")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def far_apart(*tensors: torch.Tensor) -> bool:
    """Whether the rows of one of [B, T, H, D] are further apart than the kernels can count."""
    return any(t.shape[1] > 1 and t.stride(1) >= _ROW_REACH for t in tensors)


def _require(q: Any, k: Any, v: Any, scale: float | None, tau: float, thresh_type: str) -> None:
    require_alike(q, k, v, thresh_type)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ValueError(f"q, k, v must be bf16 or fp16 alike, got {[t.dtype for t in (q, k, v)]}")
    if q.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"head_dim must be 64 or 128, got {q.shape[-1]}")
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        raise ValueError("q, k and v must have a contiguous last dimension")
    if far_apart(q, k, v):
        raise ValueError(
            f"rows must be less than {_ROW_REACH} elements apart, got strides {_strides(q, k, v)}"
        )
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale must be finite and above 0, got {scale}")
    if math.isnan(tau):
        raise ValueError("tau must be a number, got nan")


def _copies_blocks(tensor: torch.Tensor) -> bool:
    """Whether the hardware can copy blocks of it; it takes no tensor that repeats itself."""
    repeats = any(stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return on_16_bytes(tensor) and not repeats


def _described(tensor: torch.Tensor, block: tuple[int, ...]) -> Any:
    """A tensor descriptor for copies of blocks of this shape; what lies behind the tensor reads as 0."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    # A dimension of one element may have any stride, but a descriptor takes only some.
    sixteen = 16 // tensor.element_size()
    strides = [
        stride if size > 1 or index == tensor.ndim - 1 else sixteen
        for index, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
    return TensorDescriptor(tensor, list(tensor.shape), strides, list(block))


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Batch, row and head stride of each."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _multiprocessors(device: torch.device) -> int:
    """1 for a CPU, where Triton's interpreter runs programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
