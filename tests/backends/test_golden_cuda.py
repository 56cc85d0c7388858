"""The CUDA backend against llama.cpp's logits, on the emulated driver: the bounds of the CPU backend.

Prompts run on tensor cores with whole weights and half-float activations; generated tokens on int8 activations, as
llama.cpp runs everything. So prompts come out nearer to exact arithmetic than llama.cpp, and generated tokens as near.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

pytest.importorskip("cuda.core")

from cpu_streams import Array, golden_logits, golden_model, greedy, mean_kl, prompt_logits

from llamatrio.backends.cuda.backend import open_cuda_backend
from llamatrio.model.spec import KVType

FLOAT_MODELS = ["tiny-llama-f16", "tiny-qwen2-f16", "tiny-qwen3-f16", "tiny-gemma3-f16", "tiny-qwen3-wide-bf16"]
FLOAT_MODELS += ["more/tiny-gemma2-f16", "more/tiny-phi3-f16"]
WIDE_TYPES = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs"]
KV_KINDS: list[KVType] = ["f16", "q8_0"]
Rows = Literal["prompt", "generated"]

by_kv = pytest.mark.parametrize("kv", KV_KINDS)
pytestmark = pytest.mark.usefixtures("emucuda")


def our_logits(model: str, kv: KVType, rows: Rows) -> Array:
    tokens = golden_logits(model)["tokens"]
    with open_cuda_backend(golden_model(model), n_cells=96, type_k=kv, type_v=kv) as backend:
        if rows == "prompt":
            return prompt_logits(backend, tokens, len(tokens))
        return prompt_logits(backend, tokens, 1, is_decode=True)


def assert_same_choice_where_it_is_clear(theirs: Array, ours: Array) -> None:
    """Equal top token wherever llama.cpp's margin exceeds twice the largest logit error."""
    best = np.sort(theirs, axis=1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 2 * np.abs(theirs - ours).max()
    np.testing.assert_array_equal(theirs.argmax(axis=1)[clear], ours.argmax(axis=1)[clear])


@pytest.mark.parametrize("rows", ["prompt", "generated"])
@by_kv
@pytest.mark.parametrize("model", FLOAT_MODELS)
def test_float_weights_give_llama_cpps_distributions(model: str, kv: KVType, rows: Rows) -> None:
    theirs, ours = golden_logits(model)[f"logits_{kv}"], our_logits(model, kv, rows)
    assert mean_kl(theirs, ours) < {"f16": 1e-3, "q8_0": 5e-3}[kv]
    assert_same_choice_where_it_is_clear(theirs, ours)


@by_kv
@pytest.mark.parametrize("kind", WIDE_TYPES)
def test_prompts_on_quantized_weights_are_nearer_to_exact_than_llama_cpp(kind: str, kv: KVType) -> None:
    golden = golden_logits(name := f"tiny-qwen3-wide-{kind}")
    theirs, ours = golden[f"logits_{kv}"], our_logits(name, kv, "prompt")
    assert mean_kl(golden["logits_exact"], ours) <= 0.5 * mean_kl(golden["logits_exact"], theirs)
    assert_same_choice_where_it_is_clear(theirs, ours)


def test_generated_tokens_on_quantized_weights_are_no_farther_from_exact_than_llama_cpp() -> None:
    """Two draws of the same rounding error differ by a tenth to a third, so a file alone says little."""
    ratios = {}
    for kind in WIDE_TYPES:
        golden = golden_logits(name := f"tiny-qwen3-wide-{kind}")
        theirs, ours = golden["logits_f16"], our_logits(name, "f16", "generated")
        ratios[kind] = mean_kl(golden["logits_exact"], ours) / mean_kl(golden["logits_exact"], theirs)
        assert_same_choice_where_it_is_clear(theirs, ours)
    assert np.mean(list(ratios.values())) <= 1.0
    assert max(ratios.values()) <= 1.35, ratios


@pytest.mark.parametrize("model", ["tiny-qwen3-f16", "tiny-gemma3-f16"])
def test_greedy_ids_follow_llama_cpp_until_a_choice_is_close(model: str) -> None:
    golden: dict[str, Any] = golden_logits(model)
    n_prompt, theirs = len(golden["tokens"]), golden["greedy_f16"]
    with open_cuda_backend(golden_model(model), n_cells=160) as backend:
        ours = greedy(backend, golden["tokens"], len(theirs))
        whole = prompt_logits(backend, np.concatenate([golden["tokens"], theirs]), 160)
    differs = np.flatnonzero(np.array(ours) != theirs)
    if not len(differs):
        return
    error = np.abs(golden["logits_f16"] - whole[:n_prompt]).max()
    best = np.sort(whole[n_prompt - 1 + differs[0]])[-2:]
    assert best[1] - best[0] <= 2 * error
