"""Architectures that the CUDA kernels have and the model package does not read yet, against llama.cpp's logits.

Their specs are written out here. gemma2: both soft caps, alternating windows. phi3: fused products. qwen3moe: experts.
gpt-oss: experts with biases, sinks, YaRN, alternating windows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.core")

from cpu_streams import Array, Piece, Stream, golden_logits, golden_model, mean_kl, prompt_logits, step

from llamatrio.backends.cpu.reference import dequantized_tensors
from llamatrio.backends.cuda.backend import open_cuda_backend
from llamatrio.model.gguf import GGUFFile, open_gguf
from llamatrio.model.rope import yarn_magnitude
from llamatrio.model.spec import KVType, ModelSpec, RopeSpec
from tests.emucuda.control import Control
from tests.helpers_gguf import write_gguf

pytestmark = pytest.mark.usefixtures("emucuda")


def spec_of(file: GGUFFile) -> ModelSpec:
    """What the model package would read."""
    arch = file.metadata.string("general.architecture")
    keys = {key.removeprefix(f"{arch}."): value for key, value in dict(file.metadata).items()}
    head_dim, n_embd, n_layer = keys["attention.key_length"], keys["embedding_length"], keys["block_count"]
    rope: dict[str, Any] = {"n_dims": head_dim, "style": "neox", "base": keys["rope.freq_base"]}
    more: dict[str, Any] = {}
    if arch == "gemma2":
        more = {
            "activation": "gelu",
            "embd_scale": math.sqrt(n_embd),
            "attn_softcap": keys["attn_logit_softcapping"],
            "final_softcap": keys["final_logit_softcapping"],
        }
    if arch == "gpt-oss":
        more = {"activation": "swiglu_oai"}
        factor = keys["rope.scaling.factor"]
        rope |= {
            "yarn_factor": factor,
            "n_ctx_orig": keys["rope.scaling.original_context_length"],
            "attn_factor": yarn_magnitude(factor),
        }
    if arch in ("gemma2", "gpt-oss"):
        more |= {"window": keys["attention.sliding_window"], "windowed": tuple(i % 2 == 0 for i in range(n_layer))}
    return ModelSpec(**{
        "arch": arch,
        "name": arch,
        "n_vocab": file.tensors["token_embd.weight"].shape[0],
        "n_ctx_train": keys["context_length"],
        "n_embd": n_embd,
        "n_layer": n_layer,
        "n_head": keys["attention.head_count"],
        "n_head_kv": keys["attention.head_count_kv"],
        "head_dim": head_dim,
        "n_ff": keys.get("expert_feed_forward_length", keys["feed_forward_length"]),
        "norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope": RopeSpec(**rope),
        "activation": "silu",
        "attn_scale": head_dim**-0.5,
        "n_expert": keys.get("expert_count", 0),
        "n_expert_used": keys.get("expert_used_count", 0),
        "tied_head": "output.weight" not in file.tensors,
        **more,
    })  # fmt: skip


def our_logits(model: str, kv: KVType) -> tuple[Array, Array]:
    """As a prompt, and as generated tokens."""
    tokens = golden_logits(model)["tokens"]
    with (
        open_gguf(golden_model(model)) as file,
        open_cuda_backend(file, spec_of(file), n_cells=96, type_k=kv, type_v=kv) as backend,
    ):
        return prompt_logits(backend, tokens, len(tokens)), prompt_logits(backend, tokens, 1, is_decode=True)


@pytest.mark.parametrize("model", ["gemma2-f16", "phi3-f16", "qwen3moe-f16", "gpt-oss-f16"])
def test_more_architectures_give_llama_cpps_distributions(model: str) -> None:
    theirs = golden_logits(f"more/tiny-{model}")["logits_f16"]
    for ours in our_logits(f"more/tiny-{model}", "f16"):
        assert np.isfinite(ours).all()
        assert mean_kl(theirs, ours) < 1e-3


@pytest.mark.parametrize(
    ("model", "kv"),
    [
        ("gemma2-f16", "q8_0"),
        ("phi3-f16", "q8_0"),
        ("qwen3moe-f16", "q8_0"),
        ("gpt-oss-f16", "q8_0"),
        ("gpt-oss-mxfp4", "f16"),
        ("gpt-oss-mxfp4", "q8_0"),
    ],
)
def test_rounding_is_no_farther_from_exact_than_llama_cpps(model: str, kv: KVType, tmp_path: Path) -> None:
    """Rounding tips the choice of experts here and there, so llama.cpp's own distance is the measure. Exact are
    generated tokens on dequantized weights, which are multiplied in float32."""
    theirs = golden_logits(f"more/tiny-{model}")[f"logits_{kv}"]
    exact = exact_logits(f"more/tiny-{model}", tmp_path)
    for ours in our_logits(f"more/tiny-{model}", kv):
        assert mean_kl(exact, ours) <= 1.35 * mean_kl(exact, theirs)


def exact_logits(model: str, folder: Path) -> Array:
    with open_gguf(golden_model(model)) as file:
        tensors = {name: values.copy() for name, values in dequantized_tensors(file).items()}
        path = write_gguf(folder / "exact.gguf", dict(file.metadata), tensors)
    with open_gguf(path) as file, open_cuda_backend(file, spec_of(file), n_cells=96) as backend:
        return prompt_logits(backend, golden_logits(model)["tokens"], 1, is_decode=True)


def test_experts_of_rows_beside_padding(emucuda_checked: Control) -> None:
    """Three decode rows in a bucket of four, every access checked: the same bits as alone."""
    with (
        open_gguf(golden_model("more/tiny-qwen3moe-f16")) as file,
        open_cuda_backend(file, spec_of(file), n_cells=96, n_lanes=3) as backend,
    ):
        tokens = golden_logits("more/tiny-qwen3moe-f16")["tokens"]
        alone = prompt_logits(backend, tokens[:4], 1, is_decode=True)
        streams = [Stream(lane, np.arange(20 * lane, 20 * lane + 20)) for lane in range(3)]
        together = [
            step(backend, *[Piece(stream, [token], is_decode=True) for stream in streams]).full for token in tokens[:4]
        ]
    for row, rows in zip(alone, together, strict=True):
        np.testing.assert_array_equal(rows, np.stack([row] * 3))
