"""The kernels in the order of a step, against llama.cpp's logits: every architecture, both paths, both KV types.

The bounds are those of the CPU backend (test_golden_cpu): mean KL divergence from llama.cpp, or, where weights are
quantized, no farther from exact arithmetic than llama.cpp is.
"""

from __future__ import annotations

import numpy as np
import pytest
from cuda_rig import Rig

pytest.importorskip("cuda.core")

from cpu_streams import golden_logits, golden_model, mean_kl
from cuda_model import As, KernelModel

N_CELLS = 96


def our_logits(rig: Rig, name: str, how: As, *, q8_kv: bool) -> np.ndarray:
    model = KernelModel(rig, golden_model(name), q8_kv=q8_kv, n_cells=N_CELLS)
    return model.logits(golden_logits(name)["tokens"], how)


@pytest.mark.parametrize("how", ["prompt", "decode"])
@pytest.mark.parametrize(
    ("name", "q8_kv"),
    [
        ("tiny-llama-f16", False),
        ("tiny-qwen2-f16", False),
        ("tiny-qwen3-f16", True),
        ("tiny-gemma3-f16", False),
        ("tiny-gemma3-f16", True),
        ("tiny-qwen3-wide-bf16", False),
    ],
)
def test_float_weights_give_llama_cpps_distributions(fast_rig: Rig, name: str, q8_kv: bool, how: As) -> None:
    theirs = golden_logits(name)["logits_q8_0" if q8_kv else "logits_f16"]
    ours = our_logits(fast_rig, name, how, q8_kv=q8_kv)
    assert mean_kl(theirs, ours) < (5e-3 if q8_kv else 1e-3)


@pytest.mark.parametrize("kind", ["q4_k_m", "q6_k"])
@pytest.mark.parametrize(("how", "most"), [("prompt", 1.25), ("decode", 1.35)])
def test_quantized_weights_are_no_farther_from_exact_than_llama_cpp(
    fast_rig: Rig, kind: str, how: As, most: float
) -> None:
    golden = golden_logits(name := f"tiny-qwen3-wide-{kind}")
    ours = our_logits(fast_rig, name, how, q8_kv=False)
    assert mean_kl(golden["logits_exact"], ours) <= most * mean_kl(golden["logits_exact"], golden["logits_f16"])
