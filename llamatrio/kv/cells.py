"""KVCells: which cell of the pool holds which token of which sequence. Owned by the scheduler.

Rule 1. A cell holds K and V of one token at one position, of every layer. Its contents depend only on the tokens
        up to that position, and it is written once. So any number of holders may share a cell, and what other
        designs call copy-on-write never needs a copy: two sequences share the cells of their common prefix and
        take cells of their own from the first position on which they differ.
Rule 2. `refs[cell]` counts the holders: every lane whose list contains it, every prompt-cache node that owns it,
        every pin. A cell is free exactly when nobody holds it.
Rule 3. A pin is a hold by a copy in flight. A pinned cell is never handed out, whoever else lets go of it.
Rule 4. Layers with a sliding window keep as many cells as the others; the window only limits what attention reads.
        That costs memory on such models and buys reuse of a prefix at any token.
Rule 5. A lane lists its cells in position order without holes, so a sequence grows and shrinks at its end.

    position   0          p              n
    lane list  [ shared   | own          |     shared cells are held by prompt-cache nodes as well
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

END = -1
"""As an upper bound p1: to the end of the sequence."""


class KVCells:
    """Bookkeeping of a pool of `n_cells` cells used by `n_lanes` sequences of at most `n_ctx` tokens each.

    A lane number is the sequence id of the verbs that llama.cpp's users know: `seq_rm`, `seq_cp`, `seq_keep`,
    over half-open position ranges [p0, p1).
    """

    def __init__(self, n_cells: int, n_lanes: int, n_ctx: int) -> None:
        if min(n_cells, n_lanes, n_ctx) < 1:
            raise ValueError(f"expected positive sizes, not {n_cells=} {n_lanes=} {n_ctx=}")
        self.n_cells = n_cells
        self.n_lanes = n_lanes
        self.n_ctx = n_ctx
        self.table: Int32Array = np.full((n_lanes, n_ctx), -1, np.int32)
        """[n_lanes, n_ctx] cell of each position; backends read it, only this class writes it."""
        self.lengths: list[int] = [0] * n_lanes
        self.n_pinned = 0
        """Pins in force (a cell pinned twice counts twice)."""
        self._refs = np.zeros(n_cells, np.int32)
        # A stack whose top is its end; it starts so that cells come out in ascending order.
        self._free: Int32Array = np.arange(n_cells - 1, -1, -1, dtype=np.int32)
        self._n_free = n_cells

    @property
    def n_free(self) -> int:
        """Cells that nobody holds."""
        return self._n_free

    @property
    def n_used(self) -> int:
        """Cells that somebody holds."""
        return self.n_cells - self._n_free

    def alloc(self, n: int) -> Int32Array:
        """Takes n free cells, held once by the caller.

        Raises:
            ValueError: fewer than n are free; nothing has changed.
        """
        if not 0 <= n <= self._n_free:
            raise ValueError(f"expected at most {self._n_free} cells to be asked for, not {n}")
        self._n_free -= n
        cells = self._free[self._n_free : self._n_free + n][::-1].copy()
        self._refs[cells] = 1
        return cells

    def hold(self, cells: Int32Array) -> None:
        """Adds a holder to each of these cells, which somebody holds already."""
        assert (self._refs[cells] > 0).all(), "a free cell cannot be held; allocate it"
        self._refs[cells] += 1

    def drop(self, cells: Int32Array) -> None:
        """Removes a holder from each of these cells; those left without one become free."""
        assert (self._refs[cells] > 0).all(), "a cell was dropped more often than it was held"
        self._refs[cells] -= 1
        freed = cells[self._refs[cells] == 0][::-1]
        self._free[self._n_free : self._n_free + len(freed)] = freed
        self._n_free += len(freed)

    def pin(self, cells: Int32Array) -> None:
        """Holds cells for a copy in flight."""
        self.hold(cells)
        self.n_pinned += len(cells)

    def unpin(self, cells: Int32Array) -> None:
        """Ends a pin."""
        self.n_pinned -= len(cells)
        self.drop(cells)

    def seq_cells(self, lane: int, p0: int = 0, p1: int = END) -> Int32Array:
        """A copy of the cells at positions [p0, p1) of a sequence."""
        p0, p1 = self._range(lane, p0, p1)
        return self.table[lane, p0:p1].copy()

    def seq_grow(self, lane: int, n: int) -> Int32Array:
        """Appends n new cells to a sequence and returns them.

        Raises:
            ValueError: too few cells are free, or the sequence would outgrow n_ctx; nothing has changed.
        """
        self._check_growth(lane, n)
        cells = self.alloc(n)
        self._append(lane, cells)
        return cells

    def seq_grow_one(self, lane: int) -> int:
        """`seq_grow(lane, 1)`, without the arrays: every stream needs it in every step.

        Raises:
            ValueError: no cell is free, or the sequence would outgrow n_ctx; nothing has changed.
        """
        self._check_growth(lane, 1)
        if not self._n_free:
            raise ValueError("expected a free cell")
        self._n_free -= 1
        cell = int(self._free[self._n_free])
        self._refs[cell] = 1
        length = self.lengths[lane]
        self.table[lane, length] = cell
        self.lengths[lane] = length + 1
        return cell

    def seq_share(self, lane: int, cells: Int32Array) -> None:
        """Appends cells that somebody else holds: the sequence continues where they end."""
        self._check_growth(lane, len(cells))
        self.hold(cells)
        self._append(lane, cells)

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = END) -> None:
        """Lets dst share positions [p0, p1) of src. dst must end at p0 (rule 5)."""
        p0, p1 = self._range(src, p0, p1)
        if self.lengths[dst] != p0:
            raise ValueError(f"expected sequence {dst} to end at position {p0}, not {self.lengths[dst]}")
        self.seq_share(dst, self.table[src, p0:p1].copy())

    def seq_rm(self, lane: int, p0: int = 0, p1: int = END) -> None:
        """Removes positions [p0, p1) of a sequence. They must reach its end (rule 5)."""
        p0, p1 = self._range(lane, p0, p1)
        if p1 != self.lengths[lane]:
            raise ValueError(f"expected the removal to reach position {self.lengths[lane]}, not {p1}")
        cells = self.table[lane, p0:p1].copy()
        self.table[lane, p0:p1] = -1
        self.lengths[lane] = p0
        self.drop(cells)

    def seq_keep(self, lane: int) -> None:
        """Removes every other sequence."""
        for other in range(self.n_lanes):
            if other != lane:
                self.seq_rm(other)

    def seq_swap(self, lane: int, p0: int, cells: Int32Array) -> None:
        """Replaces the cells from p0 on by others of the same contents, and lets go of the old ones."""
        p0, p1 = self._range(lane, p0, p0 + len(cells))
        old = self.table[lane, p0:p1].copy()
        self.hold(cells)
        self.table[lane, p0:p1] = cells
        self.drop(old)

    def check_invariants(self, held: Iterable[Int32Array] = ()) -> None:
        """Asserts rules 2, 3 and 5. `held` are the cell arrays of every holder that is not a lane, pins included."""
        refs = np.zeros(self.n_cells, np.int32)
        for lane, length in enumerate(self.lengths):
            row = self.table[lane]
            assert (row[:length] >= 0).all()
            assert (row[length:] == -1).all()
            np.add.at(refs, row[:length], 1)
        for cells in held:
            np.add.at(refs, cells, 1)
        assert (refs == self._refs).all(), "reference counts differ from the holders"
        free = self._free[: self._n_free]
        assert len(np.unique(free)) == self._n_free
        assert (self._refs[free] == 0).all()
        assert int((self._refs == 0).sum()) == self._n_free

    def _append(self, lane: int, cells: Int32Array) -> None:
        length = self.lengths[lane]
        self.table[lane, length : length + len(cells)] = cells
        self.lengths[lane] = length + len(cells)

    def _check_growth(self, lane: int, n: int) -> None:
        if self.lengths[lane] + n > self.n_ctx:
            raise ValueError(f"expected at most {self.n_ctx} tokens in a sequence, not {self.lengths[lane] + n}")

    def _range(self, lane: int, p0: int, p1: int) -> tuple[int, int]:
        length = self.lengths[lane]
        end = length if p1 == END else p1
        if not 0 <= p0 <= end <= length:
            raise ValueError(f"expected a range within [0, {length}), not [{p0}, {p1})")
        return p0, end
