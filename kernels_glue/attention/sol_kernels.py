"""The Triton kernels of the provider `builtin`: Sol attention as the paper has it (arXiv 2607.24027).

Imported when the provider is first used, because Triton is optional. The formulas are in reference.py, the
launches in sol_triton.py. A lane is one head of one sample.

q, k, v and the block means come as tensor descriptors where DESCRIPTORS is set (a GPU from SM 9.0 on copies a
whole block for one thread's asking), else as pointers and strides of [B, T, H, D], with a contiguous last
dimension; everything else is contiguous.

sol_means.py prepares the means of the blocks. `attend` does the rest in one pass over the keys: it scores the
means by the centroid of the queries, which gives the routing, and by each query, which gives the pooled
terms; it notes which blocks are exact, and reads these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sol_means import BLOCK, PARTS, PLAIN, group, in_parts, masked_rows

_LOG2_BLOCK = tl.constexpr(6.0)
_FLAGS_AT_A_TIME = tl.constexpr(512)
_VARIANCE_FLOOR = tl.constexpr(1e-6)
_NEVER = tl.constexpr(float("-inf"))
# Sums of weights are kept apart for so many columns until the end: of eight neighbours a thread has the
# same two everywhere, so adding them needs no exchange among threads.
_APART = tl.constexpr(8)


@triton.jit(do_not_specialize=PLAIN)
def attend(
    q, k, v, out, k_mean, v_mean, centre, spread, flags, entries, next_tile, exact_pairs,
    tokens, blocks, heads, tiles, scale, tau, sink_start, sink_stop, skip_start, skip_stop,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head,
    D: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr, DESCRIPTORS: tl.constexpr,
    EXACT_VARIANCE: tl.constexpr, SHIFT: tl.constexpr,
    POOLED_STAGES: tl.constexpr, EXACT_STAGES: tl.constexpr,
):  # fmt: skip
    """Sol attention; each program takes query blocks until none is left.

    Grid: any, best what the device holds; programs tell each other nothing but which query block is next.
    flags: [programs, blocks] int8, entries: [programs, blocks + 1] int32, scratch. next_tile (int32) and
    exact_pairs (int64) begin at 0. scale: with log2(e) in it. Query blocks inside of the rows
    [skip_start, skip_stop) are left out, though their pairs are counted. HALVES: into how many parts of D the
    products with the values are cut; in 2 Triton shares rows and not columns among the warps of an older GPU.
    """
    flags += tl.program_id(0).to(tl.int64) * blocks
    entries += tl.program_id(0).to(tl.int64) * (blocks + 1)
    tile = tl.atomic_add(next_tile, 1, sem="relaxed")
    while tile < tiles:
        lane, block = tile // blocks, tile % blocks
        sample, head = lane // heads, lane % heads
        wide = lane.to(tl.int64)
        _tile(
            _lane(q, sample, head, q_batch, q_head, DESCRIPTORS),
            _lane(k, sample, head, k_batch, k_head, DESCRIPTORS),
            _lane(v, sample, head, v_batch, v_head, DESCRIPTORS),
            _lane(out, sample, head, out_batch, out_head, False),
            k_mean, v_mean, centre + wide * D * PARTS, spread + wide * D,
            flags, entries, exact_pairs, sample, head, lane, block,
            tokens, blocks, scale, tau, sink_start, sink_stop, skip_start, skip_stop,
            q_row, k_row, v_row, out_row,
            D, GROUP, HALVES, DESCRIPTORS, EXACT_VARIANCE, SHIFT, POOLED_STAGES, EXACT_STAGES,
        )  # fmt: skip
        tile = tl.atomic_add(next_tile, 1, sem="relaxed")


@triton.jit
def _tile(
    q, k, v, out, k_mean, v_mean, centre, spread, flags, entries, exact_pairs, sample, head, lane, block,
    tokens, blocks, scale, tau, sink_start, sink_stop, skip_start, skip_stop, q_row, k_row, v_row, out_row,
    D: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr, DESCRIPTORS: tl.constexpr,
    EXACT_VARIANCE: tl.constexpr, SHIFT: tl.constexpr,
    POOLED_STAGES: tl.constexpr, EXACT_STAGES: tl.constexpr,
):  # fmt: skip
    """One query block."""
    column = tl.arange(0, D)
    last = blocks - 1
    row = block * BLOCK
    spread_of_keys = tl.load(spread + column)
    centre_of_keys = tl.load(centre + column[:, None] * PARTS + tl.arange(0, PARTS))
    queries = _rows(q, sample, head, row, tokens, q_row, 0, D, DESCRIPTORS)
    state = _nothing(D, HALVES)

    # Small products do what is said of all rows: the centroid of the queries, which the routing is about, and
    # what the exponents of centred means lack.
    # Rows are divided before they are added, because 64 of the largest numbers have no sum. What they are
    # multiplied by goes by the block: a constant would stay in shared memory all along.
    there = (row + tl.arange(0, BLOCK) < tokens)[:, None]
    share = tl.where(there, tl.full([BLOCK, PARTS], 1 / BLOCK, tl.float32), 0.0).to(queries.dtype)
    live = tl.minimum(tokens - row, BLOCK).to(tl.float32)
    centroid = tl.dot(tl.trans(queries), share) * (BLOCK / live)  # in every column
    probe = in_parts(centroid, 2, queries.dtype)
    offset = tl.sum(tl.dot(queries, centre_of_keys), 1) * scale
    deviations = centroid * spread_of_keys[:, None] * scale
    deviation = tl.sqrt(tl.sum(deviations * deviations) / PARTS + _VARIANCE_FLOOR)
    double = 2 * scale  # of the halved means
    if EXACT_VARIANCE:
        squares = tl.zeros([GROUP], tl.float32)
        for first in tl.range(0, blocks, GROUP, num_stages=POOLED_STAGES):
            keys = _means(k_mean, lane, first, blocks, 0, D, D, GROUP, DESCRIPTORS)
            away = tl.sum(tl.dot(keys, probe), 1) * double
            squares += away * away  # 0 behind the last block
        deviation = tl.sqrt(tl.sum(squares, 0) / blocks + _VARIANCE_FLOOR)
    limit = tau * deviation / double

    # Routing and pooled terms, whose exponents lack `offset` until the loop is over, because the block means
    # are centred. Columns behind the last block have no part in either.
    tail_log2 = tl.log2((tokens - last * BLOCK).to(tl.float32))
    for first in tl.range(0, blocks, GROUP, num_stages=POOLED_STAGES):
        keys = _means(k_mean, lane, first, blocks, 0, D, D, GROUP, DESCRIPTORS)
        values = _means(v_mean, lane, first, blocks, 0, D, D // HALVES, GROUP, DESCRIPTORS)
        rest = values
        if HALVES == 2:
            rest = _means(v_mean, lane, first, blocks, D // 2, D, D // 2, GROUP, DESCRIPTORS)
        j = first + tl.arange(0, GROUP)
        exact = tl.sum(tl.dot(keys, probe), 1) > limit
        exact |= _within(j, block - 1, 3) | _within(j, sink_start, sink_stop - sink_start)
        tl.store(flags + j, exact.to(tl.int8), mask=j <= last)
        weight = tl.where(exact | (j > last), _NEVER, tl.where(j == last, tail_log2, _LOG2_BLOCK))
        pooled = tl.dot(queries, tl.trans(keys)) * double + weight[None, :]
        state = _absorb(state, pooled, 1.0, values, rest, GROUP, HALVES, SHIFT, True)
    state = _moved(state, offset)
    count = _listed(flags, entries, blocks)
    tl.atomic_add(exact_pairs, count.to(tl.int64), sem="relaxed")

    if (row < skip_start) | (tl.minimum(row + BLOCK, tokens) > skip_stop):
        # The last block may be short, so it has no part in the loop.
        whole = count
        if tl.load(entries + count - 1) == last:  # there is one, next to the diagonal
            whole -= 1
        j = tl.load(entries)
        for n in tl.range(0, whole, num_stages=EXACT_STAGES):
            first = j * BLOCK
            j = tl.load(entries + n + 1)  # carried along, so that its block can be fetched ahead
            state = _attended(
                state, queries, k, v, sample, head, first, tokens, scale, k_row, v_row,
                D, HALVES, DESCRIPTORS, SHIFT, False,
            )  # fmt: skip
        if whole < count:
            state = _attended(
                state, queries, k, v, sample, head, last * BLOCK, tokens, scale, k_row, v_row,
                D, HALVES, DESCRIPTORS, SHIFT, True,
            )  # fmt: skip
        _store(out, state, row, 0, tokens, out_row, D, HALVES)


@triton.jit(do_not_specialize=PLAIN)
def attend_exactly(
    q, k, v, out, tokens, heads, scale, start, stop,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head,
    D: tl.constexpr, HALVES: tl.constexpr, DESCRIPTORS: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Dense attention of the rows [start, stop) to all keys. Grid (lanes * blocks of these rows,)."""
    blocks = tl.cdiv(stop - start, BLOCK)
    lane = tl.program_id(0) // blocks
    sample, head = lane // heads, lane % heads
    q = _lane(q, sample, head, q_batch, q_head, DESCRIPTORS)
    k = _lane(k, sample, head, k_batch, k_head, DESCRIPTORS)
    v = _lane(v, sample, head, v_batch, v_head, DESCRIPTORS)
    row = start + tl.program_id(0) % blocks * BLOCK
    queries = _rows(q, sample, head, row, tokens, q_row, 0, D, DESCRIPTORS)
    state = _nothing(D, HALVES)
    last = (tokens - 1) // BLOCK
    for j in tl.range(0, last, num_stages=STAGES):
        state = _attended(
            state, queries, k, v, sample, head, j * BLOCK, tokens, scale, k_row, v_row,
            D, HALVES, DESCRIPTORS, SHIFT, False,
        )  # fmt: skip
    state = _attended(
        state, queries, k, v, sample, head, last * BLOCK, tokens, scale, k_row, v_row,
        D, HALVES, DESCRIPTORS, SHIFT, True,
    )  # fmt: skip
    _store(_lane(out, sample, head, out_batch, out_head, False), state, row, start, stop, out_row, D, HALVES)


