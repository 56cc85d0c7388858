"""The pool of KV cells in memory, and copying cells to and from records.

The pool is layer-major, as attention reads it: for each layer the K rows of all cells, then the V rows. A record is
one cell, token-major: layer 0's K row and V row, layer 1's, ... (KVLayout).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from llamatrio.backends.cpu.compile import compile_kernel, python_function
from llamatrio.backends.cpu.kv_rows import row_bytes
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.populate import Region
from llamatrio.backends.cpu.vector import Asm, Value, i8, i32, i64, vec
from llamatrio.model.spec import KVLayout, KVType, ModelSpec
from llamatrio.sched.types import Int32Array

LAYOUT_NAME = "cpu-2"
_SLICE_BYTES = 1 << 17
"""Copied between two pauses."""
NO_PAUSE = np.zeros(1, np.int32)


def kv_layout(spec: ModelSpec, type_k: KVType, type_v: KVType) -> KVLayout:
    """Record layout of this backend: rows of all kv heads, as attention.row_bytes gives them."""
    return KVLayout(
        LAYOUT_NAME,
        spec.n_layer,
        row_bytes(type_k, spec.n_head_kv, spec.head_dim),
        row_bytes(type_v, spec.n_head_kv, spec.head_dim),
    )


@dataclass(frozen=True, slots=True, eq=False)
class CellPool:
    """`n_cells` cells in `memory` (uint8, n_cells * layout.record_bytes)."""

    layout: KVLayout
    n_cells: int
    memory: NDArray[np.uint8]
    level: Level

    def k_rows(self, layer: int) -> int:
        """Address of the K rows of a layer."""
        before = layer * (self.layout.k_row_bytes + self.layout.v_row_bytes)
        return int(self.memory.ctypes.data) + before * self.n_cells

    def v_rows(self, layer: int) -> int:
        """Address of the V rows of a layer."""
        return self.k_rows(layer) + self.layout.k_row_bytes * self.n_cells

    def regions(self) -> list[Region]:
        """The K rows and the V rows of each layer, cell 0 first."""
        k_bytes, v_bytes = self.layout.k_row_bytes * self.n_cells, self.layout.v_row_bytes * self.n_cells
        layers = range(self.layout.n_layer)
        return [Region(*part) for j in layers for part in ((self.k_rows(j), k_bytes), (self.v_rows(j), v_bytes))]

    def gather(self, cells: Int32Array, records: NDArray[np.uint8], pause_us: Int32Array = NO_PAUSE) -> None:
        """records[i] (uint8 [n, record_bytes]) = cell cells[i].

        Runs without the GIL, in slices. Before each it looks at `pause_us` [1], which may change meanwhile, and sleeps
        as many microseconds.
        """
        name, emit = f"gather_cells_{self._shape_name}", _copy_cells(self.layout, to_pool=False)
        self._copy(name, emit, cells, records, pause_us)

    def scatter(self, records: NDArray[np.uint8], cells: Int32Array, pause_us: Int32Array = NO_PAUSE) -> None:
        """cell cells[i] = records[i], in slices as `gather`."""
        name, emit = f"scatter_cells_{self._shape_name}", _copy_cells(self.layout, to_pool=True)
        self._copy(name, emit, cells, records, pause_us)

    @property
    def _shape_name(self) -> str:
        return f"{self.layout.n_layer}x{self.layout.k_row_bytes}x{self.layout.v_row_bytes}"

    def _copy(
        self, name: str, emit: Callable[..., None], cells: Int32Array, records: NDArray[np.uint8], pause_us: Int32Array
    ) -> None:
        kernel = python_function(compile_kernel(name, emit, self.level), 7)
        addresses = (self.memory.ctypes.data, self.n_cells, records.ctypes.data, cells.ctypes.data)
        kernel(*addresses, len(cells), _sleep_address(), pause_us.ctypes.data)


@cache
def _sleep_address() -> int:
    """Address of usleep, or 0 where the system has none."""
    sleep = getattr(ctypes.CDLL(None), "usleep", None) if sys.platform != "win32" else None
    return 0 if sleep is None else ctypes.cast(sleep, ctypes.c_void_p).value or 0


def _copy_cells(layout: KVLayout, *, to_pool: bool) -> Callable[..., None]:
    """Emitter of (pool, n_cells, records, cells, n, sleep, pause_us): `sleep` is the address of usleep, or 0."""
    k_bytes, v_bytes = layout.k_row_bytes, layout.v_row_bytes
    n_slice = max(1, _SLICE_BYTES // layout.record_bytes)

    def emit(
        a: Asm, pool: Value, n_cells: Value, records: Value, cells: Value, n: Value, sleep: Value, pause_us: Value
    ) -> None:
        pool, records, cells, pause_us = (a.pointer(address) for address in (pool, records, cells, pause_us))

        def one(i: Value, _: list[Value]) -> list[Value]:
            cell = a.builder.zext(a.load(cells, a.mul(i, 4), i32), i64)
            record = a.at(records, a.mul(i, layout.record_bytes))

            def layer(j: Value, _: list[Value]) -> list[Value]:
                rows = a.at(pool, a.mul(a.mul(j, k_bytes + v_bytes), n_cells))
                k_row, v_row = a.mul(cell, k_bytes), a.add(a.mul(n_cells, k_bytes), a.mul(cell, v_bytes))
                part = a.at(record, a.mul(j, k_bytes + v_bytes))
                for row, at, size in ((k_row, 0, k_bytes), (v_row, k_bytes, v_bytes)):
                    ends = a.at(rows, row), a.at(part, at)
                    source, target = reversed(ends) if to_pool else ends
                    _copy_bytes(a, source, target, size)
                return []

            a.loop(0, layout.n_layer, [], layer)
            return []

        def one_slice(first: Value, _: list[Value]) -> list[Value]:
            wanted = a.load_shared(pause_us, 0, i32)
            with a.when(a.builder.and_(a.less(a.int64(0), sleep), a.less(a.int64(0), a.builder.zext(wanted, i64)))):
                a.call(sleep, wanted)
            a.loop(first, a.minimum(n, a.add(first, n_slice)), [], one)
            return []

        a.loop(0, n, [], one_slice, step=n_slice)

    return emit


def _copy_bytes(a: Asm, source: Value, target: Value, size: int) -> None:
    """Copies `size` bytes, a multiple of 16."""
    at = 0
    for step in (64, 16):
        while at + step <= size:
            a.store(a.load(source, at, vec(i8, step)), target, at)
            at += step
    assert at == size, "row sizes are multiples of 16 bytes"
