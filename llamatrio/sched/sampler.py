"""From logits to the next token.

The chain is llama-server's: logit_bias, penalties, top_k, top_p, min_p, temperature. A step reports only the likeliest
tokens of a row (candidates); for nearly every request that is all the chain can reach. `n_candidates` says how many
are enough for the result to be exactly that of the whole row, or None where only the whole row is.

Whatever was asked for and whatever the device reports, a banned token and one whose logit is NaN or -inf are never
chosen: bans come after everything that changes a logit, and where no token is left there is no choice (None).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llamatrio.sched.chain import MAX_CANDIDATES, Candidates, candidates_of_all, choose, kth_largest, likeliest, uniform
from llamatrio.sched.penalties import Window, penalize_row, penalized, penalizes
from llamatrio.sched.types import FloatArray, Int32Array, SamplingParams, TokenProb

_MOST = float(np.finfo(np.float32).max)


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


class Bans(NamedTuple):
    """Tokens that must not be chosen, to look up and as an index of a row."""

    ids: frozenset[int]
    array: Int32Array

    @classmethod
    def of(cls, ids: Collection[int]) -> Bans:
        return cls(frozenset(ids), np.array(sorted(ids), np.int32))


class Sampler:
    """Chooses the tokens of one sequence. What its parameters say of tokens is put into tables once."""

    def __init__(self, params: SamplingParams, seed: int, eog_ids: Collection[int] = ()) -> None:
        self.params = params
        self.seed = seed
        self._window = Window(params.repeat_last_n) if penalizes(params) else None
        bias: dict[int, float] = {}
        for token, value in params.logit_bias:
            bias[token] = bias.get(token, 0.0) + value
        banned = {token for token, value in bias.items() if value == -math.inf}
        self._bias = {token: value for token, value in bias.items() if token not in banned}
        self._bias_ids = np.array(list(self._bias), np.int32)
        self._bias_values = np.array(list(self._bias.values()), np.float64)
        self._bans = Bans.of(banned)
        self._bans_of_early_tokens = Bans.of(banned.union(eog_ids))

    def bans(self, n_predicted: int) -> Bans:
        """What must not follow after so many tokens: end-of-generation tokens may be too early, or never due."""
        is_early = self.params.ignore_eos or n_predicted < self.params.min_tokens
        return self._bans_of_early_tokens if is_early else self._bans

    def n_candidates(self, tokens: Sequence[int], n_predicted: int) -> int | None:
        """How many of a row's likeliest tokens decide the outcome; None: all of them.

        A penalty or a ban can push a token out of the k likeliest, so each adds one to what must be known. A change
        that can lift a token from the depths needs the whole row.
        """
        params, n_penalized = self.params, len(self._counts(tokens))
        lifts = params.repeat_penalty < 1 or params.presence_penalty < 0 or params.frequency_penalty < 0
        if (n_penalized and lifts) or (self._bias and self._bias_values.max() > 0):
            return None
        if params.temperature <= 0:
            wanted = 1
        elif params.top_k > 0:
            wanted = params.top_k
        else:
            return None
        n_changed = n_penalized + len(self._bias) + len(self.bans(n_predicted).ids)
        needed = max(wanted + n_changed, params.n_probs)
        return needed if needed <= MAX_CANDIDATES else None

    def next_token(self, row: Row, tokens: Sequence[int], n_predicted: int) -> Choice | None:
        """Chooses the token that follows `tokens` (prompt and output so far); None where none may follow."""
        row = without_nan(row)
        counts, bans = self._counts(tokens), self.bans(n_predicted)
        draw = 0.0 if self.params.temperature <= 0 else uniform(self.seed, len(tokens))
        if row.full is not None:
            candidates = self._of_row(row.full, counts, bans, draw)
        else:
            candidates = self._of_best(row.ids, row.logits, counts, bans.ids)
        if not candidates.ids:
            return None
        index, probs = choose(candidates, self.params, draw)
        return _report(row, self.params, candidates, index, probs)

    def _counts(self, tokens: Sequence[int]) -> Mapping[int, int]:
        return self._window.counts(tokens) if self._window is not None else {}

    def _of_row(self, row: FloatArray, counts: Mapping[int, int], bans: Bans, draw: float) -> Candidates:
        """The chain up to top_k, over a whole row of logits [n_vocab]."""
        logits = row.astype(np.float64)
        logits[self._bias_ids] += self._bias_values
        if counts:
            penalize_row(logits, counts, self.params)
        logits[bans.array] = -math.inf
        best = float(logits.max())
        if best == -math.inf:
            return Candidates([], [])
        if self.params.temperature <= 0:
            return Candidates([int(logits.argmax())], [best])  # the first of equals
        if self.params.top_k > 0:
            ids = likeliest(logits, kth_largest(logits, self.params.top_k))[: self.params.top_k]
            return Candidates(ids.tolist(), logits[ids].tolist())
        return candidates_of_all(logits, best, self.params, draw)

    def _of_best(
        self, ids: Sequence[int], logits: Sequence[float], counts: Mapping[int, int], banned: Collection[int]
    ) -> Candidates:
        """The chain up to top_k, over a row's likeliest tokens, best first."""
        params, bias = self.params, self._bias
        limit = 1 if params.temperature <= 0 else params.top_k if params.top_k > 0 else len(ids)
        if not (counts or bias):
            if not banned:
                return Candidates(list(ids[:limit]), list(logits[:limit]))
            kept = [at for at, token in enumerate(ids) if token not in banned][:limit]
            return Candidates([ids[at] for at in kept], [logits[at] for at in kept])
        changed = [
            (-penalized(logit + bias.get(token, 0.0), counts.get(token, 0), params), token)
            for token, logit in zip(ids, logits, strict=True)
            if token not in banned
        ]
        changed.sort()
        return Candidates([token for _, token in changed[:limit]], [-negated for negated, _ in changed[:limit]])


