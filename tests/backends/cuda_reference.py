"""NumPy references of the CUDA kernels, by the kernels' names: plain formulas in float64."""

from __future__ import annotations

import numpy as np

META = np.dtype([("scale", "<f4"), ("sum", "<i2", 2)])
"""A block's entry beside int8 quants: emit.cuh's BlockMeta."""


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rms_norm(x: np.ndarray, delta: np.ndarray | None, weight: np.ndarray, eps: float) -> np.ndarray:
    return rms(x if delta is None else x + delta, eps) * weight


def post_norm(x: np.ndarray, delta: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x + rms(delta, eps) * weight


def glu(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    gate, up = gate.astype(np.float64), up.astype(np.float64)
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if activation == "gelu":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 blocks of 32 and their META; halves are rounded to even, in float32 as on the device."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    top = np.abs(blocks).max(-1)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    q = np.rint(blocks * inverse[..., None]).astype(np.int8)
    meta = np.zeros(top.shape, META)
    meta["scale"] = top / np.float32(127)
    meta["sum"] = q.reshape(*top.shape, 2, 16).sum(-1, dtype=np.int16)
    return q.reshape(x.shape), meta


def dequantize_rows(q: np.ndarray, meta: np.ndarray) -> np.ndarray:
    return (q.reshape(*meta.shape, 32) * meta["scale"][..., None].astype(np.float64)).reshape(q.shape)


def q8_row(x: np.ndarray, row_bytes: int) -> np.ndarray:
    """KV rows [n, width] as q8_0 rows of bytes: all int8 quants, then all f16 scales, padded."""
    q, meta = quantize_rows(x)
    out = np.zeros((len(x), row_bytes), np.uint8)
    scales = meta["scale"].astype(np.float16)
    out[:, : x.shape[1]] = q.view(np.uint8)
    out[:, x.shape[1] : x.shape[1] + 2 * scales.shape[1]] = scales.view(np.uint8)
    return out


def q8_row_values(rows: np.ndarray, width: int) -> np.ndarray:
    """What q8_0 KV rows mean."""
    q = rows[:, :width].view(np.int8).reshape(len(rows), -1, 32)
    scales = np.ascontiguousarray(rows[:, width : width + width // 16]).view(np.float16)
    return (q * scales[..., None].astype(np.float64)).reshape(len(rows), width)


def rope(x: np.ndarray, positions: np.ndarray, angles: np.ndarray, *, neox: bool, magnitude: float) -> np.ndarray:
    """Rotary embedding of heads x [rows, n_head, D]; `angles` [n_dims / 2] radians per position."""
    n = len(angles)
    theta = positions[:, None, None] * angles.astype(np.float64)
    a, b = (slice(0, n), slice(n, 2 * n)) if neox else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    out = x.astype(np.float64)
    out[..., a] = (x[..., a] * np.cos(theta) - x[..., b] * np.sin(theta)) * magnitude
    out[..., b] = (x[..., a] * np.sin(theta) + x[..., b] * np.cos(theta)) * magnitude
    return out


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, softcap: float = 0.0, sinks: np.ndarray | None = None
) -> np.ndarray:
    """One row's heads q [n_head, D] over the K and V [n, n_head_kv, D] that it sees."""
    group = len(q) // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, 1) for x in (k, v))
    scores = np.einsum("hd,nhd->hn", q.astype(np.float64), k) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    sink = np.full(len(q), -np.inf) if sinks is None else sinks.astype(np.float64)
    top = np.maximum(scores.max(-1), sink)
    p = np.exp(scores - top[:, None])
    return np.einsum("hn,nhd->hd", p, v) / (p.sum(-1) + np.exp(sink - top))[:, None]
