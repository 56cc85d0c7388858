"""Random weight matrices of every type, and what they mean according to the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
from cuda_rig import Rig

from llamatrio.backends.cuda.kernels import weights as w
from llamatrio.backends.cuda.kernels.weights import FORMATS, WeightType

SCALES_AT = {
    WeightType.Q2_K: (80, 2),
    WeightType.Q3_K: (108, 1),
    WeightType.Q4_K: (0, 2),
    WeightType.Q5_K: (0, 2),
    WeightType.Q6_K: (208, 1),
    WeightType.Q4_1: (0, 2),
    WeightType.Q5_1: (0, 2),
}
"""Where a block keeps its f16 scales, and how many; one at 0 where not named."""


def random_matrix(type: WeightType, n_rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The tensor's bytes as in a file, and its weights as float32 [n_rows, k]."""
    rng = np.random.default_rng(int(type) * 1000 + n_rows + k)
    if type.is_float:
        weights = rng.standard_normal((n_rows, k)).astype(np.float32)
        data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(type))
        return data.reshape(-1).view(np.uint8), gguf.quants.dequantize(data, gguf.GGMLQuantizationType(type))
    form = FORMATS[type]
    blocks = rng.integers(0, 256, (n_rows * k // (32 * form.top_blocks), form.gguf_bytes), np.uint8)
    if type is WeightType.MXFP4:
        blocks[:, 0] = rng.integers(118, 130, len(blocks))
        blocks[:2, 0] = 0, 1
    else:
        at, n = SCALES_AT.get(type, (0, 1))
        scales = rng.uniform(0.001, 0.02, (len(blocks), n)) * rng.choice([-1, 1], (len(blocks), n))
        blocks[:, at : at + 2 * n] = scales.astype(np.float16).view(np.uint8)
    weights = gguf.quants.dequantize(blocks.reshape(n_rows, -1), gguf.GGMLQuantizationType(type))
    return blocks.reshape(-1), weights


def upload(rig: Rig, type: WeightType, data: np.ndarray, n_rows: int, k: int, n_expert: int = 1) -> w.Matrix:
    """A tensor's bytes as a matrix on the device, in planes where it is quantized."""
    n = n_rows * n_expert
    if type.is_float:
        return w.Matrix(type, rig.put(data), n_rows, k, n_expert)
    planes = rig.empty(w.planes_bytes(type, n, k))
    w.planar_rows(rig.run, rig.put(data), planes, type=type, n_rows=n, k=k)
    return w.Matrix(type, planes, n_rows, k, n_expert)
