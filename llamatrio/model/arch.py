"""From a file's metadata to a ModelSpec. What only an architecture's name says is in families.py."""

from __future__ import annotations

import math

import numpy as np

from llamatrio.errors import GGUFError, UnsupportedModelError
from llamatrio.model.families import FAMILIES, Family
from llamatrio.model.gguf import GGUFFile, Metadata
from llamatrio.model.rope import LONG_FACTORS_NAME, SHORT_FACTORS_NAME, yarn_magnitude
from llamatrio.model.spec import ModelSpec, RopeSpec
from llamatrio.model.tensors import check_tensors


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """The hyperparameters of the model in `file`; its tensors are checked to match them.

    Raises:
        UnsupportedModelError: an architecture, tensor type or feature that llamatrio does not have, by name.
        GGUFError: a key or tensor is missing or contradicts the others.
    """
    arch = file.metadata.string("general.architecture")
    family = FAMILIES.get(arch)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(f"the architecture {arch!r} is not supported (supported: {known})")
    _refuse_unusable(file)
    spec = _read_spec(file, arch, family)
    check_tensors(file, spec)
    return spec


def _refuse_unusable(file: GGUFFile) -> None:
    n_parts = file.metadata.integer("split.count", 1)
    if n_parts > 1:
        raise UnsupportedModelError(f"the model is split over {n_parts} files; merge them first")
    if not file.tensors:
        raise GGUFError("the file holds a vocabulary only: it has no tensors")


