"""What a model is, as numbers: read once from the file's metadata, then never changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llamatrio.config import KVType as KVType


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. Angle of pair i at position p: `p * scale * base ** (-2 i / n_dims) / factors[i]`.

    style "norm" rotates the pairs (2i, 2i + 1); "neox" rotates (i, i + n_dims / 2).
    """

    n_dims: int
    style: Literal["norm", "neox"]
    base: float
    scale: float = 1.0
    """Linear position scale (1 / scaling factor)."""
    base_local: float = 0.0
    """Base on sliding-window layers, where it differs (gemma3: 10000, unscaled); 0 when it does not."""
    yarn_factor: float = 0.0
    """YaRN scaling factor; 0 when the model does not use YaRN."""
    n_ctx_orig: int = 0
    """Context length before YaRN's scaling."""
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    has_long_factors: bool = False
    """The file has factors for contexts of up to n_ctx_orig tokens and others for longer ones (rope.factors_name)."""
    attn_factor: float = 1.0
    """Factor on sine and cosine, YaRN's own magnitude included."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Hyperparameters of a decoder-only transformer. Counts are `n_*`, as in GGUF."""

    arch: str
    name: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    """Width of the feed-forward block; of one expert where there are experts."""
    norm_eps: float
    rope: RopeSpec
    activation: Literal["silu", "gelu", "swiglu_oai"]
    """Of the gate; swiglu_oai is gpt-oss's clamped form."""
    attn_scale: float
    """Factor on q·k, usually head_dim ** -0.5."""
    embd_scale: float = 1.0
    """Factor on the token embedding (gemma: sqrt(n_embd))."""
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    window: int = 0
    """A windowed layer sees the positions p - window < q <= p; 0 when no layer has a window."""
    windowed: tuple[bool, ...] = ()
    """Per layer: does it use the window. Empty when none does."""
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_post_norm: bool = False
    """gemma: RMS norm on the attention's and the feed-forward's output, before the residual."""
    has_sinks: bool = False
    """gpt-oss: a logit for each head that takes part in the softmax and attends to nothing."""
    has_all_biases: bool = False
    """gpt-oss: the attention's output, the router and the experts have biases, too."""
    is_qkv_fused: bool = False
    """phi3: one tensor has the rows of Q, K and V, in this order."""
    is_gate_up_fused: bool = False
    """phi3: one tensor, ffn_up, has the rows of gate and up, in this order."""
    n_expert: int = 0
    n_expert_used: int = 0
    tied_head: bool = False
    """No output.weight in the file: the token embedding is the head."""

    def is_windowed(self, layer: int) -> bool:
        """Whether `layer` attends within the window only."""
        return bool(self.windowed) and self.windowed[layer]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one cell's K and V of every layer become one record of bytes, for one backend.

    A record is token-major: layer 0's K row and V row, layer 1's, and so on, each padded by the backend as
    `k_row_bytes` and `v_row_bytes` say. Records of two layouts are never mixed: `name` goes into the
    fingerprint of everything that is kept.
    """

    name: str
    n_layer: int
    k_row_bytes: int
    v_row_bytes: int

    @property
    def record_bytes(self) -> int:
        """Bytes of one cell: K and V of all layers."""
        return self.n_layer * (self.k_row_bytes + self.v_row_bytes)


def mixes_keys(type_k: KVType, head_dim: int) -> bool:
    """Whether queries and keys go through a Walsh-Hadamard transform of each block of 32 before keys are stored.

    It is orthogonal, so their products stay. But a block of q8_0 has one scale, and models have dimensions whose keys
    are always large: spread over their block, these cost the others no digits any more. llama.cpp does the same over
    64 dimensions or more, where these divide a head. A head of one block stays as it is there, and here.
    """
    return type_k == "q8_0" and head_dim >= 64
