"""Mixtures of experts on CUDA against llama.cpp's logits: qwen3moe, and gpt-oss with its biases, sinks and YaRN.

The choice of experts makes them chaotic: where two experts are nearly as good, the last bit of a cached value decides,
and the logits jump. So with rounded KV they are as far from llama.cpp as llama.cpp is from exact arithmetic.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.core")

from cpu_streams import Array, Piece, Stream, golden_logits, golden_model, mean_kl, prompt_logits, step

from llamatrio.backends.cpu.reference import dequantized_tensors
from llamatrio.backends.cuda.backend import open_cuda_backend
from llamatrio.model.gguf import open_gguf
from llamatrio.model.spec import KVType
from tests.emucuda.control import Control
from tests.helpers_gguf import write_gguf

pytestmark = pytest.mark.usefixtures("emucuda")


def our_logits(model: str, kv: KVType) -> tuple[Array, Array]:
    """As a prompt, and as generated tokens."""
    tokens = golden_logits(model)["tokens"]
    with open_cuda_backend(golden_model(model), n_cells=96, type_k=kv, type_v=kv) as backend:
        return prompt_logits(backend, tokens, len(tokens)), prompt_logits(backend, tokens, 1, is_decode=True)


@pytest.mark.parametrize("model", ["qwen3moe-f16", "gpt-oss-f16"])
def test_float_weights_give_llama_cpps_distributions(model: str) -> None:
    theirs = golden_logits(f"more/tiny-{model}")["logits_f16"]
    for ours in our_logits(f"more/tiny-{model}", "f16"):
        assert np.isfinite(ours).all()
        assert mean_kl(theirs, ours) < 1e-3


@pytest.mark.parametrize(
    ("model", "kv"),
    [
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
    with open_cuda_backend(path, n_cells=96) as backend:
        return prompt_logits(backend, golden_logits(model)["tokens"], 1, is_decode=True)


def test_experts_of_rows_beside_padding(emucuda_checked: Control) -> None:
    """Three decode rows in a bucket of four, every access checked: the same bits as alone."""
    with open_cuda_backend(golden_model("more/tiny-qwen3moe-f16"), n_cells=96, n_lanes=3) as backend:
        tokens = golden_logits("more/tiny-qwen3moe-f16")["tokens"]
        alone = prompt_logits(backend, tokens[:4], 1, is_decode=True)
        streams = [Stream(lane, np.arange(20 * lane, 20 * lane + 20)) for lane in range(3)]
        together = [
            step(backend, *[Piece(stream, [token], is_decode=True) for stream in streams]).full for token in tokens[:4]
        ]
    for row, rows in zip(alone, together, strict=True):
        np.testing.assert_array_equal(rows, np.stack([row] * 3))