def _read_spec(file: GGUFFile, arch: str, family: Family) -> ModelSpec:
    keys = _Keys(file.metadata, arch)
    n_embd, n_head, n_layer = keys.count("embedding_length"), keys.heads("head_count"), keys.count("block_count")
    n_head_kv = keys.heads("head_count_kv", n_head)
    if n_head % n_head_kv:
        raise GGUFError(f"{n_head} heads cannot share {n_head_kv} key-value heads ({arch}.attention.head_count_kv)")
    if n_layer > len(file.tensors):
        raise GGUFError(f"{arch}.block_count is {n_layer}, but the file has {len(file.tensors)} tensors")
    head_dim = _head_dim(keys, n_embd, n_head)
    window = _window(keys, family)
    n_expert, n_expert_used = _experts(keys, family)
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
        n_ff=_n_ff(keys, n_expert_used),
        norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        rope=_read_rope(file, keys, family, head_dim, has_windows=window > 0),
        activation=family.activation,
        attn_scale=_attn_scale(family, n_layer, n_embd // n_head, head_dim),
        embd_scale=math.sqrt(n_embd) if family.scales_embedding else 1.0,
        attn_softcap=keys.cap("attn_logit_softcapping", family.attn_softcap),
        final_softcap=keys.cap("final_logit_softcapping", family.final_softcap),
        window=window,
        windowed=_windowed_layers(keys, family, n_layer) if window else (),
        has_qkv_bias=family.has_all_biases or "blk.0.attn_q.bias" in file.tensors,
        has_qk_norm=family.has_qk_norm,
        has_post_norm=family.has_post_norm,
        has_sinks=family.has_sinks,
        has_all_biases=family.has_all_biases,
        is_qkv_fused=family.may_be_fused and "blk.0.attn_qkv.weight" in file.tensors,
        is_gate_up_fused=family.may_be_fused,
        n_expert=n_expert,
        n_expert_used=n_expert_used,
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

    def cap(self, key: str, default: float | None) -> float:
        """A soft cap, 0 for none; with the default None the architecture has no such key."""
        value = 0.0 if default is None else self.number(key, default)
        if value < 0.0:
            raise GGUFError(f"key {self.name(key)!r} should not be negative, not {value}")
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


def _attn_scale(family: Family, n_layer: int, n_embd_per_head: int, head_dim: int) -> float:
    by_share = n_layer == family.n_layer_scaled_by_share
    return float((n_embd_per_head if by_share else head_dim) ** -0.5)


def _experts(keys: _Keys, family: Family) -> tuple[int, int]:
    """How many experts there are, and how many of them a row takes."""
    if not family.has_experts:
        if keys.count("expert_count", 0):
            raise UnsupportedModelError(
                f"mixtures of experts are not supported in this architecture ({keys.arch}.expert_count is set)"
            )
        return 0, 0
    n_expert, n_used = keys.count("expert_count"), keys.count("expert_used_count")
    if n_used > n_expert:
        raise GGUFError(f"key {keys.name('expert_used_count')!r} is {n_used}, but there are {n_expert} experts")
    if keys.number("expert_weights_scale", 0.0) not in (0.0, 1.0):
        raise UnsupportedModelError(f"scaled weights of experts are not supported ({keys.arch}.expert_weights_scale)")
    return n_expert, n_used


def _n_ff(keys: _Keys, n_expert_used: int) -> int:
    """Width of the feed-forward block, or of one expert: older files give that of all experts of a row together."""
    if not n_expert_used or not keys.has("expert_feed_forward_length"):
        return keys.count("feed_forward_length") // max(1, n_expert_used)
    return keys.count("expert_feed_forward_length")


def _n_vocab(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise GGUFError("the file has no tensor 'token_embd.weight'")
    return embedding.shape[0]


def _window(keys: _Keys, family: Family) -> int:
    """0 where no layer has one. phi3 files may give a window, but every layer attends to everything."""
    if not family.global_every:
        return 0
    name = keys.name("attention.sliding_window")
    window = keys.metadata.integer(name, family.window)
    if window < 0:
        raise GGUFError(f"key {name!r} should not be negative, not {window}")
    return window


def _windowed_layers(keys: _Keys, family: Family, n_layer: int) -> tuple[bool, ...]:
    name = keys.name("attention.sliding_window_pattern")
    pattern = keys.metadata.get(name, family.global_every)
    if isinstance(pattern, np.ndarray) and len(pattern) >= n_layer:
        return tuple(bool(is_windowed) for is_windowed in pattern[:n_layer])
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise GGUFError(f"key {name!r} fits no {n_layer} layers")
    return tuple(layer % pattern < pattern - 1 for layer in range(n_layer))


def _read_rope(file: GGUFFile, keys: _Keys, family: Family, head_dim: int, *, has_windows: bool) -> RopeSpec:
    n_dims = keys.count("rope.dimension_count", head_dim)
    if n_dims % 2 or n_dims > head_dim:
        raise GGUFError(f"key {keys.name('rope.dimension_count')!r} is {n_dims}: odd, or above {head_dim}")
    kind = keys.metadata.string(keys.name("rope.scaling.type"), "linear")
    has_long_factors = family.has_long_factors and (
        LONG_FACTORS_NAME in file.tensors or SHORT_FACTORS_NAME in file.tensors
    )
    if kind not in ("none", "linear", "yarn") and not (kind == "longrope" and has_long_factors):
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
        base_local=_base_local(keys, family, base) if has_windows else 0.0,
        has_long_factors=has_long_factors,
        yarn_factor=factor if kind == "yarn" else 0.0,
        n_ctx_orig=keys.count("rope.scaling.original_context_length", keys.count("context_length")),
        yarn_beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        yarn_beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
        attn_factor=keys.positive("rope.scaling.attn_factor", 1.0)
        * (yarn_magnitude(factor) if kind == "yarn" else 1.0),
    )


def _base_local(keys: _Keys, family: Family, base: float) -> float:
    """0 where windowed layers rotate as all others do."""
    if family.base_local is not None:
        return keys.positive("rope.freq_base_swa", family.base_local)
    if keys.positive("rope.freq_base_swa", base) != base:
        raise UnsupportedModelError(f"windowed layers with a rope of their own ({keys.arch}.rope.freq_base_swa)")
    return 0.0
