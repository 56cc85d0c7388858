"""Rotary embedding as numbers: the angle of each pair per position."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from llamatrio.model.spec import RopeSpec

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]

FREQS_NAME = "rope_freqs.weight"
SHORT_FACTORS_NAME, LONG_FACTORS_NAME = "rope_factors_short.weight", "rope_factors_long.weight"


def factors_name(rope: RopeSpec, n_ctx: int) -> str:
    """The tensor with the factors of `rope_frequencies`, where the file has it, for sequences of up to n_ctx tokens.

    As in llama.cpp the size of the context decides, not the length of a text: what is cached must fit what follows.
    """
    if not rope.has_long_factors:
        return FREQS_NAME
    return LONG_FACTORS_NAME if n_ctx > rope.n_ctx_orig else SHORT_FACTORS_NAME


def rope_frequencies(rope: RopeSpec, factors: Float32Array | None = None, *, windowed: bool = False) -> Float64Array:
    """Angle of each pair at position 1: float64 [n_dims / 2]. At position p it is p times this.

    Everything that depends on the pair alone is in it: base, linear scale, the factors tensor
    (`factors_name`, float32 [n_dims / 2]) and YaRN's ramp between interpolation and extrapolation
    (https://arxiv.org/abs/2309.00071, section 3.2). Sine and cosine are to be multiplied by `rope.attn_factor`.
    Windowed layers of a model with a local base use that base, unscaled.
    """
    local = windowed and rope.base_local > 0.0
    base = rope.base_local if local else rope.base
    pair = np.arange(rope.n_dims // 2, dtype=np.float64)
    frequencies = base ** (-2.0 * pair / rope.n_dims)
    if factors is not None:
        if factors.shape != pair.shape:
            raise ValueError(f"expected {len(pair)} rope factors, not shape {factors.shape}")
        frequencies /= factors
    if local:
        return frequencies
    if rope.yarn_factor:
        kept = _yarn_ramp(rope, pair)
        return np.asarray(frequencies * (kept + (1.0 - kept) / rope.yarn_factor))
    return np.asarray(frequencies * rope.scale)


def _yarn_ramp(rope: RopeSpec, pair: Float64Array) -> Float64Array:
    """How much of each pair's frequency YaRN keeps: 1 for those that turn often within the original context."""

    def pair_with_turns(n_turns: float) -> float:
        wavelengths = rope.n_ctx_orig / (n_turns * 2.0 * math.pi)
        return rope.n_dims * math.log(wavelengths) / (2.0 * math.log(rope.base))

    low = max(0.0, math.floor(pair_with_turns(rope.yarn_beta_fast)))
    high = min(rope.n_dims - 1.0, math.ceil(pair_with_turns(rope.yarn_beta_slow)))
    return np.asarray(1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0))


def yarn_magnitude(factor: float) -> float:
    """Factor that YaRN puts on sine and cosine for a scaling factor of `factor` (section 3.4 of the paper)."""
    return 1.0 if factor <= 1.0 else 1.0 + 0.1 * math.log(factor)


def llama3_rope_factors(
    head_dim: int, base: float, factor: float, low: float, high: float, n_ctx_orig: int
) -> Float32Array:
    """Llama 3's scaling as divisors of the frequencies: float32 [head_dim / 2].

    Pairs that turn more than `high` times within the original context keep their frequency (1); those that turn
    fewer than `low` times are slowed by `factor`; between the two, the frequency is interpolated.
    """
    frequencies = base ** (-2.0 * np.arange(head_dim // 2, dtype=np.float64) / head_dim)
    turns = n_ctx_orig * frequencies / (2.0 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / (kept + (1.0 - kept) / factor), dtype=np.float32)
