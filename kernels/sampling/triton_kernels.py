"""Tokens drawn in Triton: all rows of a step at once, in at most five launches, without a sort or a sum of floats.

    change      logits of the rows that have changes, into a copy of their own       only if there are any
    scan        the greatest logit of each part of a row, and of each bin
    weigh       random rows: the race where nothing is cut, or what a part weighs and a list of tokens that may be kept
    choose      one program per row: the parts' winners compared, or the border of a cut found and the race run
    describe    log-probabilities, ranks and the most probable tokens                only if a row asks

A job is a row to be read: one that is drawn from, or one whose log-probabilities are asked for. A part is what one
program has of a row; a bin is some tokens side by side, of which the greatest logit is known after the scan. The n-th
greatest of these is a floor that at least n tokens reach, so few others are looked at (as in `cpu_sampling.cpp`).

    row     | bin | bin | bin | bin | bin | bin | bin | bin |           a block is what a program looks at in one go
            |<------- part 0 ------>|<------- part 1 ------>|

Whatever is summed or ordered is a whole number: weights as multiples of 2^-SHIFT, logits as the int32 of the same
order, a token and its value as one int64 whose order is that of a stable descending sort. So a result depends neither
on parts nor on the order in which programs run, and is the same each time.

Suffixes in comments: J jobs    P parts    B bins    C changed rows    R rows    V vocabulary    A rows that ask
"""

import triton
import triton.language as tl

# Columns of the table of jobs, as `packed.py` writes it.
JOB_WORDS = tl.constexpr(12)
PLACE, KIND, TEMPERATURE, COUNT, TOP_P, MIN_P, FIRST_KEY, SECOND_KEY, LIST = (tl.constexpr(n) for n in range(9))
GREEDY, RACE, CUT, ABOUT = (tl.constexpr(n) for n in range(4))  # kinds of jobs

# Columns of the table of changed rows, and kinds of edits.
CHANGE_WORDS = tl.constexpr(8)
ROW, MASK, FIRST_WAVE, LAST_WAVE, REPETITION = (tl.constexpr(n) for n in range(5))
PENALTY, PUT, ADD = (tl.constexpr(n) for n in range(3))

NONE = tl.constexpr(float("-inf"))
HIGHEST_LOGIT = tl.constexpr(1e30)  # as in protocol.py
NAN_KEY = tl.constexpr(2**31 - 1)
NO_KEY = tl.constexpr(-(2**31))  # below that of minus infinity
NO_TOKEN = tl.constexpr(2**31 - 1)
NO_CANDIDATE = tl.constexpr(-(2**63))
FURTHEST = tl.constexpr(-69.0)
"""What lies further below the greatest logit has a weight of 0."""
MOST_BINS = tl.constexpr(1024)
MOST_PARTS = tl.constexpr(64)
EDITS = tl.constexpr(256)
"""At once, by one program."""


# -- numbers -----------------------------------------------------------------------------------------------------------


@triton.jit
def _setting(job, column):
    return tl.load(job + column).to(tl.float32, bitcast=True)


