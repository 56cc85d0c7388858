"""The transformer in plain NumPy: slow, and the oracle that every backend is tested against.

Weights are dequantized and nothing else is rounded, except K and V where a KV type is asked for. The
architecture's facts come from ModelSpec; all that the CPU backend runs goes through the same lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatrio.model.gguf import GGUFFile
from llamatrio.model.quants import dequantize
from llamatrio.model.rope import factors_name, rope_frequencies
from llamatrio.model.spec import KVType, ModelSpec, mixes_keys

Array = NDArray[np.floating[Any]]

Q8_BLOCK = 32


def dequantized_tensors(file: GGUFFile) -> dict[str, NDArray[np.float32]]:
    """Every tensor of `file` as float32, shaped [outputs, inputs] or [n]."""
    return {name: dequantize(file.data(name), info.type).reshape(info.shape) for name, info in file.tensors.items()}


def reference_logits(
    spec: ModelSpec,
    tensors: Mapping[str, Array],
    tokens: NDArray[np.integer[Any]],
    *,
    kv_type: KVType | None = None,
    dtype: type[np.floating[Any]] = np.float64,
) -> Array:
    """Logits [T, n_vocab] of every position of `tokens` [T], computed in `dtype`.

    kv_type rounds K and V as a cache of that type would; None keeps them exact.
    """
    weights = {name: np.asarray(value, dtype) for name, value in tensors.items()}
    positions = np.arange(len(tokens), dtype=dtype)
    x = weights["token_embd.weight"][tokens] * dtype(spec.embd_scale)
    for layer in range(spec.n_layer):
        w = {name.removeprefix(f"blk.{layer}."): value for name, value in weights.items()}
        x = x + _attention_block(spec, w, x, positions, layer, kv_type)
        x = x + _feed_forward_block(spec, w, x)
    head = weights["token_embd.weight" if spec.tied_head else "output.weight"]
    logits = rms_norm(x, weights["output_norm.weight"], spec.norm_eps) @ head.T
    return soft_cap(logits, spec.final_softcap)


def _attention_block(
    spec: ModelSpec, w: Mapping[str, Array], x: Array, positions: Array, layer: int, kv_type: KVType | None
) -> Array:
    h = rms_norm(x, w["attn_norm.weight"], spec.norm_eps)
    q, k, v = _queries_keys_values(spec, w, h)
    if spec.has_qk_norm:
        q = rms_norm(q, w["attn_q_norm.weight"], spec.norm_eps)
        k = rms_norm(k, w["attn_k_norm.weight"], spec.norm_eps)
    factors = _rope_factors(spec, w, len(positions))
    angles = positions[:, None] * rope_frequencies(spec.rope, factors, windowed=spec.is_windowed(layer)).astype(x.dtype)
    q, k = rotate(q, angles, spec), rotate(k, angles, spec)
    if kv_type is not None:
        k, v = key_round(k, kv_type), kv_round(v, kv_type)
    out = attend(q, k, v, spec, window=spec.window if spec.is_windowed(layer) else 0)
    out = out.reshape(len(x), -1) @ w["attn_output.weight"].T
    return rms_norm(out, w["post_attention_norm.weight"], spec.norm_eps) if spec.has_post_norm else out


def _feed_forward_block(spec: ModelSpec, w: Mapping[str, Array], x: Array) -> Array:
    h = rms_norm(x, w["ffn_norm.weight"], spec.norm_eps)
    if spec.is_gate_up_fused:
        gate, up = np.split(h @ w["ffn_up.weight"].T, 2, axis=1)
    else:
        gate, up = h @ w["ffn_gate.weight"].T, h @ w["ffn_up.weight"].T
    out = (activate(gate, spec.activation) * up) @ w["ffn_down.weight"].T
    return rms_norm(out, w["post_ffw_norm.weight"], spec.norm_eps) if spec.has_post_norm else out


def _queries_keys_values(spec: ModelSpec, w: Mapping[str, Array], h: Array) -> tuple[Array, ...]:
    """[T, heads, head_dim] each"""
    if not spec.is_qkv_fused:
        return tuple(_project(spec, w, name, h) for name in ("attn_q", "attn_k", "attn_v"))
    together = (h @ w["attn_qkv.weight"].T).reshape(len(h), -1, spec.head_dim)
    return tuple(np.split(together, [spec.n_head, spec.n_head + spec.n_head_kv], axis=1))


def _project(spec: ModelSpec, w: Mapping[str, Array], name: str, h: Array) -> Array:
    """[T, heads, head_dim]"""
    out = h @ w[f"{name}.weight"].T
    if spec.has_qkv_bias:
        out = out + w[f"{name}.bias"]
    return out.reshape(len(h), -1, spec.head_dim)


def _rope_factors(spec: ModelSpec, w: Mapping[str, Array], n_ctx: int) -> NDArray[np.float32] | None:
    factors = w.get(factors_name(spec.rope, n_ctx))
    return None if factors is None else factors.astype(np.float32)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / rms(x) * weight over the last axis."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight)


def activate(gate: Array, activation: str) -> Array:
    """SiLU, or GELU in its tanh form (as llama.cpp computes it)."""
    if activation == "silu":
        return np.asarray(gate / (1 + np.exp(-gate)))
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return np.asarray((0.5 * gate * (1 + np.tanh(inner))).astype(gate.dtype))


def soft_cap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap); 0 means no cap."""
    return np.asarray(cap * np.tanh(x / cap)) if cap else x


