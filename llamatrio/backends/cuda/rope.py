"""The table that the rope kernel reads: every scaling of positions that ModelSpec knows, worked out once in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamatrio.model.spec import RopeSpec

BETA_FAST, BETA_SLOW = 32.0, 1.0
"""Turns over the original context between which YaRN goes over from extrapolation to interpolation."""


class RopeTable(NamedTuple):
    """`turns` float32 [n_dims / 2, 2]: turns of pair i per position, as a high and a low part. `magnitude`: factor
    on the rotated values."""

    turns: NDArray[np.float32]
    magnitude: float


def rope_table(rope: RopeSpec, *, windowed: bool, factors: NDArray[np.float32] | None = None) -> RopeTable:
    """The table of one kind of layer. `factors` are the model's `rope_freqs.weight` [n_dims / 2], if it has them.

    A windowed layer of a model with a local base uses that base, unscaled (gemma3). YaRN after arXiv:2309.00071.
    """
    local = windowed and rope.base_local > 0
    pairs = np.arange(rope.n_dims // 2, dtype=np.float64)
    angle = (rope.base_local if local else rope.base) ** (-2.0 * pairs / rope.n_dims)
    if factors is not None:
        angle = angle / factors.astype(np.float64)
    if local:
        return RopeTable(_split(angle), 1.0)
    if rope.yarn_factor > 1:
        angle *= _yarn_scale(rope, pairs)
        return RopeTable(_split(angle), rope.attn_factor * (1.0 + 0.1 * math.log(rope.yarn_factor)))
    return RopeTable(_split(angle * rope.scale), rope.attn_factor)


def _yarn_scale(rope: RopeSpec, pairs: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 for the pairs that turn fast, 1 / factor for those that turn slowly, a ramp between."""

    def pair_of(turns: float) -> float:
        return rope.n_dims * math.log(rope.n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low = max(0, math.floor(pair_of(BETA_FAST)))
    high = min(rope.n_dims - 1, math.ceil(pair_of(BETA_SLOW)))
    kept = 1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)
    return kept + (1.0 - kept) / rope.yarn_factor


def _split(angle: NDArray[np.float64]) -> NDArray[np.float32]:
    turns = angle / (2 * math.pi)
    high = turns.astype(np.float32)
    return np.stack([high, (turns - high).astype(np.float32)], -1)
