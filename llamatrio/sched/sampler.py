"""From logits to the next token.

The chain is llama-server's: logit_bias, penalties, top_k, top_p, min_p, temperature. A step reports only the likeliest
tokens of a row (candidates); for nearly every request that is all the chain can reach. `n_candidates` says how many
are enough for the result to be exactly that of the whole row, or None where only the whole row is.

Randomness is a function of (seed, position), not a stream: a sequence draws the same number at the same position
alone, in any batch, on any lane, and after a restore.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llamatrio.sched.types import FloatArray, SamplingParams, TokenProb

MAX_CANDIDATES = 256
_MASK = (1 << 64) - 1


class Choice(NamedTuple):
    """The token chosen at one position, and what was reported about it."""

    id: int
    logprob: float
    """May be NaN where the request asked for no probabilities: nobody needed the row's sum then."""
    top: tuple[TokenProb, ...]
    """The n_probs likeliest tokens, best first."""


class Row(NamedTuple):
    """What a step reported of one row."""

    ids: list[int]
    """The likeliest tokens, best first."""
    logits: list[float]
    logsumexp: float
    full: FloatArray | None
    """[n_vocab], where `n_candidates` asked for everything."""


class Candidates(NamedTuple):
    """Tokens that may be chosen, best first (of equal logits, the lower id first)."""

    ids: list[int]
    logits: list[float]
    rest: float = 0.0
    """Weight, in units of the best one's, of tokens that top_k left but min_p is sure to drop: top_p counts it."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for this seed and position: two rounds of SplitMix64 (Steele, Lea and Flood, 2014)."""
    return (_splitmix(_splitmix(seed & _MASK) ^ (position & _MASK)) >> 11) * 2.0**-53


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def window(tokens: Sequence[int], params: SamplingParams) -> Mapping[int, int]:
    """How often each token occurs in the penalties' window, which spans prompt and output alike."""
    if not _penalizes(params):
        return {}
    return Counter(tokens if params.repeat_last_n < 0 else tokens[-params.repeat_last_n :])


def n_candidates(params: SamplingParams, n_penalized: int, n_banned: int) -> int | None:
    """How many of a row's likeliest tokens decide the outcome; None: all of them.

    A penalty or a ban can push a token out of the k likeliest, so each adds one to what must be known. A change that
    can lift a token from the depths needs the whole row.
    """
    lifts = params.repeat_penalty < 1 or params.presence_penalty < 0 or params.frequency_penalty < 0
    if (n_penalized and lifts) or any(bias > 0 for _, bias in params.logit_bias):
        return None
    if params.temperature <= 0:
        wanted = 1
    elif params.top_k > 0:
        wanted = params.top_k
    else:
        return None
    needed = max(wanted + n_penalized + n_banned + len(params.logit_bias), params.n_probs)
    return needed if needed <= MAX_CANDIDATES else None


def next_token(row: Row, params: SamplingParams, tokens: Sequence[int], banned: Collection[int], seed: int) -> Choice:
    """Chooses the token that follows `tokens` (prompt and output so far)."""
    counts = window(tokens, params)
    if row.full is not None:
        candidates = candidates_of_row(row.full, params, counts, banned)
    else:
        candidates = candidates_of_best(row.ids, row.logits, params, counts, banned)
    index, probs = choose(candidates, params, len(tokens), seed)
    return _report(row, params, candidates, index, probs)


def _report(row: Row, params: SamplingParams, candidates: Candidates, index: int, probs: Sequence[float]) -> Choice:
    """Log-probabilities are the model's own (of the unmodified logits), or those of the chain where asked for."""
    token = candidates.ids[index]
    if params.post_sampling_probs:
        logs = [math.log(prob) if prob > 0 else -math.inf for prob in probs]
        top = [TokenProb(i, p) for i, p in zip(candidates.ids, logs, strict=False)]
        top.sort(key=lambda entry: -entry.logprob)
        return Choice(token, logs[index], tuple(top[: params.n_probs]))
    ids, logits = (row.ids, row.logits) if row.full is None else _best(row.full, max(params.n_probs, 1))
    raw = float(row.full[token]) if row.full is not None else logits[ids.index(token)]
    if not params.n_probs:
        return Choice(token, raw - row.logsumexp, ())
    report = zip(ids[: params.n_probs], logits[: params.n_probs], strict=True)
    return Choice(token, raw - row.logsumexp, tuple(TokenProb(i, x - row.logsumexp) for i, x in report))


