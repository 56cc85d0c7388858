"""From a file's metadata to a ModelSpec, and the check that its tensors are what the spec needs.

The facts of each architecture (rope style, norms, activation, windows) are llama.cpp's, from src/models/*.cpp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llamatrio.errors import GGUFError, UnsupportedModelError
from llamatrio.model.gguf import GGUFFile, Metadata
from llamatrio.model.quants import can_dequantize
from llamatrio.model.rope import yarn_magnitude
from llamatrio.model.spec import ModelSpec, RopeSpec

_LAYERS_OF_GEMMA3_27B = 62


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture's name says about a model, beyond its metadata."""

    rope_style: Literal["norm", "neox"]
    activation: Literal["silu", "gelu"] = "silu"
    has_qk_norm: bool = False
    has_post_norm: bool = False
    scales_embedding: bool = False
    global_every: int = 0
    """With a sliding window: every n-th layer attends to everything. 0: the architecture has no windows."""


_FAMILIES = {
    "llama": _Family(rope_style="norm"),
    "qwen2": _Family(rope_style="neox"),
    "qwen3": _Family(rope_style="neox", has_qk_norm=True),
    "gemma3": _Family(
        rope_style="neox",
        activation="gelu",
        has_qk_norm=True,
        has_post_norm=True,
        scales_embedding=True,
        global_every=6,
    ),
}


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """The hyperparameters of the model in `file`; its tensors are checked to match them.

    Raises:
        UnsupportedModelError: an architecture, tensor type or feature that llamatrio does not have, by name.
        GGUFError: a key or tensor is missing or contradicts the others.
    """
    arch = file.metadata.string("general.architecture")
    family = _FAMILIES.get(arch)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModelError(f"the architecture {arch!r} is not supported (supported: {known})")
    _refuse_unusable(file)
    spec = _read_spec(file, arch, family)
    _check_tensors(file, spec)
    return spec


def _refuse_unusable(file: GGUFFile) -> None:
    n_parts = file.metadata.integer("split.count", 1)
    if n_parts > 1:
        raise UnsupportedModelError(f"the model is split over {n_parts} files; merge them first")
    if not file.tensors:
        raise GGUFError("the file holds a vocabulary only: it has no tensors")


