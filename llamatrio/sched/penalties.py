"""Penalties of tokens that occurred lately: how often each did, and what that makes of its logit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llamatrio.sched.chain import Float64Array
from llamatrio.sched.types import SamplingParams


class Window:
    """How often each token occurs among the last n of a sequence that grows; n < 0: among all of them.

    Each token is counted when it comes and taken back when it leaves, so a step costs as much as it adds.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._start = self._end = 0
        """tokens[_start:_end] are counted."""
        self._counts: dict[int, int] = {}

    def counts(self, tokens: Sequence[int]) -> Mapping[int, int]:
        """Of `tokens`, which begin with those of the call before; valid until the next one."""
        start, end = 0 if self._n < 0 else max(0, len(tokens) - self._n), len(tokens)
        counts = self._counts
        for token in tokens[max(self._end, start) : end]:
            counts[token] = counts.get(token, 0) + 1
        for token in tokens[self._start : min(self._end, start)]:
            if counts[token] == 1:
                del counts[token]
            else:
                counts[token] -= 1
        self._start, self._end = start, end
        return counts


def penalizes(params: SamplingParams) -> bool:
    """Whether any token that occurred is treated differently."""
    changes = params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return changes and params.repeat_last_n != 0


def penalized(logit: float, count: int, params: SamplingParams) -> float:
    """The logit of a token that occurred `count` times."""
    if not count:
        return logit
    logit = logit / params.repeat_penalty if logit > 0 else logit * params.repeat_penalty
    return logit - count * params.frequency_penalty - params.presence_penalty


def penalize_row(logits: Float64Array, counts: Mapping[int, int], params: SamplingParams) -> None:
    """The same for a whole row [n_vocab], in place: the same numbers, bit for bit."""
    ids = np.fromiter(counts.keys(), np.int64, len(counts))
    times = np.fromiter(counts.values(), np.float64, len(counts))
    old = logits[ids]
    new = np.where(old > 0, old / params.repeat_penalty, old * params.repeat_penalty)
    logits[ids] = new - times * params.frequency_penalty - params.presence_penalty
