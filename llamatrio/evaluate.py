"""Logits of a whole text, for evaluation: perplexity, comparisons with other engines, tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from llamatrio.backends.base import Backend
from llamatrio.backends.open import open_backend
from llamatrio.config import EngineConfig
from llamatrio.kv.cells import Int32Array, KVCells
from llamatrio.model.model import open_model
from llamatrio.model.spec import KVType
from llamatrio.sched.types import Batch, FloatArray, Run


def logits(
    path: str | Path,
    tokens: Sequence[int],
    *,
    kv_type: KVType = "f16",
    backend: str = "cpu",
    n_ubatch: int = 512,
) -> FloatArray:
    """Next-token logits after each of `tokens`: float32 [T, n_vocab].

    kv_type: of both K and V. n_ubatch: tokens evaluated at once; as long as it is a multiple of 64 it does not change
    the result.

    Raises:
        ValueError: no tokens, an id that does not exist, or an unknown KV type or backend.
        ModelError, BackendError: as `open_engine`.
    """
    if backend not in ("cpu", "cuda"):
        raise ValueError(f"expected backend cpu or cuda, not {backend!r}")
    if not len(tokens):
        raise ValueError("expected at least one token")
    config = EngineConfig(
        n_ctx=len(tokens),
        n_parallel=1,
        type_k=kv_type,
        type_v=kv_type,
        n_ubatch=n_ubatch,
        device="cuda" if backend == "cuda" else "cpu",
    )
    with ExitStack() as stack:
        model = stack.enter_context(open_model(path))
        if not 0 <= min(tokens) <= max(tokens) < model.spec.n_vocab:
            raise ValueError(f"expected token ids from 0 to {model.spec.n_vocab - 1}")
        device = stack.enter_context(open_backend(model, config))
        cells = KVCells(device.n_cells, 1, len(tokens))
        cells.seq_grow(0, len(tokens))
        ids = np.array(tokens, np.int32)
        parts = [_piece(device, cells, ids, p0, n_ubatch) for p0 in range(0, len(ids), n_ubatch)]
        return np.concatenate(parts)


def _piece(backend: Backend, cells: KVCells, ids: Int32Array, p0: int, n_most: int) -> FloatArray:
    n = min(n_most, len(ids) - p0)
    rows = np.arange(n, dtype=np.int32)
    batch = Batch(
        tokens=ids[p0 : p0 + n],
        positions=p0 + rows,
        lanes=np.zeros(n, np.int32),
        cells=cells.seq_cells(0, p0, p0 + n),
        runs=(Run(0, 0, n, p0, is_decode=False),),
        cell_table=cells.table,
        out_rows=rows,
        full_rows=rows,
    )
    return backend.forward(batch).result().full
