"""Cells to records and back: `gather_cells`, `scatter_cells`, and the pool that they and attention read."""

from __future__ import annotations

from dataclasses import dataclass

from llamatrio.backends.cuda.kernels.launcher import (
    VECTOR,
    DevicePointer,
    Launcher,
    i32,
    i64,
    require_multiple,
    whole_warps,
)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The KV pool, one allocation: per layer K rows [n_cells][k_row_bytes], then V rows [n_cells][v_row_bytes].

    Row bytes are multiples of 16. A record (see KVLayout) has `n_layer * (k_row_bytes + v_row_bytes)` bytes.
    """

    n_cells: int
    n_layer: int
    k_row_bytes: int
    v_row_bytes: int

    def __post_init__(self) -> None:
        require_multiple("k_row_bytes", self.k_row_bytes, VECTOR)
        require_multiple("v_row_bytes", self.v_row_bytes, VECTOR)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's K and V."""
        return self.n_cells * (self.k_row_bytes + self.v_row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.n_layer * self.layer_bytes

    def k_rows(self, pool: DevicePointer, layer: int) -> DevicePointer:
        """Address of a layer's K rows."""
        return pool + layer * self.layer_bytes

    def v_rows(self, pool: DevicePointer, layer: int) -> DevicePointer:
        """Address of a layer's V rows."""
        return self.k_rows(pool, layer) + self.n_cells * self.k_row_bytes


def gather_cells(
    run: Launcher, pool: DevicePointer, cells: DevicePointer, records: DevicePointer, *, n: int, shape: PoolShape
) -> None:
    """Packs the K and V rows of all layers of `cells[:n]` (i32) into `records[:n]`. Grid (n, n_layer), one launch."""
    _move("gather_cells", run, pool, cells, records, n, shape)


def scatter_cells(
    run: Launcher, pool: DevicePointer, cells: DevicePointer, records: DevicePointer, *, n: int, shape: PoolShape
) -> None:
    """Unpacks `records[:n]` into `cells[:n]` (i32, distinct). Grid (n, n_layer), one launch."""
    _move("scatter_cells", run, pool, cells, records, n, shape)


def _move(
    name: str,
    run: Launcher,
    pool: DevicePointer,
    cells: DevicePointer,
    records: DevicePointer,
    n: int,
    shape: PoolShape,
) -> None:
    k_vecs, v_vecs = shape.k_row_bytes // VECTOR, shape.v_row_bytes // VECTOR
    run(
        name,
        (n, shape.n_layer),
        whole_warps(k_vecs + v_vecs, 256),
        pool,
        cells,
        records,
        i32(shape.n_layer),
        i32(k_vecs),
        i32(v_vecs),
        i64(shape.layer_bytes // VECTOR),
        i64(shape.n_cells * k_vecs),
    )
