from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrio.errors import GGUFError, ModelError, UnsupportedModelError
from llamatrio.model.arch import spec_from_gguf
from llamatrio.model.gguf import GGMLType, open_gguf
from llamatrio.model.rope import factors_name, llama3_rope_factors, rope_frequencies, yarn_magnitude
from llamatrio.model.spec import ModelSpec, RopeSpec
from llamatrio.model.tensors import tensor_shapes
from tests.helpers_gguf import RawTensor, tiny_model, tiny_vocabulary, write_gguf

GOLDEN = Path(__file__).parents[1] / "golden/models/more"


def spec_of(path: Path, arch: str = "llama", **options: Any) -> ModelSpec:
    with open_gguf(tiny_model(path / "tiny.gguf", arch, **options)) as file:
        return spec_from_gguf(file)


def refusal(path: Path, kind: type[ModelError], arch: str = "llama", **options: Any) -> str:
    with pytest.raises(kind) as caught:
        spec_of(path, arch, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_llama(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert (spec.arch, spec.n_vocab, spec.n_layer, spec.n_head, spec.n_head_kv) == ("llama", 288, 2, 4, 2)
    assert (spec.head_dim, spec.n_ff, spec.n_ctx_train, spec.activation) == (32, 96, 512, "silu")
    assert spec.rope == RopeSpec(n_dims=32, style="norm", base=10000.0, n_ctx_orig=512)
    assert spec.attn_scale == pytest.approx(32**-0.5)
    assert spec.tied_head
    assert (spec.window, spec.windowed, spec.embd_scale) == (0, (), 1.0)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    assert not spec_of(tmp_path, tied_head=False).tied_head


def test_qwen(tmp_path: Path) -> None:
    qwen2, qwen3 = spec_of(tmp_path, "qwen2"), spec_of(tmp_path, "qwen3")
    assert (qwen2.rope.style, qwen2.has_qkv_bias, qwen2.has_qk_norm) == ("neox", True, False)
    assert (qwen3.rope.style, qwen3.has_qkv_bias, qwen3.has_qk_norm) == ("neox", False, True)


def test_gemma3(tmp_path: Path) -> None:
    scaled = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    spec = spec_of(tmp_path, "gemma3", n_layer=7, metadata=scaled)
    assert spec.windowed == (True, True, True, True, True, False, True)
    assert spec.window == 16
    assert (spec.activation, spec.has_qk_norm, spec.has_post_norm) == ("gelu", True, True)
    assert spec.embd_scale == 8.0
    assert (spec.rope.base_local, spec.rope.scale) == (10000.0, 0.125)


def test_gemma3_without_a_window(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "gemma3", metadata={"gemma3.attention.sliding_window": None})
    assert (spec.window, spec.windowed, spec.rope.base_local) == (0, (), 0.0)


def test_window_patterns(tmp_path: Path) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    assert spec_of(tmp_path, "gemma3", n_layer=4, metadata={key: 2}).windowed == (True, False, True, False)
    listed = np.array([False, True, True])
    assert spec_of(tmp_path, "gemma3", n_layer=3, metadata={key: listed}).windowed == (False, True, True)
    assert key in refusal(tmp_path, GGUFError, "gemma3", n_layer=4, metadata={key: listed})


def test_query_scale_of_the_largest_gemma3(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "gemma3", n_layer=62, n_embd=32, n_head=2, n_head_kv=1, head_dim=32)
    assert spec.attn_scale == pytest.approx((32 / 2) ** -0.5)


def test_rope_scaling_kinds(tmp_path: Path) -> None:
    def rope(**keys: Any) -> RopeSpec:
        return spec_of(tmp_path, metadata={f"llama.rope.{key}": value for key, value in keys.items()}).rope

    assert rope(**{"scaling.factor": 4.0}).scale == 0.25
    assert rope(scale_linear=2.0).scale == 0.5
    assert rope(**{"scaling.type": "none", "scaling.factor": 4.0}).scale == 1.0
    yarn = rope(**{"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 128})
    assert (yarn.yarn_factor, yarn.n_ctx_orig) == (4.0, 128)
    assert yarn.attn_factor == pytest.approx(1 + 0.1 * math.log(4))
    assert "'longrope'" in refusal(tmp_path, UnsupportedModelError, metadata={"llama.rope.scaling.type": "longrope"})


def golden_spec(model: str) -> ModelSpec:
    with open_gguf(GOLDEN / f"{model}.gguf") as file:
        return spec_from_gguf(file)


def test_gemma2(tmp_path: Path) -> None:
    spec = golden_spec("tiny-gemma2-f16")
    assert (spec.attn_softcap, spec.final_softcap) == (50.0, 30.0)
    assert (spec.window, spec.windowed, spec.rope.base_local) == (32, (True, False, True, False), 0.0)
    assert (spec.activation, spec.has_qk_norm, spec.has_post_norm) == ("gelu", False, True)
    assert spec.embd_scale == pytest.approx(128**0.5)
    silent = spec_of(tmp_path, "gemma2", metadata={"gemma2.attention.sliding_window": None})
    assert (silent.attn_softcap, silent.final_softcap, silent.window) == (50.0, 30.0, 4096)


def test_query_scale_of_the_largest_gemma2(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "gemma2", n_layer=46, n_embd=32, n_head=2, n_head_kv=1, head_dim=32)
    assert spec.attn_scale == pytest.approx((32 / 2) ** -0.5)


def test_phi3(tmp_path: Path) -> None:
    spec = golden_spec("tiny-phi3-f16")
    assert (spec.is_qkv_fused, spec.is_gate_up_fused, spec.rope.style) == (True, True, "neox")
    assert not spec.rope.has_long_factors
    ignored = spec_of(tmp_path, "phi3", metadata={"phi3.attention.sliding_window": 16})
    assert (ignored.window, ignored.windowed) == (0, ())
    apart: dict[str, Any] = {"blk.0.attn_qkv.weight": None}
    apart |= {
        f"blk.0.attn_{name}.weight": np.zeros((n, 64), np.float32) for name, n in zip("qkv", (128, 64, 64), strict=True)
    }
    assert not spec_of(tmp_path, "phi3", n_layer=1, tensors=apart).is_qkv_fused


def test_rope_factors_of_short_and_long_contexts(tmp_path: Path) -> None:
    factors = {f"rope_factors_{kind}.weight": np.ones(16, np.float32) for kind in ("short", "long")}
    keys = {"phi3.rope.scaling.original_context_length": 100, "phi3.rope.scaling.attn_factor": 1.25}
    rope = spec_of(tmp_path, "phi3", metadata=keys, tensors=factors).rope
    assert (rope.n_ctx_orig, rope.attn_factor, rope.scale) == (100, 1.25, 1.0)
    assert factors_name(rope, 100) == "rope_factors_short.weight"
    assert factors_name(rope, 101) == "rope_factors_long.weight"
    named = {"phi3.rope.scaling.type": "longrope"}
    assert spec_of(tmp_path, "phi3", metadata=named, tensors=factors).rope.has_long_factors
    assert "'longrope'" in refusal(tmp_path, UnsupportedModelError, "phi3", metadata=named)
    short = factors | {"rope_factors_long.weight": None}
    assert "rope_factors_long" in refusal(tmp_path, GGUFError, "phi3", tensors=short)
    assert "rope_factors_short" in refusal(tmp_path, UnsupportedModelError, tensors=factors)


def test_qwen3moe() -> None:
    spec = golden_spec("tiny-qwen3moe-f16")
    assert (spec.n_expert, spec.n_expert_used, spec.n_ff) == (8, 2, 128)
    assert (spec.has_qk_norm, spec.has_all_biases, spec.has_sinks) == (True, False, False)


@pytest.mark.parametrize("weights", ["f16", "mxfp4"])
def test_gpt_oss(weights: str) -> None:
    spec = golden_spec(f"tiny-gpt-oss-{weights}")
    assert (spec.n_expert, spec.n_expert_used, spec.n_ff, spec.activation) == (4, 2, 128, "swiglu_oai")
    assert (spec.has_sinks, spec.has_all_biases, spec.has_qkv_bias, spec.has_post_norm) == (True, True, True, False)
    assert (spec.window, spec.windowed) == (32, (True, False, True, False))
    assert (spec.rope.yarn_factor, spec.rope.n_ctx_orig) == (8.0, 256)
    assert spec.rope.attn_factor == pytest.approx(1 + 0.1 * math.log(8))


@pytest.mark.parametrize(
    ("model", "key", "value", "kind"),
    [
        ("tiny-qwen3moe-f16", "expert_count", None, GGUFError),
        ("tiny-qwen3moe-f16", "expert_used_count", 9, GGUFError),
        ("tiny-qwen3moe-f16", "expert_weights_scale", 2.5, UnsupportedModelError),
        ("tiny-gpt-oss-f16", "attention.sliding_window", None, GGUFError),
        ("tiny-gpt-oss-f16", "rope.freq_base_swa", 10000.0, UnsupportedModelError),
        ("tiny-gemma2-f16", "attn_logit_softcapping", -1.0, GGUFError),
        ("tiny-gemma2-f16", "attention.sliding_window", -1, GGUFError),
    ],
)
def test_what_contradicts_an_architecture_is_named(
    tmp_path: Path, model: str, key: str, value: Any, kind: type[ModelError]
) -> None:
    with open_gguf(GOLDEN / f"{model}.gguf") as file:
        arch = file.metadata.string("general.architecture")
        metadata = dict(file.metadata) | {f"{arch}.{key}": value}
        tensors = {n: RawTensor(int(t.type), t.shape, file.data(n).tobytes()) for n, t in file.tensors.items()}
    kept = {name: found for name, found in metadata.items() if found is not None}
    with open_gguf(write_gguf(tmp_path / "changed.gguf", kept, tensors)) as changed, pytest.raises(kind, match=key):
        spec_from_gguf(changed)


def test_experts_of_older_files_share_the_width(tmp_path: Path) -> None:
    with open_gguf(GOLDEN / "tiny-qwen3moe-f16.gguf") as file:
        metadata = dict(file.metadata) | {"qwen3moe.feed_forward_length": 256}
        del metadata["qwen3moe.expert_feed_forward_length"]
        tensors = {n: RawTensor(int(t.type), t.shape, file.data(n).tobytes()) for n, t in file.tensors.items()}
    with open_gguf(write_gguf(tmp_path / "older.gguf", metadata, tensors)) as older:
        assert spec_from_gguf(older).n_ff == 128


def test_counts_per_layer_must_agree(tmp_path: Path) -> None:
    key = "llama.attention.head_count_kv"
    assert spec_of(tmp_path, metadata={key: np.array([2, 2], np.int32)}).n_head_kv == 2
    assert key in refusal(tmp_path, UnsupportedModelError, metadata={key: np.array([2, 1], np.int32)})


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "llama.block_count",
        "llama.embedding_length",
        "llama.context_length",
        "llama.attention.head_count",
        "llama.feed_forward_length",
        "llama.attention.layer_norm_rms_epsilon",
    ],
)
def test_missing_keys_are_named(tmp_path: Path, key: str) -> None:  # B54
    assert f"{key!r}" in refusal(tmp_path, GGUFError, metadata={key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", 1 << 30),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.rope.dimension_count", 31),
        ("llama.rope.freq_base", 1.0),
        ("llama.rope.freq_base", -1.0),
        ("llama.rope.scaling.factor", -2.0),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.embedding_length", "many"),
    ],
)
def test_absurd_values_are_named(tmp_path: Path, key: str, value: Any) -> None:
    assert key in refusal(tmp_path, GGUFError, metadata={key: value})


def test_keys_and_values_of_different_sizes_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, UnsupportedModelError, metadata={"llama.attention.value_length": 16})
    assert "keys of 32 and values of 16 dimensions" in message


