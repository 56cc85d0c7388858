"""The end of the sampling chain: of candidates, best first, the ones that top_p and min_p leave, and a draw from them.

Randomness is a function of (seed, position), not a stream: a sequence draws the same number at the same position
alone, in any batch, on any lane, and after a restore.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamatrio.sched.types import FloatArray, SamplingParams

Float64Array = NDArray[np.float64]

MAX_CANDIDATES = 256
"""Most of a row's likeliest tokens that a device reports."""
_LEAST = float(np.finfo(np.float64).min)
_MASK = (1 << 64) - 1


class Candidates(NamedTuple):
    """Tokens that may be chosen, best first (of equal logits, the lower id first). The best one's weight is 1."""

    ids: list[int]
    logits: list[float]
    cut: float = 0.0
    """Weight of the tokens left out that top_p counts before it or min_p drops them."""
    beyond: float = 0.0
    """Weight, at the request's temperature, of tokens that could be drawn but that this draw does not reach."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for this seed and position: two rounds of SplitMix64 (Steele, Lea and Flood, 2014)."""
    return (_splitmix(_splitmix(seed & _MASK) ^ (position & _MASK)) >> 11) * 2.0**-53


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def likeliest(logits: Float64Array, floor: float) -> NDArray[np.intp]:
    """Ids of the logits from `floor` on, best first, of equal ones the lower first; -inf is none of them."""
    ids = np.flatnonzero(logits >= max(floor, _LEAST))
    return ids[np.argsort(-logits[ids], kind="stable")]


def kth_largest(logits: Float64Array | FloatArray, k: int) -> float:
    """The k-th largest logit."""
    at = max(len(logits) - k, 0)
    return float(np.partition(logits, at)[at])


def candidates_of_all(logits: Float64Array, best: float, params: SamplingParams, draw: float) -> Candidates:
    """The candidates where top_k leaves all: as much of the sorted row as top_p, min_p and the draw can reach.

    Sorting a whole vocabulary, and working on it in Python, takes longer than many a model's step.
    """
    floor = best + math.log(min(params.min_p, 1.0)) - 1e-9 if params.min_p > 0 else _LEAST
    cut = beyond = 0.0
    if params.top_p < 1:
        weights = np.exp(logits - best)
        if np.count_nonzero(logits >= floor) > MAX_CANDIDATES:
            floor = max(floor, _floor_of_mass(logits, weights, params.top_p, params.n_probs))
        cut = float(weights[logits < floor].sum())
    elif params.min_p <= 0:
        with np.errstate(over="ignore"):
            weights = np.exp((logits - best) / params.temperature)
        floor = _floor_of_mass(logits, weights, draw, params.n_probs)
        beyond = float(weights[logits < floor].sum())
    ids = likeliest(logits, floor)
    return Candidates(ids.tolist(), logits[ids].tolist(), cut, beyond)


def _floor_of_mass(logits: Float64Array, weights: Float64Array, share: float, n_least: int) -> float:
    """A logit such that the tokens from there on have more than this share of the weight, and are n_least at least."""
    enough = (share + 1e-9) * float(weights.sum())
    n = max(n_least, MAX_CANDIDATES)
    while n < len(logits):
        floor = kth_largest(logits, n)
        if float(weights[logits >= floor].sum()) > enough:
            return floor
        n *= 8
    return _LEAST


def choose(candidates: Candidates, params: SamplingParams, draw: float) -> tuple[int, list[float]]:
    """Index of the chosen candidate, and the probabilities of those that top_p and min_p left (a prefix)."""
    if params.temperature <= 0 or len(candidates.ids) == 1:
        return 0, [1.0]
    n = len(candidates.ids)
    if params.top_p < 1 or params.min_p > 0:
        n = _kept(_softmax(candidates.logits, 1.0, candidates.cut), params)
    probs = _softmax(candidates.logits[:n], params.temperature, candidates.beyond)
    for index, prob in enumerate(probs):
        draw -= prob
        if draw < 0:
            return index, probs
    return n - 1, probs


def _kept(probs: Sequence[float], params: SamplingParams) -> int:
    """How many of the likeliest top_p and min_p leave."""
    n = _kept_by_top_p(probs, params.top_p)
    floor = min(params.min_p, 1.0) * probs[0]
    while n > 1 and probs[n - 1] < floor:
        n -= 1
    return n


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
