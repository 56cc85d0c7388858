"""Driver calls of a save: counted on the emulated CUDA driver, so it needs no GPU (but g++, and NVRTC).

Saves cells of a 36-layer model of Qwen3-8B's shape with a q8_0 KV cache, in runs of neighbouring cells of several
sizes, through the backend's own pipeline. No weights: only the KV pool and the staging buffers are there. The last
line is JSON: the case of 323 cells, each a run of its own, and the calls that one blocking read per run, layer, and
K or V would make.

    python -m bench.calls
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

N_LAYER, N_HEAD_KV, HEAD_DIM = 36, 8, 128
N_CELLS = 10_496
STAGING_BYTES = 32 << 20


class Case(NamedTuple):
    n_cells: int
    n_fragments: int


class Calls(NamedTuple):
    """What the driver was asked for, of one save."""

    chunks: int
    launches: int
    copies: int
    """From the device to pinned memory."""
    list_uploads: int
    """Of the list of cells: 4 bytes a cell."""
    events: int
    """Records: when the gather has run, and when the copy has landed."""
    stream_waits: int
    synchronizes: int
    bytes: int


def fragmented(case: Case) -> np.ndarray:
    """`n_cells` cells in `n_fragments` runs, no two of which touch."""
    sizes = [len(part) for part in np.array_split(np.arange(case.n_cells), case.n_fragments)]
    starts = np.cumsum([0, *[size + 1 for size in sizes[:-1]]])
    return np.concatenate([np.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)]).astype(np.int32)


@contextmanager
def pipeline() -> Iterator[tuple[Any, Any, int]]:
    """The transfers of a pool, a staging buffer, and the record's size."""
    from llamatrio.backends.cuda.compiler import KernelLoader
    from llamatrio.backends.cuda.completion import completions
    from llamatrio.backends.cuda.device import open_gpu
    from llamatrio.backends.cuda.kernels.cells import PoolShape
    from llamatrio.backends.cuda.kernels.rows import HeadShape
    from llamatrio.backends.cuda.memory import device_arena
    from llamatrio.backends.cuda.transfer import CellTransfer
    from llamatrio.config import cache_dir

    heads = HeadShape(4 * N_HEAD_KV, N_HEAD_KV, HEAD_DIM, k_q8=True, v_q8=True)
    shape = PoolShape(N_CELLS, N_LAYER, heads.k_row_bytes, heads.v_row_bytes)
    with ExitStack() as stack:
        gpu = stack.enter_context(open_gpu())
        pool = stack.enter_context(device_arena(gpu, shape.nbytes, "the KV pool"))
        copies = stack.enter_context(completions(gpu, "copy"))
        loader = KernelLoader(gpu.arch, cache_dir() / "kernels")
        transfer = CellTransfer(gpu, loader, pool.address, shape, copies)
        transfer.load_kernels()
        yield transfer, transfer.new_staging(STAGING_BYTES // transfer.record_bytes, stack), transfer.record_bytes


def count(control: Any, transfer: Any, staging: Any, cells: np.ndarray) -> Calls:
    """Saves the cells chunk by chunk, as the engine does; completion is awaited on its futures only."""
    control.forget_counts()
    chunks = range(0, len(cells), staging.capacity)
    for first in chunks:
        transfer.gather(cells[first : first + staging.capacity], staging).landed.result(timeout=120)
    counts = control.counts()
    return Calls(
        chunks=len(chunks),
        launches=counts["cuLaunchKernelEx"] + counts["cuLaunchKernel"],
        copies=counts["copy.d2h"],
        list_uploads=counts["copy.h2d"],
        events=counts["event.record"],
        stream_waits=counts["event.wait"],
        synchronizes=counts["sync.stream"] + counts["sync.context"] + counts["sync.implicit"],
        bytes=counts["copy.d2h.bytes"],
    )


CASES = [Case(10, 1), Case(10, 10), Case(323, 1), Case(323, 323), Case(10_000, 1), Case(10_000, 323)]


def main() -> None:
    from tests.emucuda import harness

    if reason := harness.missing():
        raise SystemExit(f"the emulated driver {reason}")
    control = harness.install()
    control.reset()
    results = {}
    with pipeline() as (transfer, staging, record_bytes):
        print(f"{N_LAYER} layers, {N_HEAD_KV} KV heads of {HEAD_DIM}, q8_0: {record_bytes} bytes a cell")
        print(f"staging buffer of {staging.capacity} cells\n")
        print(f"{'cells':>7}{'runs':>6}" + "".join(f"{name.replace('_', ' '):>14}" for name in Calls._fields))
        for case in CASES:
            results[case] = calls = count(control, transfer, staging, fragmented(case))
            print(f"{case.n_cells:>7}{case.n_fragments:>6}" + "".join(f"{n:>14}" for n in calls))
    worst = Case(323, 323)
    reads = 2 * N_LAYER * worst.n_fragments
    print(json.dumps({"cells": 323, "fragments": 323, **results[worst]._asdict(), "per_run_reads_would_be": reads}))


if __name__ == "__main__":
    main()