def _read_spec(file: GGUFFile, arch: str, family: _Family) -> ModelSpec:
    keys = _Keys(file.metadata, arch)
    if keys.count("expert_count", 0):
        raise UnsupportedModelError(f"mixtures of experts are not supported ({arch}.expert_count is set)")
    n_embd, n_head, n_layer = keys.count("embedding_length"), keys.heads("head_count"), keys.count("block_count")
    n_head_kv = keys.heads("head_count_kv", n_head)
    if n_head % n_head_kv:
        raise GGUFError(f"{n_head} heads cannot share {n_head_kv} key-value heads ({arch}.attention.head_count_kv)")
    if n_layer > len(file.tensors):
        raise GGUFError(f"{arch}.block_count is {n_layer}, but the file has {len(file.tensors)} tensors")
    head_dim = _head_dim(keys, n_embd, n_head)
    windowed = _windowed_layers(keys, family, n_layer)
    return ModelSpec(
        arch=arch,
        name=file.metadata.string("general.name", arch),
        n_vocab=_n_vocab(file),
        n_ctx_train=keys.count("context_length"),
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_ff=keys.count("feed_forward_length"),
        norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        rope=_read_rope(keys, family, head_dim, has_windows=any(windowed)),
        activation=family.activation,
        attn_scale=_attn_scale(arch, n_layer, n_embd // n_head, head_dim),
        embd_scale=math.sqrt(n_embd) if family.scales_embedding else 1.0,
        final_softcap=keys.number("final_logit_softcapping", 0.0) if arch == "gemma3" else 0.0,
        window=keys.count("attention.sliding_window") if any(windowed) else 0,
        windowed=windowed if any(windowed) else (),
        has_qkv_bias="blk.0.attn_q.bias" in file.tensors,
        has_qk_norm=family.has_qk_norm,
        has_post_norm=family.has_post_norm,
        tied_head="output.weight" not in file.tensors,
    )


class _Keys:
    """Metadata under the architecture's prefix."""

    def __init__(self, metadata: Metadata, arch: str) -> None:
        self.metadata = metadata
        self.arch = arch

    def name(self, key: str) -> str:
        return f"{self.arch}.{key}"

    def has(self, key: str) -> bool:
        return self.name(key) in self.metadata

    def number(self, key: str, default: float | None = None) -> float:
        return self.metadata.number(self.name(key), default)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0.0:
            raise GGUFError(f"key {self.name(key)!r} should be above 0, not {value}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1 (or the default)."""
        value = self.metadata.integer(self.name(key), default)
        if value < 1 and value != default:
            raise GGUFError(f"key {self.name(key)!r} should be at least 1, not {value}")
        return value

    def heads(self, key: str, default: int | None = None) -> int:
        """A count that the file may give per layer; llamatrio wants the same for each."""
        name = f"attention.{key}"
        value = self.metadata.get(self.name(name))
        if not isinstance(value, np.ndarray):
            return self.count(name, default)
        if not len(value) or value.dtype.kind not in "iu" or value.min() != value.max() or value[0] < 1:
            raise UnsupportedModelError(f"layers that differ in {self.name(name)!r} are not supported")
        return int(value[0])


def _head_dim(keys: _Keys, n_embd: int, n_head: int) -> int:
    head_dim = keys.count("attention.key_length", max(1, n_embd // n_head))
    value_dim = keys.count("attention.value_length", max(1, n_embd // n_head))
    if head_dim != value_dim:
        raise UnsupportedModelError(f"keys of {head_dim} and values of {value_dim} dimensions are not supported")
    return head_dim


def _attn_scale(arch: str, n_layer: int, n_embd_per_head: int, head_dim: int) -> float:
    # Gemma 3 27B alone scales by its embedding's share of a head (query_pre_attn_scalar in its configuration).
    if arch == "gemma3" and n_layer == _LAYERS_OF_GEMMA3_27B:
        head_dim = n_embd_per_head
    return float(head_dim**-0.5)


def _n_vocab(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise GGUFError("the file has no tensor 'token_embd.weight'")
    return embedding.shape[0]


def _windowed_layers(keys: _Keys, family: _Family, n_layer: int) -> tuple[bool, ...]:
    if not family.global_every or not keys.has("attention.sliding_window"):
        return (False,) * n_layer
    if keys.metadata.integer(keys.name("attention.sliding_window")) == 0:
        return (False,) * n_layer
    pattern = keys.metadata.get(keys.name("attention.sliding_window_pattern"), family.global_every)
    if isinstance(pattern, np.ndarray) and len(pattern) >= n_layer:
        return tuple(bool(is_windowed) for is_windowed in pattern[:n_layer])
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise GGUFError(f"key {keys.name('attention.sliding_window_pattern')!r} fits no {n_layer} layers")
    return tuple(layer % pattern < pattern - 1 for layer in range(n_layer))


def _read_rope(keys: _Keys, family: _Family, head_dim: int, *, has_windows: bool) -> RopeSpec:
    n_dims = keys.count("rope.dimension_count", head_dim)
    if n_dims % 2 or n_dims > head_dim:
        raise GGUFError(f"key {keys.name('rope.dimension_count')!r} is {n_dims}: odd, or above {head_dim}")
    kind = keys.metadata.string(keys.name("rope.scaling.type"), "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"the rope scaling {kind!r} is not supported")
    base = keys.positive("rope.freq_base", 10000.0)
    if base <= 1.0:
        raise GGUFError(f"key {keys.name('rope.freq_base')!r} should be above 1, not {base}")
    # The older key has the same meaning. A factor of 0 stands for none.
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    if factor < 0.0:
        raise GGUFError(f"key {keys.name('rope.scaling.factor')!r} should not be negative")
    return RopeSpec(
        n_dims=n_dims,
        style=family.rope_style,
        base=base,
        scale=1.0 if kind == "none" else 1.0 / factor,
        base_local=keys.positive("rope.freq_base_swa", 10000.0) if has_windows else 0.0,
        yarn_factor=factor if kind == "yarn" else 0.0,
        n_ctx_orig=keys.count("rope.scaling.original_context_length", keys.count("context_length")),
        yarn_beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        yarn_beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
        attn_factor=keys.positive("rope.scaling.attn_factor", 1.0)
        * (yarn_magnitude(factor) if kind == "yarn" else 1.0),
    )


def _check_tensors(file: GGUFFile, spec: ModelSpec) -> None:
    """Every tensor that the spec needs is there, in its shape and in a type we can read, and no other is."""
    expected = tensor_shapes(spec)
    for name, shape in expected.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise GGUFError(f"the file has no tensor {name!r}")
        if tensor.shape != shape:
            raise GGUFError(f"tensor {name!r} has the shape {list(tensor.shape)}, not {list(shape)}")
        if not can_dequantize(tensor.type):
            raise UnsupportedModelError(f"tensor {name!r} has the type {tensor.type.name}, which is not supported")
    for name, tensor in file.tensors.items():
        if name == "rope_freqs.weight":
            if tensor.shape != (spec.rope.n_dims // 2,) or not can_dequantize(tensor.type):
                raise GGUFError(f"tensor {name!r} is not {spec.rope.n_dims // 2} numbers")
        elif name not in expected:
            raise UnsupportedModelError(f"tensor {name!r} is not known in the architecture {spec.arch!r}")


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes (NumPy order: [outputs, inputs]) of the tensors of a model.

    `rope_freqs.weight`, float32 [rope.n_dims / 2], may come in addition.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (spec.n_vocab, spec.n_embd),
        "output_norm.weight": (spec.n_embd,),
    }
    if not spec.tied_head:
        shapes["output.weight"] = (spec.n_vocab, spec.n_embd)
    for layer in range(spec.n_layer):
        shapes.update({f"blk.{layer}.{name}": shape for name, shape in _layer_shapes(spec).items()})
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    n_q, n_kv = spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (spec.n_embd,),
        "attn_q.weight": (n_q, spec.n_embd),
        "attn_k.weight": (n_kv, spec.n_embd),
        "attn_v.weight": (n_kv, spec.n_embd),
        "attn_output.weight": (spec.n_embd, n_q),
        "ffn_norm.weight": (spec.n_embd,),
        "ffn_gate.weight": (spec.n_ff, spec.n_embd),
        "ffn_up.weight": (spec.n_ff, spec.n_embd),
        "ffn_down.weight": (spec.n_embd, spec.n_ff),
    }
    if spec.has_qkv_bias:
        shapes |= {"attn_q.bias": (n_q,), "attn_k.bias": (n_kv,), "attn_v.bias": (n_kv,)}
    if spec.has_qk_norm:
        shapes |= {"attn_q_norm.weight": (spec.head_dim,), "attn_k_norm.weight": (spec.head_dim,)}
    if spec.has_post_norm:
        shapes |= {"post_attention_norm.weight": (spec.n_embd,), "post_ffw_norm.weight": (spec.n_embd,)}
    return shapes
