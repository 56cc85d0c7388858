"""KVCells against a model that is a plain dict of lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamatrio.kv.cells import KVCells

N_CELLS, N_LANES, N_CTX = 24, 3, 16
lanes = st.integers(0, N_LANES - 1)


class CellsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cells = KVCells(N_CELLS, N_LANES, N_CTX)
        self.seqs: dict[int, list[int]] = {lane: [] for lane in range(N_LANES)}
        self.holds: list[np.ndarray] = []
        self.pins: list[np.ndarray] = []

    def used(self) -> set[int]:
        return {c for seq in self.seqs.values() for c in seq} | {int(c) for h in self.holds + self.pins for c in h}

    @rule(lane=lanes, n=st.integers(0, 6))
    def grow(self, lane: int, n: int) -> None:
        before = self.used()
        if n > N_CELLS - len(before) or len(self.seqs[lane]) + n > N_CTX:
            with pytest.raises(ValueError, match="expected"):
                self.cells.seq_grow(lane, n)
            return
        new = self.cells.seq_grow(lane, n).tolist()
        assert len(set(new)) == n
        assert not before & set(new), "a cell in use was handed out"
        self.seqs[lane] += new

    @rule(lane=lanes)
    def grow_one(self, lane: int) -> None:
        before = self.used()
        if len(before) == N_CELLS or len(self.seqs[lane]) == N_CTX:
            with pytest.raises(ValueError, match="expected"):
                self.cells.seq_grow_one(lane)
            return
        cell = self.cells.seq_grow_one(lane)
        assert cell not in before, "a cell in use was handed out"
        self.seqs[lane].append(cell)

    @rule(src=lanes, dst=lanes, data=st.data())
    def copy(self, src: int, dst: int, data: st.DataObject) -> None:
        p0 = len(self.seqs[dst])
        if src == dst or p0 > len(self.seqs[src]):
            return
        p1 = data.draw(st.integers(p0, len(self.seqs[src])))
        self.cells.seq_cp(src, dst, p0, p1)
        self.seqs[dst] += self.seqs[src][p0:p1]

    @rule(lane=lanes, data=st.data())
    def remove_end(self, lane: int, data: st.DataObject) -> None:
        p0 = data.draw(st.integers(0, len(self.seqs[lane])))
        self.cells.seq_rm(lane, p0)
        del self.seqs[lane][p0:]

    @rule(lane=lanes)
    def keep(self, lane: int) -> None:
        self.cells.seq_keep(lane)
        for other in self.seqs:
            if other != lane:
                self.seqs[other] = []

    @rule(lane=lanes, data=st.data(), is_pin=st.booleans())
    def hold(self, lane: int, data: st.DataObject, is_pin: bool) -> None:
        p0 = data.draw(st.integers(0, len(self.seqs[lane])))
        cells = self.cells.seq_cells(lane, p0)
        (self.cells.pin if is_pin else self.cells.hold)(cells)
        (self.pins if is_pin else self.holds).append(cells)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.cells.drop(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.cells.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @invariant()
    def agrees(self) -> None:
        self.cells.check_invariants(self.holds + self.pins)
        assert self.cells.n_free == N_CELLS - len(self.used())
        assert self.cells.n_pinned == sum(len(p) for p in self.pins)
        for lane, seq in self.seqs.items():
            assert self.cells.seq_cells(lane).tolist() == seq


TestCells = CellsMachine.TestCase


def test_new_cells_come_in_ascending_order_so_that_a_prompt_lies_in_one_run() -> None:
    cells = KVCells(8, 1, 8)
    assert cells.seq_grow(0, 5).tolist() == [0, 1, 2, 3, 4]


def test_a_hole_in_a_sequence_is_refused_and_changes_nothing() -> None:
    cells = KVCells(8, 2, 8)
    cells.seq_grow(0, 4)
    with pytest.raises(ValueError, match="reach position 4"):
        cells.seq_rm(0, 1, 3)
    with pytest.raises(ValueError, match="end at position 2"):
        cells.seq_cp(0, 1, 2)
    cells.check_invariants()
    assert cells.n_free == 4


def test_swapping_lets_go_of_the_old_cells() -> None:
    cells = KVCells(8, 2, 8)
    cells.seq_grow(0, 3)
    cells.seq_grow(1, 3)
    cells.seq_swap(1, 0, cells.seq_cells(0, 0, 2))
    assert cells.n_free == 4
    assert cells.seq_cells(1)[:2].tolist() == cells.seq_cells(0)[:2].tolist()
    cells.check_invariants()
