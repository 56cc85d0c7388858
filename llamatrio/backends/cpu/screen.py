"""The likeliest tokens of a row, exactly, without reading most of the head.

The head's sketch (sketch.py) is half of its bytes and gives an upper bound of every logit. The tokens with the largest
bounds are *probed*: their rows of the head are read. The k-th largest logit among them is a threshold that the k
likeliest tokens reach, so whoever's bound does not reach it is out, and the rows of the rest, the candidates, are read:
some hundreds or thousands of a vocabulary of 262,144. Logits are the same bits as those of the whole product
(whole_rows.py), and so are ids, logits and their order. The sum over all exponentials stays unknown, so steps whose
probabilities somebody wants read the whole head.

The phases are those of the whole product (head.py), on bounds instead of logits, and two between them and the
selection: probes by rows, candidates by segments. Where a row was read its logit replaces the bound.
"""

# Numba infers the types of compiled functions itself.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, call-arg"

from __future__ import annotations

from numba import int32

from llamatrio.backends.cpu import tables as t
from llamatrio.backends.cpu.call import call_kernel
from llamatrio.backends.cpu.formats import ROWS
from llamatrio.backends.cpu.native import atomic_add, inner, load_f32, load_i32, store_f32, store_i32
from llamatrio.backends.cpu.products import share
from llamatrio.backends.cpu.team import barrier
from llamatrio.backends.cpu.topk import BLOCK, SEGMENT, kth_largest, select_top

MOST_SCREENED = 64
"""Tokens that are worth looking for this way: the more, the lower the threshold."""
_MORE_PROBES = 64
"""Probes beyond the k wanted: bounds do not come in the order of logits, so this makes the threshold much higher."""
MOST_PROBES = MOST_SCREENED + _MORE_PROBES


@inner
def read_candidates(step, matrices, first_place, m, team, member, n_members):
    """LOGITS and MAXIMA from bounds to what the k likeliest of the m rows from first_place on can be selected from."""
    _probe(step, matrices, first_place, m, member, n_members)
    barrier(team, member)
    _score_candidates(step, matrices, first_place, m, member, n_members)


@inner
def _probe(step, matrices, first_place, m, member, n_members):
    """Thresholds of the rows, shared by rows."""
    k, n_logits, n_vocab = step[t.N_TOP], step[t.N_LOGITS], step[t.N_VOCAB]
    n = min(k + _MORE_PROBES, n_vocab)
    probes = step[t.PROBES] + member * step[t.PRIVATE_BYTES]
    found = step[t.PROBE_LOGITS] + member * step[t.PRIVATE_BYTES]
    first, last = share(m, member, n_members)
    for i in range(first, last):
        logits = step[t.LOGITS] + i * step[t.LD_LOGITS]
        select_top(logits, step[t.MAXIMA] + 4 * i * (n_logits // BLOCK), n_vocab, n, found, probes)
        _score(step, matrices, first_place + i, logits, probes, n)
        threshold = kth_largest(logits, probes, n, k, found, probes + 4 * (MOST_PROBES + ROWS))
        store_f32(step[t.THRESHOLDS], i, threshold)


@inner
def _score(step, matrices, place, logits, ids, n):
    """Reads the rows of the head at the n ids, which have room for a multiple of 16: the last one fills it up."""
    n_whole = (n + ROWS - 1) // ROWS * ROWS
    for i in range(n, n_whole):
        store_i32(ids, i, load_i32(ids, n - 1))
    n_embd = step[t.N_EMBD]
    x = step[t.HEAD_Q8] + 2 * place * n_embd
    call_kernel(step[t.F_SCORE], matrices[len(matrices) - 1, t.M_ADDRESS], x, logits, n_embd, ids, n_whole)


@inner
def _score_candidates(step, matrices, first_place, m, member, n_members):
    """By segments, each member every n-th: a vocabulary's common tokens stand together."""
    n_logits = step[t.N_LOGITS]
    n_segments = (n_logits + SEGMENT - 1) // SEGMENT
    candidates = step[t.CANDIDATES] + member * step[t.PRIVATE_BYTES]
    n_scored = 0
    for unit in range(member, m * n_segments, n_members):
        place, start = unit // n_segments, unit % n_segments * SEGMENT
        logits = step[t.LOGITS] + place * step[t.LD_LOGITS]
        maxima = step[t.MAXIMA] + 4 * (place * n_logits // BLOCK)
        threshold = load_f32(step[t.THRESHOLDS], place)
        n = _collect(logits, maxima, start, min(start + SEGMENT, n_logits), threshold, candidates)
        if n:
            _score(step, matrices, first_place + place, logits, candidates, n)
            _lower_maxima(logits, maxima, candidates, n)
        n_scored += n
    atomic_add(step[t.N_SCORED], n_scored)


@inner
def _collect(logits, maxima, start, stop, threshold, candidates):
    """Ids of start .. stop whose bound reaches the threshold; returns how many there are."""
    n = 0
    for block in range(start // BLOCK, stop // BLOCK):
        if load_f32(maxima, block) >= threshold:
            for i in range(block * BLOCK, (block + 1) * BLOCK):
                if load_f32(logits, i) >= threshold:
                    store_i32(candidates, n, int32(i))
                    n += 1
    return n


@inner
def _lower_maxima(logits, maxima, candidates, n):
    """The largest of a block with candidates (ascending) is the largest of them: other bounds are too low to matter."""
    block = -1
    for i in range(n):
        index = load_i32(candidates, i)
        logit = load_f32(logits, index)
        if index // BLOCK != block:
            block = index // BLOCK
            store_f32(maxima, block, logit)
        elif logit > load_f32(maxima, block):
            store_f32(maxima, block, logit)