def test_unknown_architecture_is_named(tmp_path: Path) -> None:  # B54
    assert "'foo'" in refusal(tmp_path, UnsupportedModelError, metadata={"general.architecture": "foo"})


def test_vocabulary_only(tmp_path: Path) -> None:  # B54
    path = write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama", **tiny_vocabulary()}, {})
    with open_gguf(path) as file, pytest.raises(GGUFError, match="vocabulary only"):
        spec_from_gguf(file)


def test_what_is_not_there_yet_is_refused_by_name(tmp_path: Path) -> None:
    assert "llama.expert_count" in refusal(tmp_path, UnsupportedModelError, metadata={"llama.expert_count": 8})
    assert "3 files" in refusal(tmp_path, UnsupportedModelError, metadata={"split.count": 3})
    bias = {"blk.0.attn_output.bias": np.zeros(64, np.float32)}
    assert "'blk.0.attn_output.bias'" in refusal(tmp_path, UnsupportedModelError, tensors=bias)
    foreign = RawTensor(int(GGMLType.TQ1_0), (96, 256), bytes(96 * 54))
    message = refusal(tmp_path, UnsupportedModelError, n_embd=256, tensors={"blk.0.ffn_up.weight": foreign})
    assert "TQ1_0" in message


def test_tensors_must_fit_the_numbers(tmp_path: Path) -> None:
    assert "no tensor 'blk.1.ffn_up.weight'" in refusal(tmp_path, GGUFError, tensors={"blk.1.ffn_up.weight": None})
    assert "no tensor 'token_embd.weight'" in refusal(tmp_path, GGUFError, tensors={"token_embd.weight": None})
    message = refusal(tmp_path, GGUFError, tensors={"blk.0.attn_k.weight": np.zeros((32, 64), np.float32)})
    assert "'blk.0.attn_k.weight' has the shape [32, 64], not [64, 64]" in message
    assert "rope_freqs" in refusal(tmp_path, GGUFError, tensors={"rope_freqs.weight": np.ones(9, np.float32)})