def _best(row: FloatArray, n: int) -> tuple[list[int], list[float]]:
    n = min(n, len(row))
    ids = np.flatnonzero(row >= np.partition(row, len(row) - n)[len(row) - n])
    ids = ids[np.lexsort((ids, -row[ids]))][:n]
    return ids.tolist(), row[ids].tolist()


def candidates_of_row(
    row: FloatArray, params: SamplingParams, counts: Mapping[int, int], banned: Collection[int]
) -> Candidates:
    """The chain up to top_k, over a whole row of logits [n_vocab]."""
    logits = row.astype(np.float64)
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token, count in counts.items():
        logits[token] = _penalize(float(logits[token]), count, params)
    logits[list(banned)] = -math.inf
    if logits.max() == -math.inf:
        logits[:] = 0.0  # everything is banned: then nothing is
    keep = np.flatnonzero(logits >= _floor(logits, params))
    order = keep[np.lexsort((keep, -logits[keep]))]
    if params.temperature <= 0:
        order = order[:1]
    elif params.top_k > 0:
        order = order[: params.top_k]
    else:
        weights = np.exp(logits - logits[order[0]])
        return Candidates(order.tolist(), logits[order].tolist(), float(weights.sum() - weights[order].sum()))
    return Candidates(order.tolist(), logits[order].tolist())


def _floor(logits: np.ndarray[tuple[int], np.dtype[np.float64]], params: SamplingParams) -> float:
    """Logits below this cannot be chosen; spares sorting a whole vocabulary."""
    best = float(logits.max())
    if params.temperature <= 0 or best == -math.inf:
        return best
    if 0 < params.top_k < len(logits):
        return float(np.partition(logits, len(logits) - params.top_k)[len(logits) - params.top_k])
    if 0 < params.min_p < 1:
        return best + math.log(params.min_p) - 1e-9  # see Candidates.rest
    return float(np.finfo(np.float64).min)


def candidates_of_best(
    ids: Sequence[int],
    logits: Sequence[float],
    params: SamplingParams,
    counts: Mapping[int, int],
    banned: Collection[int],
) -> Candidates:
    """The chain up to top_k, over a row's likeliest tokens, best first."""
    limit = 1 if params.temperature <= 0 else params.top_k if params.top_k > 0 else len(ids)
    if not (counts or params.logit_bias):
        if not banned:
            return Candidates(list(ids[:limit]), list(logits[:limit]))
        kept = [at for at, token in enumerate(ids) if token not in banned][:limit]
        return Candidates([ids[at] for at in kept], [logits[at] for at in kept])
    bias = dict(params.logit_bias)
    changed = [
        (-_penalize(logit + bias.get(token, 0.0), counts.get(token, 0), params), token)
        for token, logit in zip(ids, logits, strict=True)
        if token not in banned
    ]
    changed.sort()
    return Candidates([token for _, token in changed[:limit]], [-negated for negated, _ in changed[:limit]])


def choose(candidates: Candidates, params: SamplingParams, position: int, seed: int) -> tuple[int, list[float]]:
    """Index of the chosen candidate, and the probabilities of those that top_p and min_p left (a prefix)."""
    if params.temperature <= 0 or len(candidates.ids) == 1:
        return 0, [1.0]
    probs = _softmax(candidates.logits, 1.0, candidates.rest)
    n = _kept_by_top_p(probs, params.top_p)
    floor = params.min_p * probs[0]
    while n > 1 and probs[n - 1] < floor:
        n -= 1
    probs = _softmax(candidates.logits[:n], params.temperature)
    target = uniform(seed, position)
    for index, prob in enumerate(probs):
        target -= prob
        if target < 0:
            return index, probs
    return n - 1, probs


def _kept_by_top_p(probs: Sequence[float], top_p: float) -> int:
    if top_p >= 1:
        return len(probs)
    total = 0.0
    for n, prob in enumerate(probs, start=1):
        total += prob
        if total >= top_p:
            return n
    return len(probs)


def _softmax(logits: Sequence[float], temperature: float, rest: float = 0.0) -> list[float]:
    best = logits[0]
    weights = [math.exp((logit - best) / temperature) for logit in logits]
    total = math.fsum(weights) + rest
    return [weight / total for weight in weights]


def _penalizes(params: SamplingParams) -> bool:
    changes = params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return changes and params.repeat_last_n != 0


def _penalize(logit: float, count: int, params: SamplingParams) -> float:
    if not count:
        return logit
    logit = logit / params.repeat_penalty if logit > 0 else logit * params.repeat_penalty
    return logit - count * params.frequency_penalty - params.presence_penalty
