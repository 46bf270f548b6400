"""What the Triton kernels know of blocks: loads of them, and the kernels that prepare their means.

Imported when the provider `builtin` is first used, because Triton is optional. A lane is one head of one
sample; k and v are addressed by their strides of [B, T, H, D], everything else is contiguous.

Means of keys are centred before they are rounded to the keys' dtype, because real keys have channels that are
large and nearly constant, next to which a bf16 number has nothing left for what differs from block to block.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)
# A product has at least as many columns, of which fp32 numbers in parts of a 16-bit dtype need two or three.
PARTS = tl.constexpr(16)
# Numbers that differ from call to call; a kernel would be compiled anew where one is 1 or a multiple of 16.
PLAIN = [
    "tokens", "blocks", "heads", "tiles", "start", "stop",
    "sink_start", "sink_stop", "skip_start", "skip_stop",
]  # fmt: skip


@triton.jit(do_not_specialize=PLAIN)
def block_means(
    k, v, k_mean, v_mean, tokens, blocks, heads,
    k_batch, k_row, k_head, v_batch, v_row, v_head, D: tl.constexpr,
):  # fmt: skip
    """Means over the live rows of each block. Grid (lanes * blocks,). k_mean, v_mean: [lanes, blocks, D]."""
    block = tl.program_id(0) % blocks
    lane = (tl.program_id(0) // blocks).to(tl.int64)
    first = block * BLOCK
    # Divided before they are added: 64 of the largest bf16 numbers are more than fp32 holds.
    share = 1.0 / tl.minimum(tokens - first, BLOCK).to(tl.float32)
    k += lane // heads * k_batch + lane % heads * k_head
    v += lane // heads * v_batch + lane % heads * v_head
    keys = masked_rows(k, first, tokens, k_row, D).to(tl.float32)
    values = masked_rows(v, first, tokens, v_row, D).to(tl.float32)
    place = (lane * blocks + block) * D + tl.arange(0, D)
    tl.store(k_mean + place, tl.sum(keys * share, 0))
    tl.store(v_mean + place, tl.sum(values * share, 0).to(v_mean.dtype.element_ty))


@triton.jit(do_not_specialize=PLAIN)
def centre_keys(
    k_mean, centred, centre, spread, blocks, D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr
):
    """Half of what the mean of each block of keys differs from the mean of all by.

    Halved, because two numbers of a dtype can be further apart than its largest one. Grid (lanes, D / W).
    k_mean: [lanes, blocks, D] fp32; centred: the same in the dtype of the keys. centre: [lanes, D, PARTS] of
    that dtype, the mean over the blocks in parts. spread: [lanes, D] fp32, the standard deviation.
    """
    lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * W + tl.arange(0, W)
    k_mean += lane * blocks * D + tl.program_id(1) * W
    centred += lane * blocks * D
    share = 1.0 / blocks.to(tl.float32)
    mean = tl.zeros([W], tl.float32)
    for first in range(0, blocks, GROUP):
        mean += tl.sum(group(k_mean, first, blocks, D, W, GROUP) * share, 0)
    variance = tl.zeros([W], tl.float64)  # squares of numbers that fp32 just holds
    for first in range(0, blocks, GROUP):
        block = first + tl.arange(0, GROUP)
        there = (block < blocks)[:, None]
        half = tl.where(there, group(k_mean, first, blocks, D, W, GROUP) * 0.5 - mean * 0.5, 0.0)
        variance += tl.sum(half.to(tl.float64) * half.to(tl.float64), 0) * share
        tl.store(centred + block[:, None] * D + column, half.to(centred.dtype.element_ty), mask=there)
    parts = in_parts(tl.broadcast_to(mean[:, None], [W, PARTS]), 3, centre.dtype.element_ty)
    tl.store(centre + (lane * D + column[:, None]) * PARTS + tl.arange(0, PARTS), parts)
    tl.store(spread + lane * D + column, (2 * tl.sqrt(variance)).to(tl.float32))


@triton.jit
def in_parts(numbers, COUNT: tl.constexpr, dtype: tl.constexpr):
    """[N, PARTS] of a 16-bit dtype: columns that add up to fp32 numbers, which come in every column."""
    part = tl.arange(0, PARTS)[None, :]
    parts = tl.zeros_like(numbers)
    for n in tl.static_range(COUNT - 1):
        # Both dtypes hold the upper half of the bits (fp16 from 2^-17 on), and cutting beats rounding.
        upper = (numbers.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        parts = tl.where(part == n, upper, parts)
        numbers -= upper
    return tl.where(part == COUNT - 1, numbers, parts).to(dtype)


@triton.jit
def masked_rows(tensor, first, tokens, row_stride, W: tl.constexpr):
    """[64, W] from row `first` on, 0 behind the last one."""
    inner = tl.arange(0, BLOCK)
    tensor += tl.cast(first, tl.int64) * row_stride
    there = (first + inner < tokens)[:, None]
    return tl.load(tensor + inner[:, None] * row_stride + tl.arange(0, W), mask=there, other=0.0)


@triton.jit
def group(means, first, blocks, D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr):
    """[GROUP, W] of one lane's block means, 0 behind the last one."""
    block = first + tl.arange(0, GROUP)
    return tl.load(means + block[:, None] * D + tl.arange(0, W), mask=(block < blocks)[:, None], other=0.0)