def test_rope_factors_are_taken(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, tensors={"rope_freqs.weight": np.ones(16, np.float32)})
    assert "rope_freqs.weight" not in tensor_shapes(spec)


def test_llama3_factors() -> None:  # B62 (a)
    factors = llama3_rope_factors(64, 500000.0, 32.0, 1.0, 4.0, 8192)
    assert factors.dtype == np.float32
    np.testing.assert_array_equal(factors[:15], 1)
    np.testing.assert_allclose(factors[15:18], [1.65133, 3.29226, 9.66673], rtol=2e-6)
    np.testing.assert_array_equal(factors[18:], 32)


def test_frequencies() -> None:
    rope = RopeSpec(n_dims=8, style="neox", base=10000.0, scale=0.5, base_local=100.0)
    np.testing.assert_allclose(rope_frequencies(rope), 0.5 * np.array([1, 0.1, 0.01, 0.001]))
    factors = np.array([1, 1, 2, 4], np.float32)
    np.testing.assert_allclose(rope_frequencies(rope, factors), 0.5 * np.array([1, 0.1, 0.005, 0.00025]))
    local = rope_frequencies(rope, windowed=True)
    np.testing.assert_allclose(local, 100.0 ** (-np.arange(4) / 4))  # B62 (c): unscaled
    with pytest.raises(ValueError, match="4 rope factors"):
        rope_frequencies(rope, np.ones(3, np.float32))


def test_yarn_keeps_what_turns_often_and_slows_what_does_not() -> None:
    rope = RopeSpec(n_dims=64, style="neox", base=10000.0, scale=0.25, yarn_factor=4.0, n_ctx_orig=4096)
    plain = rope_frequencies(RopeSpec(n_dims=64, style="neox", base=10000.0))
    ratio = rope_frequencies(rope) / plain
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_array_equal(ratio[turns > 40], 1)
    np.testing.assert_allclose(ratio[turns < 0.8], 0.25)
    assert (np.diff(ratio) <= 0).all()
    assert yarn_magnitude(0.5) == 1.0