# --- parts ---------------------------------------------------------------------------------------


@triton.jit
def _attended(
    state, queries, k, v, sample, head, first, tokens, scale, k_row, v_row,
    D: tl.constexpr, HALVES: tl.constexpr, DESCRIPTORS: tl.constexpr, SHIFT: tl.constexpr,
    MAY_BE_SHORT: tl.constexpr,
):  # fmt: skip
    """The state after the keys of the block that begins at row `first`."""
    if MAY_BE_SHORT or DESCRIPTORS:
        keys = _rows(k, sample, head, first, tokens, k_row, 0, D, DESCRIPTORS)
        values = _rows(v, sample, head, first, tokens, v_row, 0, D // HALVES, DESCRIPTORS)
        rest = values
        if HALVES == 2:
            rest = _rows(v, sample, head, first, tokens, v_row, D // 2, D // 2, DESCRIPTORS)
    else:
        keys = _whole_rows(k, first, k_row, D)
        values = _whole_rows(v, first, v_row, D // HALVES)
        rest = values
        if HALVES == 2:
            rest = _whole_rows(v + D // 2, first, v_row, D // 2)
    scores = tl.dot(queries, tl.trans(keys))
    if MAY_BE_SHORT:
        scores = tl.where((first + tl.arange(0, BLOCK) < tokens)[None, :], scores, _NEVER)
    return _absorb(state, scores, scale, values, rest, BLOCK, HALVES, SHIFT, False)


@triton.jit
def _listed(flags, entries, blocks):
    """Writes the blocks with a flag to `entries`, in order; their number."""
    count = 0
    tl.debug_barrier()  # every thread sees the flags, and has read the entries of the query block before
    for first in range(0, blocks, _FLAGS_AT_A_TIME):
        j = first + tl.arange(0, _FLAGS_AT_A_TIME)
        flag = tl.load(flags + j, mask=j < blocks, other=0).to(tl.int32)
        tl.store(entries + count + tl.cumsum(flag, 0) - flag, j, mask=flag > 0)
        count += tl.sum(flag, 0)
    tl.debug_barrier()  # every thread sees the entries
    return count


@triton.jit
def _nothing(D: tl.constexpr, HALVES: tl.constexpr):
    """State of an online softmax of 64 rows: numerator in one or two parts, highest exponent, denominator."""
    acc = tl.zeros([BLOCK, D // HALVES], tl.float32)
    more = acc if HALVES == 2 else tl.zeros([BLOCK, 16], tl.float32)  # in one part nothing uses it
    return acc, more, tl.full([BLOCK], _NEVER, tl.float32), tl.zeros([BLOCK, _APART], tl.float32)


@triton.jit
def _absorb(
    state, scores, scale, values, rest, KEYS: tl.constexpr,
    HALVES: tl.constexpr, SHIFT: tl.constexpr, MAY_BE_EMPTY: tl.constexpr,
):  # fmt: skip
    """Adds keys with exponents scores * scale (base 2) to an online softmax.

    SHIFT keeps 2^SHIFT of room above the largest weight, for sums of values near the largest number. The
    exponents may be as far as 2^31 from 0; beyond, their own rounding error is more than exp2 takes.
    MAY_BE_EMPTY: a row can have no key at all so far.
    """
    acc, more, top, total = state
    highest = tl.maximum(top, tl.max(scores, 1) * scale)
    base = highest + SHIFT
    shrink = tl.exp2(top - highest)
    if MAY_BE_EMPTY:
        base = tl.where(highest == _NEVER, 0.0, base)
        shrink = tl.where(highest == _NEVER, 0.0, shrink)
    weights = tl.exp2(scores * scale - base[:, None])
    total = total * shrink[:, None] + tl.sum(tl.reshape(weights, [BLOCK, KEYS // _APART, _APART]), 1)
    weights = weights.to(values.dtype)
    acc = tl.dot(weights, values, acc * shrink[:, None])
    if HALVES == 2:
        more = tl.dot(weights, rest, more * shrink[:, None])
    return acc, more, highest, total


@triton.jit
def _moved(state, offset):
    """The same with exponents that are higher by `offset`."""
    acc, more, top, total = state
    return acc, more, top + offset, total


@triton.jit
def _within(j, start, length):
    """Whether each j is one of `length` numbers from `start` on: one comparison, as what is below wraps."""
    return (j - start).to(tl.uint32, bitcast=True) < tl.cast(length, tl.uint32, bitcast=True)


# --- loads and stores ----------------------------------------------------------------------------


@triton.jit
def _lane(tensor, sample, head, batch_stride, head_stride, DESCRIPTORS: tl.constexpr):
    """A pointer to one lane; a descriptor stays as it is."""
    if not DESCRIPTORS:
        tensor += sample.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    return tensor


@triton.jit
def _rows(
    tensor, sample, head, first, tokens, row_stride, column, W: tl.constexpr, DESCRIPTORS: tl.constexpr
):
    """[64, W] of one lane, from row `first` and a column on, 0 behind the last row."""
    if DESCRIPTORS:
        return tensor.load([sample, first, head, column]).reshape([BLOCK, W])
    else:  # one of the two is compiled
        return masked_rows(tensor + column, first, tokens, row_stride, W)


@triton.jit
def _whole_rows(tensor, first, row_stride, W: tl.constexpr):
    """The same of 64 rows that are all there."""
    tensor += tl.cast(first, tl.int64) * row_stride
    return tl.load(tensor + tl.arange(0, BLOCK)[:, None] * row_stride + tl.arange(0, W))


@triton.jit
def _means(
    means, lane, first, blocks, column, D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """[GROUP, W] of one lane's block means, from block `first` and a column on, 0 behind the last one."""
    if DESCRIPTORS:
        return means.load([lane, first, column]).reshape([GROUP, W])
    else:
        return group(means + lane.to(tl.int64) * blocks * D + column, first, blocks, D, W, GROUP)


@triton.jit
def _store(out, state, first, start, stop, row_stride, D: tl.constexpr, HALVES: tl.constexpr):
    """Writes those of 64 rows from `first` on that lie in [start, stop)."""
    acc, more, _, parts = state
    share = 1.0 / tl.sum(parts, 1)
    row = first + tl.arange(0, BLOCK)
    there = ((row >= start) & (row < stop))[:, None]
    out += row.to(tl.int64)[:, None] * row_stride + tl.arange(0, D // HALVES)
    tl.store(out, (acc * share[:, None]).to(out.dtype.element_ty), mask=there)
    if HALVES == 2:
        tl.store(out + D // 2, (more * share[:, None]).to(out.dtype.element_ty), mask=there)
