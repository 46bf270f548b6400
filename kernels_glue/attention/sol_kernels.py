"""The Triton kernels of the provider `builtin`: Sol attention as the paper has it (arXiv 2607.24027).

Imported when the provider is first used, because Triton is optional. The formulas are in reference.py, the
launches in sol_triton.py. q, k, v and out are addressed by their strides of [B, T, H, D], with a contiguous
last dimension; everything else is contiguous. A lane is one head of one sample.

sol_means.py prepares the means of the blocks. `attend` does the rest in one pass over the keys: it scores the
means, which gives both the routing and the pooled terms, notes which blocks are exact, and reads these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sol_means import BLOCK, PLAIN, group, masked_rows

_LOG2_BLOCK = tl.constexpr(6.0)
_VARIANCE_FLOOR = tl.constexpr(1e-6)
_NEVER = tl.constexpr(float("-inf"))
# Three counts below 256 share one integer, so that one prefix sum serves three lists; two flags stand above.
_FIELD = tl.constexpr(8)
_MASK = tl.constexpr(255)


@triton.jit(do_not_specialize=PLAIN)
def attend(
    q, k, v, out, k_high, k_low, v_mean, centre, spread, lists, next_tile, exact_pairs,
    tokens, blocks, heads, tiles, scale, tau, sink_start, sink_stop, skip_start, skip_stop,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head,
    D: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr,
    EXACT_VARIANCE: tl.constexpr, SHIFT: tl.constexpr,
    POOLED_STAGES: tl.constexpr, EXACT_STAGES: tl.constexpr,
):  # fmt: skip
    """Sol attention; each program takes tiles of PAIR query blocks until none is left.

    Neighbouring query blocks route to much the same keys. What both blocks of a pair want is read once,
    because a kernel that has 64 rows for each key it reads is bound by the L2 cache.

    Grid: any, best what the device holds; programs tell each other nothing but which tile is next. lists:
    [programs, 3, blocks] int32, scratch. next_tile (int32)
    and exact_pairs (int64) begin at 0. scale: with log2(e) in it. Tiles inside of the rows [skip_start,
    skip_stop) are left out, though their pairs are counted. HALVES: into how many parts of D the products
    with the values are cut; in 2 Triton shares rows and not columns among the warps of an older GPU.
    """
    lists += tl.program_id(0).to(tl.int64) * 3 * blocks
    pairs = tl.cdiv(blocks, PAIR)
    tile = tl.atomic_add(next_tile, 1, sem="relaxed")
    while tile < tiles:
        lane = (tile // pairs).to(tl.int64)
        sample, head = lane // heads, lane % heads
        means = lane * blocks * D
        _tile(
            q + sample * q_batch + head * q_head,
            k + sample * k_batch + head * k_head,
            v + sample * v_batch + head * v_head,
            out + sample * out_batch + head * out_head,
            k_high + means, k_low + means, v_mean + means, centre + lane * D, spread + lane * D,
            lists, exact_pairs, tile % pairs * PAIR,
            tokens, blocks, scale, tau, sink_start, sink_stop, skip_start, skip_stop,
            q_row, k_row, v_row, out_row,
            D, PAIR, GROUP, HALVES, EXACT_VARIANCE, SHIFT, POOLED_STAGES, EXACT_STAGES,
        )  # fmt: skip
        tile = tl.atomic_add(next_tile, 1, sem="relaxed")


@triton.jit
def _tile(
    q, k, v, out, k_high, k_low, v_mean, centre, spread, lists, exact_pairs, block,
    tokens, blocks, scale, tau, sink_start, sink_stop, skip_start, skip_stop, q_row, k_row, v_row, out_row,
    D: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr,
    EXACT_VARIANCE: tl.constexpr, SHIFT: tl.constexpr,
    POOLED_STAGES: tl.constexpr, EXACT_STAGES: tl.constexpr,
):  # fmt: skip
    """One tile: query blocks `block` and, in a pair, `block` + 1, the latter possibly behind the last row."""
    tl.static_assert(GROUP <= _MASK)
    column, lanes = tl.arange(0, D), tl.arange(0, GROUP)
    double = 2 * scale  # of the halved means
    last = blocks - 1
    tail = tokens - last * BLOCK
    tail_log2 = tl.log2(tail.to(tl.float32))
    row = block * BLOCK

    centre_row, spread_row = tl.load(centre + column), tl.load(spread + column)
    q0 = masked_rows(q, row, tokens, q_row, D)
    probe0, offset0, deviation0 = _probe(q0, tokens - row, centre_row, spread_row, scale)
    state0 = _nothing(D, HALVES)
    if PAIR == 2:
        q1 = masked_rows(q, row + BLOCK, tokens, q_row, D)
        probe1, offset1, deviation1 = _probe(q1, tokens - row - BLOCK, centre_row, spread_row, scale)
        state1 = _nothing(D, HALVES)
    if EXACT_VARIANCE:
        square0, square1 = tl.zeros([GROUP], tl.float32), tl.zeros([GROUP], tl.float32)
        for first in tl.range(0, blocks, GROUP, num_stages=POOLED_STAGES):
            high = group(k_high, first, blocks, D, D, GROUP)
            low = group(k_low, first, blocks, D, D, GROUP)
            away = _block_scores(probe0, high, low) * double
            square0 += away * away  # 0 behind the last block
            if PAIR == 2:
                away = _block_scores(probe1, high, low) * double
                square1 += away * away
        deviation0 = tl.sqrt(tl.sum(square0, 0) / blocks + _VARIANCE_FLOOR)
        if PAIR == 2:
            deviation1 = tl.sqrt(tl.sum(square1, 0) / blocks + _VARIANCE_FLOOR)

    # Routing and pooled terms, whose exponents lack `offset` until the loop is over, because the block means
    # are centred. The last block may be short, so it comes at the end and not in the lists.
    in_both, in_first, in_second, last0, last1 = 0, 0, 0, 0, 0
    tl.debug_barrier()  # every thread has read the lists of the tile before
    for first in tl.range(0, blocks, GROUP, num_stages=POOLED_STAGES):
        high = group(k_high, first, blocks, D, D, GROUP)
        low = group(k_low, first, blocks, D, D, GROUP)
        values = group(v_mean, first, blocks, D, D // HALVES, GROUP)
        rest = group(v_mean + D // 2, first, blocks, D, D // HALVES, GROUP) if HALVES == 2 else values
        j = first + lanes
        there = j < blocks
        sink = (j >= sink_start) & (j < sink_stop)
        weight = tl.where(there, tl.where(j == last, tail_log2, _LOG2_BLOCK), _NEVER)

        forced = sink | ((j >= block - 1) & (j <= block + 1))
        limit = tl.where(forced, _NEVER, tau * deviation0)
        exact0 = _block_scores(probe0, high, low) * double > limit
        pooled = tl.dot(q0, tl.trans(high)) * double + tl.where(exact0, _NEVER, weight)[None, :]
        state0 = _absorb(state0, pooled, 1.0, values, rest, HALVES, SHIFT, True)
        listed0, listed1 = (exact0 & (j < last)).to(tl.int32), tl.zeros([GROUP], tl.int32)
        at_last = (exact0 & (j == last)).to(tl.int32)
        if PAIR == 2:
            forced = sink | ((j >= block) & (j <= block + 2))
            limit = tl.where(block == last, float("inf"), tl.where(forced, _NEVER, tau * deviation1))
            exact1 = _block_scores(probe1, high, low) * double > limit
            pooled = tl.dot(q1, tl.trans(high)) * double + tl.where(exact1, _NEVER, weight)[None, :]
            state1 = _absorb(state1, pooled, 1.0, values, rest, HALVES, SHIFT, True)
            listed1 = (exact1 & (j < last)).to(tl.int32)
            at_last += (exact1 & (j == last)).to(tl.int32) << 1

        both = listed0 & listed1
        fields = both + ((listed0 - both) << _FIELD) + ((listed1 - both) << (2 * _FIELD))
        fields += at_last << (3 * _FIELD)
        before = tl.cumsum(fields, 0) - fields
        found = tl.sum(fields, 0)
        _note(lists + in_both, j, fields, before)
        _note(lists + blocks + in_first, j, fields >> _FIELD, before >> _FIELD)
        _note(lists + 2 * blocks + in_second, j, fields >> 2 * _FIELD, before >> 2 * _FIELD)
        in_both += found & _MASK
        in_first += found >> _FIELD & _MASK
        in_second += found >> 2 * _FIELD & _MASK
        last0 += found >> 3 * _FIELD & 1
        last1 += found >> 3 * _FIELD + 1 & 1
    state0 = _moved(state0, offset0)
    if PAIR == 2:
        state1 = _moved(state1, offset1)
    pairs = 2 * in_both + in_first + in_second + last0 + last1
    tl.atomic_add(exact_pairs, pairs.to(tl.int64), sem="relaxed")
    tl.debug_barrier()  # every thread sees the lists

    stop = tl.minimum(row + PAIR * BLOCK, tokens)
    if (row < skip_start) | (stop > skip_stop):
        if PAIR == 2:
            j = _entry(lists, 0, in_both)
            for n in tl.range(0, in_both, num_stages=EXACT_STAGES):
                keys, values, rest = _block(k, v, j, k_row, v_row, D, HALVES)
                j = _entry(lists, n + 1, in_both)
                scores = tl.dot(q0, tl.trans(keys))
                state0 = _absorb(state0, scores, scale, values, rest, HALVES, SHIFT, False)
                scores = tl.dot(q1, tl.trans(keys))
                state1 = _absorb(state1, scores, scale, values, rest, HALVES, SHIFT, False)
            j = _entry(lists + 2 * blocks, 0, in_second)
            for n in tl.range(0, in_second, num_stages=EXACT_STAGES):
                keys, values, rest = _block(k, v, j, k_row, v_row, D, HALVES)
                j = _entry(lists + 2 * blocks, n + 1, in_second)
                scores = tl.dot(q1, tl.trans(keys))
                state1 = _absorb(state1, scores, scale, values, rest, HALVES, SHIFT, False)
        j = _entry(lists + blocks, 0, in_first)
        for n in tl.range(0, in_first, num_stages=EXACT_STAGES):
            keys, values, rest = _block(k, v, j, k_row, v_row, D, HALVES)
            j = _entry(lists + blocks, n + 1, in_first)
            scores = tl.dot(q0, tl.trans(keys))
            state0 = _absorb(state0, scores, scale, values, rest, HALVES, SHIFT, False)
        if last0 + last1 > 0:
            keys, values, rest = _last_block(k, v, last, tokens, k_row, v_row, D, HALVES)
            there = (tl.arange(0, BLOCK) < tail)[None, :]
            if last0 > 0:
                scores = tl.where(there, tl.dot(q0, tl.trans(keys)), _NEVER)
                state0 = _absorb(state0, scores, scale, values, rest, HALVES, SHIFT, False)
            if PAIR == 2:  # noqa: SIM102, this one is decided when the kernel is compiled
                if last1 > 0:
                    scores = tl.where(there, tl.dot(q1, tl.trans(keys)), _NEVER)
                    state1 = _absorb(state1, scores, scale, values, rest, HALVES, SHIFT, False)
        _store(out, state0, row, 0, tokens, out_row, D, HALVES)
        if PAIR == 2:
            _store(out, state1, row + BLOCK, 0, tokens, out_row, D, HALVES)


@triton.jit(do_not_specialize=PLAIN)
def attend_exactly(
    q, k, v, out, tokens, heads, scale, start, stop,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head,
    D: tl.constexpr, HALVES: tl.constexpr, SHIFT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Dense attention of the rows [start, stop) to all keys. Grid (lanes * blocks of these rows,)."""
    blocks = tl.cdiv(stop - start, BLOCK)
    lane = (tl.program_id(0) // blocks).to(tl.int64)
    sample, head = lane // heads, lane % heads
    k += sample * k_batch + head * k_head
    v += sample * v_batch + head * v_head
    row = start + tl.program_id(0) % blocks * BLOCK
    q0 = masked_rows(q + sample * q_batch + head * q_head, row, tokens, q_row, D)
    state = _nothing(D, HALVES)
    last = (tokens - 1) // BLOCK
    for j in tl.range(0, last, num_stages=STAGES):
        keys, values, rest = _block(k, v, j, k_row, v_row, D, HALVES)
        scores = tl.dot(q0, tl.trans(keys))
        state = _absorb(state, scores, scale, values, rest, HALVES, SHIFT, False)
    keys, values, rest = _last_block(k, v, last, tokens, k_row, v_row, D, HALVES)
    there = (last * BLOCK + tl.arange(0, BLOCK) < tokens)[None, :]
    scores = tl.where(there, tl.dot(q0, tl.trans(keys)), _NEVER)
    state = _absorb(state, scores, scale, values, rest, HALVES, SHIFT, False)
    out += sample * out_batch + head * out_head
    _store(out, state, row, start, stop, out_row, D, HALVES)


# --- parts ---------------------------------------------------------------------------------------


@triton.jit
def _nothing(D: tl.constexpr, HALVES: tl.constexpr):
    """State of an online softmax of 64 rows: numerator in one or two parts, highest exponent, denominator."""
    acc = tl.zeros([BLOCK, D // HALVES], tl.float32)
    more = acc if HALVES == 2 else tl.zeros([BLOCK, 16], tl.float32)  # in one part nothing uses it
    return acc, more, tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)


@triton.jit
def _absorb(
    state, scores, scale, values, rest,
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
        base = tl.where(highest == float("-inf"), 0.0, base)
        shrink = tl.where(highest == float("-inf"), 0.0, shrink)
    weights = tl.exp2(scores * scale - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
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
def _probe(q, live, centre, spread, scale):
    """What the routing of a query block of `live` rows needs, and its exponents for the mean key, [64].

    The probe [16, D] has the block's centroid as the sum of its first two rows, high and low; 16 is the
    fewest rows that tl.dot takes. The deviation is that of `diag`.
    """
    rows = q.to(tl.float32)
    centroid = tl.sum(rows, 0) / tl.maximum(tl.minimum(live, BLOCK), 1)
    high = centroid.to(q.dtype)
    low = (centroid - high.to(tl.float32)).to(q.dtype)
    row = tl.arange(0, 16)[:, None]
    probe = tl.where(row == 0, high[None, :], tl.where(row == 1, low[None, :], 0.0).to(q.dtype))
    deviation = centroid * spread * scale
    offset = tl.sum(rows * centre[None, :], 1) * scale
    return probe, offset, tl.sqrt(tl.sum(deviation * deviation, 0) + _VARIANCE_FLOOR)


@triton.jit
def _block_scores(probe, high, low):
    """[GROUP]: a probe's centroid times the centred and halved means, nearly to the precision of fp32."""
    return tl.sum(tl.dot(probe, tl.trans(low), tl.dot(probe, tl.trans(high))), 0)


@triton.jit
def _note(entries, j, fields, before):
    """Appends to a list those j whose lowest field is 1, as far behind as the lowest field of `before`."""
    tl.store(entries + (before & _MASK), j, mask=(fields & _MASK) > 0)


@triton.jit
def _entry(entries, n, count):
    """Entry `n` of a list. A loop carries the next one along, so that its blocks can be fetched ahead."""
    return tl.load(entries + n, mask=n < count, other=0)


@triton.jit
def _block(k, v, j, k_row, v_row, D: tl.constexpr, HALVES: tl.constexpr):
    """Keys [64, D] of a whole block, and its values in one or two parts."""
    inner = tl.arange(0, BLOCK)[:, None]
    k += tl.cast(j, tl.int64) * BLOCK * k_row
    v += tl.cast(j, tl.int64) * BLOCK * v_row + inner * v_row + tl.arange(0, D // HALVES)
    values = tl.load(v)
    rest = tl.load(v + D // 2) if HALVES == 2 else values
    return tl.load(k + inner * k_row + tl.arange(0, D)), values, rest


@triton.jit
def _last_block(k, v, last, tokens, k_row, v_row, D: tl.constexpr, HALVES: tl.constexpr):
    """The same for the last block, with zeros behind the last row."""
    keys = masked_rows(k, last * BLOCK, tokens, k_row, D)
    values = masked_rows(v, last * BLOCK, tokens, v_row, D // HALVES)
    rest = masked_rows(v + D // 2, last * BLOCK, tokens, v_row, D // HALVES) if HALVES == 2 else values
    return keys, values, rest


@triton.jit
def _store(out, state, first, start, stop, row_stride, D: tl.constexpr, HALVES: tl.constexpr):
    """Writes those of 64 rows from `first` on that lie in [start, stop)."""
    acc, more, _, total = state
    row = first + tl.arange(0, BLOCK)
    there = ((row >= start) & (row < stop))[:, None]
    out += row.to(tl.int64)[:, None] * row_stride + tl.arange(0, D // HALVES)
    tl.store(out, (acc / total[:, None]).to(out.dtype.element_ty), mask=there)
    if HALVES == 2:
        tl.store(out + D // 2, (more / total[:, None]).to(out.dtype.element_ty), mask=there)