@triton.jit
def _logits_as_they_are(logits_ptr, row, row_stride, token_stride, token, live):
    at = logits_ptr + row.to(tl.int64) * row_stride + token.to(tl.int64) * token_stride
    return tl.load(at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _logits(logits_ptr, changed_ptr, place, row_stride, token_stride, vocab, token, live):
    """In float32, of a row as it is, or from place -1 on as its changes leave it."""
    if place >= 0:
        numbers = _logits_as_they_are(logits_ptr, place, row_stride, token_stride, token, live)
    else:
        numbers = tl.load(changed_ptr + (-1 - place).to(tl.int64) * vocab + token, mask=live, other=0.0)
    return numbers


@triton.jit
def _key(number):
    """The int32 of the same order: both zeros are equal, and NaN is greater than all."""
    bits = tl.where(number == 0, 0.0, number).to(tl.int32, bitcast=True)
    return tl.where(number == number, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@triton.jit
def _number(key):
    """Of which this is the key. That of NaN is NaN."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _candidate(key, token):
    """One number for a key and its token: the greater comes first in a stable descending sort by keys."""
    return (key.to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def _token_of(candidate):
    return (~candidate).to(tl.int32)  # the low word, with its bits turned back


@triton.jit
def _weight(distance):
    """e to the power of each, which are at most 0 (the polynomial of Cephes): exactly 1 for 0, nothing for the furthest
    and for NaN. Chances are weights over their sum; a race and its cuts need no more than weights."""
    near = tl.where(distance >= FURTHEST, distance, FURTHEST)
    whole = tl.floor(near * 1.44269504 + 0.5)
    rest = near - whole * 0.693359375 + whole * 2.12194440e-4  # ln 2 in two parts: the first product is exact
    y = rest * 1.9875691500e-4 + 1.3981999507e-3
    y = y * rest + 8.3334519073e-3
    y = y * rest + 4.1665795894e-2
    y = y * rest + 1.6666665459e-1
    y = y * rest + 5.0000001201e-1
    y = y * (rest * rest) + rest + 1.0
    scale = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(distance > FURTHEST, y * scale, 0.0)


@triton.jit
def _mass(weight, SHIFT: tl.constexpr):
    """As a multiple of 2^-SHIFT, so that sums are the same in any order and those of a row do not overflow."""
    return (weight * (1 << SHIFT)).to(tl.int64)


@triton.jit
def _mass_of(candidate, SHIFT: tl.constexpr):
    return _mass((candidate >> 32).to(tl.int32).to(tl.float32, bitcast=True), SHIFT)


@triton.jit
def _time(token, first_key, second_key):
    """How long a token runs, of an exponential distribution, by its row's keys (`_race`, `_bits` in plain_torch.py).

    The negative logarithm of 1 - uniform, accurate for the short times, which win: 1 - uniform is m * 2^e, and the
    logarithm of m that of a fraction, by the series of atanh.
    """
    bits = token.to(tl.uint32) * 0x9E3779B1 + first_key.to(tl.uint32, bitcast=True)
    bits ^= bits >> 16
    bits *= 0x21F0AAAD
    bits += second_key.to(tl.uint32, bitcast=True)
    bits ^= bits >> 15
    bits *= 0xD35A2D97
    bits ^= bits >> 15
    uniform = bits.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-32 + 0.5
    uniform = tl.minimum(tl.maximum(uniform, 2.0**-33), 1 - 2.0**-24)
    rest = (1.0 - uniform).to(tl.int32, bitcast=True)
    exponent = (rest - 0x3F3504F3) >> 23  # so that m lies around 1, between the roots of 1/2 and 2
    m = (rest - (exponent << 23)).to(tl.float32, bitcast=True)
    is_short = uniform < 0.25
    s = tl.div_rn(tl.where(is_short, uniform, 1.0 - m), tl.where(is_short, 2.0 - uniform, 1.0 + m))
    square = s * s
    series = ((square * (1 / 9) + 1 / 7) * square + 1 / 5) * square + 1 / 3
    return 2 * (s * (square * series) + s) - exponent.to(tl.float32) * 0.693147181


# -- parts -------------------------------------------------------------------------------------------------------------


@triton.jit
def _part(part, span, vocab, BLOCK: tl.constexpr):
    """Where it begins and ends. Parts are whole blocks, so a block's tokens need only be held against the vocabulary's
    size: where that is a multiple of 16, as it mostly is, so are the borders of every mask, and loads are wide."""
    start = tl.multiple_of(part * span, BLOCK)
    return start, tl.minimum(start + span, vocab)


@triton.jit
def _greatest(keys_ptr, job, parts):
    """Key of a row's greatest logit."""
    p = tl.arange(0, MOST_PARTS)
    return tl.max(tl.load(keys_ptr + job * parts + p, mask=p < parts, other=NO_KEY), 0)


@triton.jit
def _first_of(values, tokens, most):
    """The first token that has the greatest value."""
    return tl.min(tl.where(values == most, tokens, NO_TOKEN), 0)


@triton.jit
def _is_usable(top):
    """The greatest logit over the temperature, which all differences are to. It may be infinite or NaN."""
    return tl.abs(top) < float("inf")


@triton.jit
def _run(best, winner, weight, token, first_key, second_key):
    """Let tokens race, lane by lane. Those of no weight stay behind the start. Of equals the first wins."""
    score = tl.div_rn(weight, _time(token, first_key, second_key))
    is_better = (score > best) | ((score == best) & (score > 0) & (token < winner))
    return tl.where(is_better, score, best), tl.where(is_better, token, winner)


# -- changes -----------------------------------------------------------------------------------------------------------


@triton.jit
def _where_allowed(numbers, masks_ptr, mask, words, token, live):
    """What the row's mask does not allow becomes minus infinity. Negative: there is no mask."""
    if mask >= 0:
        word = tl.load(masks_ptr + mask * words + token // 32, mask=live, other=0)
        numbers = tl.where(((word >> (token % 32)) & 1) == 1, numbers, NONE)
    return numbers


@triton.jit
def _edited(number, kind, value, repetition):
    """NaN stays NaN."""
    weighed = tl.where(number > 0, tl.div_rn(number, repetition), number * repetition)
    weighed = tl.where(weighed > HIGHEST_LOGIT, HIGHEST_LOGIT, weighed)
    weighed = tl.where(weighed < -HIGHEST_LOGIT, -HIGHEST_LOGIT, weighed)
    penalized = tl.where(repetition == 1, number, weighed) - value
    return tl.where(kind == PENALTY, penalized, tl.where(kind == PUT, value, number + value))


@triton.jit(do_not_specialize=["words", "span", "parts"])
def change(
    logits_ptr, changed_ptr, rows_ptr, waves_ptr, tokens_ptr, values_ptr, masks_ptr,
    row_stride, token_stride, vocab, words, span, parts, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a row and change the copy. Grid (C, P).

    logits [R,V]  changed [C,V] float32  rows [C,CHANGE_WORDS]  masks [masks, words] a bit per token
    waves [waves, 2 + P]: kind of edit, and where the edits of each part begin in tokens and values, which come in the
    order of their tokens. No token is twice in a wave, so one wave is done at once, and then the next.
    """
    change, part = tl.program_id(0), tl.program_id(1)
    about = rows_ptr + change * CHANGE_WORDS
    row, mask, repetition = tl.load(about + ROW), tl.load(about + MASK), _setting(about, REPETITION)
    changed = changed_ptr + change.to(tl.int64) * vocab
    start, end = _part(part, span, vocab, BLOCK)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        live = token < vocab
        numbers = _logits_as_they_are(logits_ptr, row, row_stride, token_stride, token, live)
        tl.store(changed + token, _where_allowed(numbers, masks_ptr, mask, words, token, live), mask=live)
    tl.debug_barrier()
    for wave in range(tl.load(about + FIRST_WAVE), tl.load(about + LAST_WAVE)):
        of_wave = waves_ptr + wave * (2 + parts)
        kind, last = tl.load(of_wave), tl.load(of_wave + 2 + part)
        for at in range(tl.load(of_wave + 1 + part), last, EDITS):
            edit = at + tl.arange(0, EDITS)
            live = edit < last
            token = tl.load(tokens_ptr + edit, mask=live, other=0)
            value = tl.load(values_ptr + edit, mask=live, other=0).to(tl.float32, bitcast=True)
            number = _edited(tl.load(changed + token, mask=live, other=0.0), kind, value, repetition)
            tl.store(changed + token, _where_allowed(number, masks_ptr, mask, words, token, live), mask=live)
        tl.debug_barrier()


# -- the first reading -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["span", "parts", "bins"])
def scan(
    logits_ptr, changed_ptr, jobs_ptr, keys_ptr, tokens_ptr, bins_ptr, fills_ptr,
    row_stride, token_stride, vocab, span, parts, bins, BLOCK: tl.constexpr, BIN: tl.constexpr,
):  # fmt: skip
    """The greatest logit of each part, its first token, and where a floor is sought that of each bin. Grid (J, P).

    jobs [J,JOB_WORDS]  keys, tokens [J,P]  bins [J,B] keys  fills [J]: lengths of the lists, which begin empty
    """
    number, part = tl.program_id(0), tl.program_id(1)
    job = jobs_ptr + number * JOB_WORDS
    place, has_bins = tl.load(job + PLACE), tl.load(job + KIND) >= CUT
    start, end = _part(part, span, vocab, BLOCK)
    best = tl.full([BLOCK], NO_KEY, tl.int32)
    winner = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        live = token < vocab
        key = _key(_logits(logits_ptr, changed_ptr, place, row_stride, token_stride, vocab, token, live))
        key = tl.where(live, key, NO_KEY)
        winner = tl.where(key > best, token, winner)
        best = tl.maximum(key, best)
        if has_bins:
            bin = at // BIN + tl.arange(0, BLOCK // BIN)
            tl.store(bins_ptr + number * bins + bin, tl.max(tl.reshape(key, [BLOCK // BIN, BIN]), 1), mask=bin < bins)
    most = tl.max(best, 0)
    tl.store(keys_ptr + number * parts + part, most)
    tl.store(tokens_ptr + number * parts + part, _first_of(best, winner, most))
    if part == 0:
        tl.store(fills_ptr + number, 0)


# -- weights -----------------------------------------------------------------------------------------------------------


@triton.jit
def _nth_greatest(keys, count):
    """A key that at least `count` of these reach, the greatest or near it; `NO_KEY` if there are not so many."""
    low = tl.full([], NO_KEY, tl.int64)
    high = tl.full([], NAN_KEY + 1, tl.int64)
    reached = count + 1
    while (high - low > 1) & (reached != count):
        middle = (low + high) >> 1
        reached = tl.sum((keys.to(tl.int64) >= middle).to(tl.int32), 0)
        low, high = tl.where(reached >= count, middle, low), tl.where(reached >= count, high, middle)
    return low.to(tl.int32)


@triton.jit
def _floors(job, keys, temperature, top, vocab):
    """What a token that a cut keeps is never below: a distance, and a weight.

    Not so near that rounding could matter. All tokens below a weight of w have no more than V * w together, and a total
    is not less than that of the bins' greatest: where this is less than top_p leaves out, all of them are left out.
    """
    top_k, top_p, min_p = tl.load(job + COUNT), _setting(job, TOP_P), _setting(job, MIN_P)
    distance = tl.div_rn(_number(_nth_greatest(keys, top_k)), temperature) - top
    floor = tl.where(distance == distance, distance - 1e-6 * (16 - distance), NONE)
    weights = _weight(tl.div_rn(_number(keys), temperature) - top)
    tail = 0.99 * (1 - top_p) * tl.sum(tl.where(keys > NO_KEY, weights, 0.0), 0) / vocab
    return floor, tl.maximum(tl.minimum(min_p, 1.0), tl.where(top_p < 1, tail, 0.0))


@triton.jit(do_not_specialize=["span", "parts", "bins"])
def weigh(
    logits_ptr, changed_ptr, jobs_ptr, keys_ptr, bins_ptr, scores_ptr, winners_ptr, masses_ptr, lists_ptr, fills_ptr,
    row_stride, token_stride, vocab, span, parts, bins, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Of random rows: the race of a part, or where something is cut, its mass and which tokens may be kept. Of rows
    that are told about: the mass, and which tokens may be among the most probable. Grid (J, P).

    scores, winners, masses [J,P]  lists [lists,V] candidates, in any order
    """
    number, part = tl.program_id(0), tl.program_id(1)
    job = jobs_ptr + number * JOB_WORDS
    kind, place = tl.load(job + KIND), tl.load(job + PLACE)
    temperature = _setting(job, TEMPERATURE)
    top = tl.div_rn(_number(_greatest(keys_ptr, number, parts)), temperature)
    start, end = _part(part, span, vocab, BLOCK)
    if kind == RACE:
        first_key, second_key = tl.load(job + FIRST_KEY), tl.load(job + SECOND_KEY)
        least = tl.minimum(_setting(job, MIN_P), 1.0)
        best = tl.zeros([BLOCK], tl.float32)
        winner = tl.full([BLOCK], NO_TOKEN, tl.int32)
        for at in range(start, end, BLOCK):
            token = at + tl.arange(0, BLOCK)
            live = token < vocab
            numbers = _logits(logits_ptr, changed_ptr, place, row_stride, token_stride, vocab, token, live)
            weight = _weight(tl.div_rn(numbers, temperature) - top)
            weight = tl.where(live & (weight >= least), weight, 0.0)
            best, winner = _run(best, winner, weight, token, first_key, second_key)
        most = tl.max(best, 0)
        tl.store(scores_ptr + number * parts + part, most)
        tl.store(winners_ptr + number * parts + part, _first_of(best, winner, most))
    if kind >= CUT:
        b = tl.arange(0, MOST_BINS)
        keys = tl.load(bins_ptr + number * bins + b, mask=b < bins, other=NO_KEY)
        floor_key = tl.full([], NAN_KEY, tl.int32)
        floor, least = tl.full([], NONE, tl.float32), tl.full([], 0.0, tl.float32)
        wants_list = tl.load(job + LIST) >= 0
        if (kind == CUT) & _is_usable(top):
            floor, least = _floors(job, keys, temperature, top, vocab)
        if (kind == ABOUT) & wants_list:
            floor_key = _nth_greatest(keys, tl.load(job + COUNT))
        listed = lists_ptr + tl.load(job + LIST).to(tl.int64) * vocab
        mass = tl.zeros([BLOCK], tl.int64)
        for at in range(start, end, BLOCK):
            token = at + tl.arange(0, BLOCK)
            live = token < vocab
            numbers = _logits(logits_ptr, changed_ptr, place, row_stride, token_stride, vocab, token, live)
            distance = tl.div_rn(numbers, temperature) - top
            weight = tl.where(live, _weight(distance), 0.0)
            mass += _mass(weight, SHIFT)
            if wants_list:
                key = tl.where(kind == CUT, weight.to(tl.int32, bitcast=True), _key(numbers))
                may_be_kept = (weight > 0) & (weight >= least) & (distance >= floor)
                wanted = live & tl.where(kind == CUT, may_be_kept, key >= floor_key)
                count = tl.sum(wanted.to(tl.int32), 0)
                if count > 0:
                    to = tl.atomic_add(fills_ptr + number, count) + tl.cumsum(wanted.to(tl.int32), 0) - 1
                    tl.store(listed + to, _candidate(key, token), mask=wanted)
        tl.store(masses_ptr + number * parts + part, tl.sum(mass, 0))


# -- choices -----------------------------------------------------------------------------------------------------------


@triton.jit
def _is_kept(before, mass, total, top_k, top_p):
    """Is a token kept that so many more probable ones are before, of so much mass? The first always is."""
    share = (mass.to(tl.float64) / total.to(tl.float64)).to(tl.float32)
    return (before == 0) | ((before < top_k) & ((top_p >= 1) | (share < top_p)))


@triton.jit
def _choose_from_list(job, listed, length, total, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """The winner among the candidates that a cut keeps.

    The border is found by halving the interval [low, high) in which it lies: what is above `high` is kept, what is not
    above `low` is not. As long as many candidates lie between, all are read anew each time; few stay in registers.
    """
    top_k, top_p = tl.load(job + COUNT), _setting(job, TOP_P)
    first_key, second_key = tl.load(job + FIRST_KEY), tl.load(job + SECOND_KEY)
    low = tl.full([], 0, tl.int64)  # less than any candidate that has a weight
    high = tl.full([], (0x3F800000 << 32) | 0xFFFFFFFF, tl.int64)  # a weight of 1, and the first token
    above_low, above_high = length, tl.full([], 0, tl.int32)
    mass_above = tl.full([], 0, tl.int64)
    while above_low - above_high > BLOCK:
        middle = (low + high) >> 1
        counts = tl.zeros([BLOCK], tl.int32)
        masses = tl.zeros([BLOCK], tl.int64)
        for at in range(0, length, BLOCK):
            i = at + tl.arange(0, BLOCK)
            candidate = tl.load(listed + i, mask=i < length, other=0)
            is_above = candidate > middle
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, _mass_of(candidate, SHIFT), 0)
        count, mass = tl.sum(counts, 0), tl.sum(masses, 0)
        is_kept = _is_kept(count, mass, total, top_k, top_p)
        low, above_low = tl.where(is_kept, low, middle), tl.where(is_kept, above_low, count)
        high, above_high = tl.where(is_kept, middle, high), tl.where(is_kept, count, above_high)
        mass_above = tl.where(is_kept, mass, mass_above)
    # What is known to be kept races; what lies between moves to the list's beginning, never past where it was read.
    best = tl.zeros([BLOCK], tl.float32)
    winner = tl.full([BLOCK], NO_TOKEN, tl.int32)
    between = tl.full([], 0, tl.int32)
    for at in range(0, length, BLOCK):
        i = at + tl.arange(0, BLOCK)
        candidate = tl.load(listed + i, mask=i < length, other=0)
        weight = (candidate >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        weight = tl.where(candidate > high, weight, 0.0)
        if above_high > 0:
            best, winner = _run(best, winner, weight, _token_of(candidate), first_key, second_key)
        is_between = ((candidate > low) & (candidate <= high)).to(tl.int32)
        to = between + tl.cumsum(is_between, 0) - 1
        tl.debug_barrier()
        tl.store(listed + to, candidate, mask=is_between == 1)
        between += tl.sum(is_between, 0)
    tl.debug_barrier()
    i = tl.arange(0, BLOCK)
    candidate = tl.load(listed + i, mask=i < between, other=0)
    weight = (candidate >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    masses = _mass_of(candidate, SHIFT)
    kept_before = above_high
    while above_low - above_high > 1:
        middle = (low + high) >> 1
        is_above = candidate > middle
        count = kept_before + tl.sum(is_above.to(tl.int32), 0)
        mass = mass_above + tl.sum(tl.where(is_above, masses, 0), 0)
        is_kept = _is_kept(count, mass, total, top_k, top_p)
        low, above_low = tl.where(is_kept, low, middle), tl.where(is_kept, above_low, count)
        high, above_high = tl.where(is_kept, middle, high), tl.where(is_kept, count, above_high)
    weight = tl.where(candidate > low, weight, 0.0)
    best, winner = _run(best, winner, weight, _token_of(candidate), first_key, second_key)
    return _first_of(best, winner, tl.max(best, 0))


@triton.jit(do_not_specialize=["parts"])
def choose(
    jobs_ptr, keys_ptr, tokens_ptr, scores_ptr, winners_ptr, masses_ptr, lists_ptr, fills_ptr, chosen_ptr,
    vocab, parts, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The token of each row, of what its parts found. Grid (R,).

    keys, tokens, scores, winners, masses [J,P]  lists [lists,V]  chosen [R] int64
    """
    row = tl.program_id(0)
    job = jobs_ptr + row * JOB_WORDS
    kind = tl.load(job + KIND)
    p = tl.arange(0, MOST_PARTS)
    at, live = row * parts + p, p < parts
    keys = tl.load(keys_ptr + at, mask=live, other=NO_KEY)
    most = tl.max(keys, 0)
    chosen = tl.full([], 0, tl.int32)  # of chances that are all NaN, as argmax says
    is_usable = _is_usable(tl.div_rn(_number(most), _setting(job, TEMPERATURE)))
    if kind == GREEDY:
        chosen = _first_of(keys, tl.load(tokens_ptr + at, mask=live, other=NO_TOKEN), most)
    if (kind == RACE) & is_usable:
        scores = tl.load(scores_ptr + at, mask=live, other=0.0)
        winners = tl.load(winners_ptr + at, mask=live, other=NO_TOKEN)
        chosen = _first_of(scores, winners, tl.max(scores, 0))
    if (kind == CUT) & is_usable:
        total = tl.sum(tl.load(masses_ptr + at, mask=live, other=0), 0)
        listed = lists_ptr + tl.load(job + LIST).to(tl.int64) * vocab
        chosen = _choose_from_list(job, listed, tl.load(fills_ptr + row), total, BLOCK, SHIFT)
    tl.store(chosen_ptr + row, chosen.to(tl.int64))


# -- log-probabilities -------------------------------------------------------------------------------------------------


@triton.jit
def _tell_most_probable(job, listed, length, most, log_of_sum, tokens_ptr, values_ptr, BLOCK: tl.constexpr):
    """The greatest candidates one after another."""
    last = tl.full([], 2**63 - 1, tl.int64)
    for n in range(tl.load(job + COUNT)):
        best = tl.full([BLOCK], NO_CANDIDATE, tl.int64)
        for at in range(0, length, BLOCK):
            i = at + tl.arange(0, BLOCK)
            candidate = tl.load(listed + i, mask=i < length, other=NO_CANDIDATE)
            best = tl.maximum(best, tl.where(candidate < last, candidate, NO_CANDIDATE))
        last = tl.max(best, 0)
        value = _number((last >> 32).to(tl.int32)) - most - log_of_sum
        tl.store(tokens_ptr + n, _token_of(last))
        tl.store(values_ptr + n, value.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["first", "most_told", "span", "parts"])
def describe(
    logits_ptr, jobs_ptr, keys_ptr, masses_ptr, lists_ptr, fills_ptr, chosen_ptr, told_ptr,
    row_stride, token_stride, vocab, first, most_told, span, parts,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Of the jobs from `first` on. Grid (A, P).

    chosen [R] int64  told [A, 1 + P + 2 * most_told]: the token's log-probability, how many tokens of each part are
    more probable, the most probable tokens and their log-probabilities
    """
    part = tl.program_id(1)
    number = first + tl.program_id(0)
    job = jobs_ptr + number * JOB_WORDS
    told = told_ptr + tl.program_id(0).to(tl.int64) * (1 + parts + 2 * most_told)
    row = tl.load(job + PLACE)
    p = tl.arange(0, MOST_PARTS)
    total = tl.maximum(tl.sum(tl.load(masses_ptr + number * parts + p, mask=p < parts, other=0), 0), 1)
    most = _number(_greatest(keys_ptr, number, parts))
    log_of_sum = tl.log(total.to(tl.float64) * (1.0 / (1 << SHIFT))).to(tl.float32)
    log_of_sum = tl.where(_is_usable(most), log_of_sum, float("nan"))
    token_chosen = tl.load(chosen_ptr + row)
    chosen = _logits_as_they_are(logits_ptr, row, row_stride, token_stride, token_chosen, True) - most - log_of_sum
    start, end = _part(part, span, vocab, BLOCK)
    more = tl.zeros([BLOCK], tl.int32)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        live = token < vocab
        numbers = _logits_as_they_are(logits_ptr, row, row_stride, token_stride, token, live)
        more += (live & (numbers - most - log_of_sum > chosen)).to(tl.int32)
    tl.store(told + 1 + part, tl.sum(more, 0))
    if part == 0:
        tl.store(told, chosen.to(tl.int32, bitcast=True))
        listed = lists_ptr + tl.load(job + LIST).to(tl.int64) * vocab
        tops = told + 1 + parts
        length = tl.load(fills_ptr + number)
        _tell_most_probable(job, listed, length, most, log_of_sum, tops, tops + most_told, BLOCK)