def without_nan(row: Row) -> Row:
    """The row as it is, or, where a logit is NaN or infinite, with numbers that can be worked with.

    NaN becomes -inf, which is never chosen, and +inf the largest float. The chosen and reported probabilities of such
    a row mean nothing, but no request of the batch is hurt by it.
    """
    if row.full is not None:
        if math.isfinite(row.full.max()):
            return row
        return row._replace(full=np.nan_to_num(row.full, nan=-np.inf, posinf=_MOST, neginf=-np.inf))
    if math.isfinite(sum(row.logits)):
        return row
    kept = sorted((-min(x, _MOST), token) for x, token in zip(row.logits, row.ids, strict=True) if x > -math.inf)
    return row._replace(ids=[token for _, token in kept], logits=[-negated for negated, _ in kept])


def _report(row: Row, params: SamplingParams, candidates: Candidates, index: int, probs: Sequence[float]) -> Choice:
    """Log-probabilities are the model's own (of the unmodified logits), or those of the chain where asked for."""
    token = candidates.ids[index]
    if params.post_sampling_probs:
        logs = [math.log(prob) if prob > 0 else -math.inf for prob in probs]
        top = [TokenProb(i, p) for i, p in zip(candidates.ids, logs, strict=False)]
        top.sort(key=lambda entry: -entry.logprob)
        return Choice(token, logs[index], tuple(top[: params.n_probs]))
    raw = float(row.full[token]) if row.full is not None else row.logits[row.ids.index(token)]
    if not params.n_probs:
        return Choice(token, raw - row.logsumexp, ())
    ids, logits = (row.ids, row.logits) if row.full is None else _best(row.full, params.n_probs)
    report = zip(ids[: params.n_probs], logits[: params.n_probs], strict=True)
    return Choice(token, raw - row.logsumexp, tuple(TokenProb(i, x - row.logsumexp) for i, x in report))


def _best(row: FloatArray, n: int) -> tuple[list[int], list[float]]:
    ids = np.flatnonzero(row >= kth_largest(row, n))
    ids = ids[np.argsort(-row[ids], kind="stable")][:n]
    return ids.tolist(), row[ids].tolist()
