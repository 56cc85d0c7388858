"""What tests may set and read: counts, trace, faults, holds, leaks."""

from __future__ import annotations

import numpy as np

from .control import Control

COPY = 'extern "C" __global__ void k(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }'


def test_counts_by_entry_point_label_and_bytes(emucuda: Control) -> None:
    from .helpers import Gpu

    gpu = Gpu()
    x = np.arange(32, dtype=np.float32)
    kernel = gpu.kernel(COPY)
    a, b = gpu.upload(x), gpu.upload(x * 0)
    emucuda.forget_counts()
    gpu.launch(kernel, 1, 32, a, b)
    assert (gpu.download(b, x) == x).all()
    counts = emucuda.counts()
    assert counts["kernel:k"] == 1
    assert counts["copy.d2h"] == 1
    assert counts["copy.d2h.bytes"] == 128
    assert counts["copy.h2d"] == 0