def rotate(x: Array, angles: Array, spec: ModelSpec) -> Array:
    """Rotates the pairs of x [T, heads, head_dim] by angles [T, n_dims / 2]; dimensions beyond n_dims stay."""
    cos = (np.cos(angles) * spec.rope.attn_factor)[:, None, :].astype(x.dtype)
    sin = (np.sin(angles) * spec.rope.attn_factor)[:, None, :].astype(x.dtype)
    n_dims, out = spec.rope.n_dims, x.copy()
    if spec.rope.style == "norm":
        first, second = slice(0, n_dims, 2), slice(1, n_dims, 2)
    else:
        first, second = slice(0, n_dims // 2), slice(n_dims // 2, n_dims)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def attend(q: Array, k: Array, v: Array, spec: ModelSpec, *, window: int) -> Array:
    """Causal attention of q [T, n_head, d] over k and v [T, n_head_kv, d]; window 0 sees every earlier position."""
    group = spec.n_head // spec.n_head_kv
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = soft_cap(np.einsum("qhd,khd->hqk", q, k) * q.dtype.type(spec.attn_scale), spec.attn_softcap)
    ahead = np.arange(len(k))[None, :] - np.arange(len(q))[:, None]
    hidden = ahead > 0
    if window:
        hidden |= ahead <= -window
    scores = np.where(hidden, -np.inf, scores)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(np.einsum("hqk,khd->qhd", p / p.sum(axis=-1, keepdims=True), v))


def kv_round(x: Array, kv_type: KVType) -> Array:
    """x as it comes back from a cache of `kv_type`: half floats, or blocks of 32 with a half-float scale."""
    if kv_type == "f16":
        return x.astype(np.float16).astype(x.dtype)
    blocks = x.reshape(-1, Q8_BLOCK).astype(np.float32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    scale = (largest * np.float32(1 / 127)).astype(np.float16).astype(np.float32)
    quants = np.clip(np.rint(blocks * np.divide(1, scale, where=scale > 0, out=np.zeros_like(scale))), -127, 127)
    return np.asarray((quants * scale).reshape(x.shape).astype(x.dtype))


def key_round(x: Array, kv_type: KVType) -> Array:
    """Keys [..., head_dim] as they come back: mixed ones are rounded after the transform."""
    if not mixes_keys(kv_type, x.shape[-1]):
        return kv_round(x, kv_type)
    return hadamard_blocks(kv_round(hadamard_blocks(x), kv_type))


def hadamard_blocks(x: Array) -> Array:
    """Each block of 32 of x [..., n] times the Walsh-Hadamard matrix over sqrt(32), which is its own inverse."""
    matrix = np.ones((1, 1), x.dtype)
    while len(matrix) < Q8_BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray((x.reshape(-1, Q8_BLOCK) @ (matrix / np.sqrt(x.dtype.type(Q8_BLOCK)))).reshape(x.shape))
