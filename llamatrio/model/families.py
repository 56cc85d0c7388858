"""What an architecture's name says about a model, beyond its metadata.

The facts (rope style, norms, activations, windows, defaults of keys) are llama.cpp's, from src/models/*.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. Where a value is the default of a key, None means that the architecture has no such key."""

    rope_style: Literal["norm", "neox"] = "neox"
    activation: Literal["silu", "gelu", "swiglu_oai"] = "silu"
    has_qk_norm: bool = False
    has_post_norm: bool = False
    has_sinks: bool = False
    has_all_biases: bool = False
    has_experts: bool = False
    may_be_fused: bool = False
    """phi3: gate and up are one tensor, and so may Q, K and V be."""
    has_long_factors: bool = False
    """phi3: rope factors for short and for long contexts."""
    scales_embedding: bool = False
    global_every: int = 0
    """With a sliding window: every n-th layer attends to everything. 0: the architecture has no windows."""
    window: int | None = None
    """Default of the window; None where the file must say. 0: no layer has one."""
    base_local: float | None = None
    """Default of the windowed layers' own rope base, unscaled; None where they rotate as all others do."""
    attn_softcap: float | None = None
    final_softcap: float | None = None
    n_layer_scaled_by_share: int = 0
    """The size of the model (by its layers) that scales queries by the embedding's share of a head, as its
    query_pre_attn_scalar says, which files do not carry."""
    ffn_norm: str = "ffn_norm"
    """Name of the norm before the feed-forward block."""


FAMILIES = {
    "llama": Family(rope_style="norm"),
    "qwen2": Family(),
    "qwen3": Family(has_qk_norm=True),
    "qwen3moe": Family(has_qk_norm=True, has_experts=True),
    "phi3": Family(may_be_fused=True, has_long_factors=True),
    "gemma2": Family(
        activation="gelu",
        has_post_norm=True,
        scales_embedding=True,
        global_every=2,
        window=4096,
        attn_softcap=50.0,
        final_softcap=30.0,
        n_layer_scaled_by_share=46,
    ),
    "gemma3": Family(
        activation="gelu",
        has_qk_norm=True,
        has_post_norm=True,
        scales_embedding=True,
        global_every=6,
        window=0,
        base_local=10000.0,
        final_softcap=0.0,
        n_layer_scaled_by_share=62,
    ),
    "gpt-oss": Family(
        activation="swiglu_oai",
        has_sinks=True,
        has_all_biases=True,
        has_experts=True,
        global_every=2,
        ffn_norm="post_attention_norm",  # it follows the attention
    ),
}
