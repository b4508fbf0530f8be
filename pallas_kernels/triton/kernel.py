"""One row of logits in one Triton program: top_k by radix selection, top_p by radix bisection of the mass, the draw.

Byte plan for a row of V float32: one pass for the maximum, from HBM, and then from L2 (64 rows of 128256 are 33 MB)
- top_k: 4 passes, a histogram of 256 bins each, and one for ties,
- top_p: 8 passes, the mass below 16 keys each, and three for ties: a histogram has no weights,
- the draw: one pass for the sums of tiles, one tile.
A filter that the row does not ask for is not run. Everything is as in `pallas_kernels.filters._bisect`.
"""

# Triton compiles the source of these functions; of annotations it knows `tl.constexpr` only.

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def sort_key(x):
    """float32 -> uint32 in the same order, both zeros alike."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)


@triton.jit
def value_of(key):
    bits = tl.where((key >> 31) == 1, key & 0x7FFFFFFF, ~key)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def entries(row, start, vocab, BLOCK: tl.constexpr):
    """Values, -inf beyond the row, and ids."""
    ids = start + tl.arange(0, BLOCK)
    return tl.load(row + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32), ids


@triton.jit
def scaled(x, top, temperature):
    return tl.where(x == top, 0.0, (x - top) / temperature)


@triton.jit
def left(x, ids, top, temperature, floor, at, last):
    """Whether entries pass min_p and do not lie behind key `at`, id `last`; and their weights, 0 for those that do."""
    z, key = scaled(x, top, temperature), sort_key(x)
    kept = (z >= floor) & (z > float("-inf")) & ((key > at) | ((key == at) & (ids <= last)))
    return kept, tl.where(kept, tl.exp(z), 0.0)


@triton.jit
def maximum(row, vocab, BLOCK: tl.constexpr):
    """The largest value, NaN if there is one."""
    top, bad = float("-inf"), 0
    for start in range(0, vocab, BLOCK):
        x, _ids = entries(row, start, vocab, BLOCK)
        top = tl.maximum(top, tl.max(tl.where(x == x, x, float("-inf")), 0))
        bad += tl.sum((x != x).to(tl.int32), 0)
    return tl.where(bad > 0, float("nan"), top)


@triton.jit
def argmax(row, vocab, top, BLOCK: tl.constexpr):
    """The lowest id of the largest value."""
    first = vocab - 1
    for start in range(0, vocab, BLOCK):
        x, ids = entries(row, start, vocab, BLOCK)
        first = tl.minimum(first, tl.min(tl.where(x == top, ids, vocab - 1), 0))
    return first


@triton.jit
def nth_largest(row, vocab, top, temperature, floor, number, BLOCK: tl.constexpr):
    """The key of the number-th largest entry that min_p leaves, and how many equal to it belong to these."""
    prefix = tl.full((), 0, tl.uint32)
    everything = tl.full((), 0, tl.uint32)
    for digit in tl.static_range(3, -1, -1):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, vocab, BLOCK):
            x, ids = entries(row, start, vocab, BLOCK)
            kept, _weight = left(x, ids, top, temperature, floor, everything, vocab)
            key = sort_key(x)
            here = kept & (((key >> (8 * digit)) >> 8) == prefix)
            counts += tl.histogram(((key >> (8 * digit)) & 255).to(tl.int32), 256, mask=here)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        found = tl.sum((above >= number).to(tl.int32), 0)
        number -= tl.sum(tl.where(tl.arange(0, 256) == found, above, 0), 0)
        prefix = (prefix << 8) | found.to(tl.uint32)
    return prefix, number


@triton.jit
def nth_tie(row, vocab, top, temperature, floor, at, last, number, BLOCK: tl.constexpr):
    """The id of the number-th of the entries that are left and have key `at`."""
    seen, found = 0, -1
    for start in range(0, vocab, BLOCK):
        x, ids = entries(row, start, vocab, BLOCK)
        kept, _weight = left(x, ids, top, temperature, floor, at, last)
        tie = (kept & (sort_key(x) == at)).to(tl.int32)
        place = seen + tl.cumsum(tie, 0)
        found = tl.maximum(found, tl.max(tl.where((tie == 1) & (place == number), ids, -1), 0))
        seen += tl.sum(tie, 0)
    return found


@triton.jit
def mass(row, vocab, top, temperature, floor, at, last, BLOCK: tl.constexpr):
    total = 0.0
    for start in range(0, vocab, BLOCK):
        x, ids = entries(row, start, vocab, BLOCK)
        _kept, weight = left(x, ids, top, temperature, floor, at, last)
        total += tl.sum(weight, 0)
    return total


@triton.jit
def end_of_nucleus(row, vocab, top, temperature, floor, at, last, top_p, BLOCK: tl.constexpr):
    """Key and id of the last token of the nucleus of what is left: the largest key below which the mass is within
    1 - top_p, and of the entries equal to it those that are not dropped with it."""
    rest = (1 - top_p) * mass(row, vocab, top, temperature, floor, at, last, BLOCK)
    key_of_last = tl.full((), 0, tl.uint32)
    for digit in tl.static_range(7, -1, -1):
        bounds = key_of_last | (tl.arange(0, 16).to(tl.uint32) << (4 * digit))
        below = tl.zeros((16,), tl.float32)
        for start in range(0, vocab, BLOCK):
            x, ids = entries(row, start, vocab, BLOCK)
            _kept, weight = left(x, ids, top, temperature, floor, at, last)
            below += tl.sum(tl.where(sort_key(x)[:, None] < bounds[None, :], weight[:, None], 0.0), 0)
        fits = tl.sum((below <= rest).to(tl.int32), 0) - 1
        key_of_last = key_of_last | (fits.to(tl.uint32) << (4 * digit))
    key_of_last = tl.minimum(key_of_last, sort_key(top))  # 1 - top_p may round to 1
    below, ties, each = 0.0, 0, 0.0
    for start in range(0, vocab, BLOCK):
        x, ids = entries(row, start, vocab, BLOCK)
        kept, weight = left(x, ids, top, temperature, floor, at, last)
        key = sort_key(x)
        below += tl.sum(tl.where(key < key_of_last, weight, 0.0), 0)
        tie = kept & (key == key_of_last)
        ties += tl.sum(tie.to(tl.int32), 0)
        each = tl.maximum(each, tl.max(tl.where(tie, weight, 0.0), 0))
    dropped = tl.maximum((rest - below) / tl.where(each > 0, each, 1.0), 0.0).to(tl.int32)
    keep = tl.maximum(ties - dropped, 1)
    end = tl.where(key_of_last == at, last, vocab)
    return key_of_last, nth_tie(row, vocab, top, temperature, floor, key_of_last, end, keep, BLOCK)


@triton.jit
def pick(weights, words, N: tl.constexpr):
    """As `pallas_kernels.draw.pick`, of weights [N]: exact sums of 44 bits. words: a pointer to four."""
    total = tl.sum(weights, 0) * (1 + 1 / 1048576)
    shares = weights / tl.where(total > 0, total, 1.0) * 4194304.0  # 2**22
    high = shares.to(tl.int32)
    low = ((shares - high.to(tl.float32)) * 4194304.0).to(tl.int32)
    sums = tl.cumsum((high.to(tl.int64) << 22) + low.to(tl.int64), 0)
    first = ((tl.load(words).to(tl.int64) >> 10) << 22) + (tl.load(words + 1).to(tl.int64) >> 10)
    second = ((tl.load(words + 2).to(tl.int64) >> 10) << 22) + (tl.load(words + 3).to(tl.int64) >> 10)
    target = tl.where(first < tl.max(sums, 0), first, second)
    index = tl.sum((sums <= target).to(tl.int32), 0)
    return tl.minimum(index, tl.max(tl.where(weights > 0, tl.arange(0, N), 0), 0))


@triton.jit
def draw(row, vocab, top, temperature, floor, at, last, words, sums, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """A token of what is left. sums: [TILES] float32, scratch of this row."""
    for start in range(0, vocab, BLOCK):
        x, ids = entries(row, start, vocab, BLOCK)
        _kept, weight = left(x, ids, top, temperature, floor, at, last)
        tiles = start // 256 + tl.arange(0, BLOCK // 256)
        tl.store(sums + tiles, tl.sum(tl.reshape(weight, (BLOCK // 256, 256)), 1), mask=tiles < TILES)
    tl.debug_barrier()  # other threads wrote some of them
    places = tl.arange(0, TILES)
    tile = pick(tl.load(sums + places, mask=places * 256 < vocab, other=0.0), words, TILES)
    x, ids = entries(row, tile * 256, vocab, 256)
    _kept, weight = left(x, ids, top, temperature, floor, at, last)
    return tile * 256 + pick(weight, words + 4, 256)


@triton.jit
def sample_kernel(logits, floats, ints, words, vocab, token, largest, sums, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """logits [R, V]; floats [R, 3]: temperature (0 = greedy), log(min_p), top_p; ints [R]: top_k, 0 = off; words [R, 8]
    uint32. Out: token [R] int32, largest [R] float32, scratch [R, TILES] float32; TILES of `kernel_constants`."""
    at_row = tl.program_id(0)
    row, words = logits + at_row.to(tl.int64) * vocab, words + at_row * 8
    temperature, floor, top_p = (
        tl.load(floats + at_row * 3),
        tl.load(floats + at_row * 3 + 1),
        tl.load(floats + at_row * 3 + 2),
    )
    top_k = tl.load(ints + at_row)
    top = maximum(row, vocab, BLOCK)
    tl.store(largest + at_row, top)
    if (temperature > 0) & (top > float("-inf")):
        at, last = tl.full((), 0, tl.uint32), vocab
        if top_k > 0:
            survivors = 0
            for start in range(0, vocab, BLOCK):
                x, ids = entries(row, start, vocab, BLOCK)
                kept, _weight = left(x, ids, top, temperature, floor, at, last)
                survivors += tl.sum(kept.to(tl.int32), 0)
            at, ties = nth_largest(row, vocab, top, temperature, floor, tl.minimum(top_k, survivors), BLOCK)
            last = nth_tie(row, vocab, top, temperature, floor, at, vocab, ties, BLOCK)
        if top_p < 1:
            at, last = end_of_nucleus(row, vocab, top, temperature, floor, at, last, top_p, BLOCK)
        drawn = draw(row, vocab, top, temperature, floor, at, last, words, sums + at_row * TILES, TILES, BLOCK)
        tl.store(token + at_row, drawn)
    else:
        tl.store(token + at_row, argmax(row, vocab, top, BLOCK))
