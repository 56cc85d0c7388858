"""The words of a step's input, read back as the device reads them: any mixture of decode rows and prompts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.core")

from llamatrio.backends.cuda.kernels.rows import HeadShape
from llamatrio.backends.cuda.plan import PADDING, StepPlan, plan_step
from llamatrio.backends.cuda.shape import Limits, bucket
from llamatrio.backends.cuda.step import split_rounds
from llamatrio.sched.types import Batch, Run

HEADS = HeadShape(8, 2, 64, False, False)
LIMITS = Limits(n_cells=64, n_lanes=5, max_rows=80)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Decode rows, then prompts, on distinct lanes, some of whose rows are wanted."""
    lanes = draw(st.permutations(range(5)))
    n_decode = draw(st.integers(0, 5))
    n_prompts = draw(st.integers(0 if n_decode else 1, 5 - n_decode)) if n_decode < 5 else 0
    runs, row = [], 0
    for i in range(n_decode + n_prompts):
        n = 1 if i < n_decode else draw(st.integers(1, 16))
        runs.append(Run(lanes[i], row, n, draw(st.integers(0, 40)), is_decode=i < n_decode))
        row += n
    table = np.random.default_rng(0).integers(0, 64, (5, 64)).astype(np.int32)
    positions = np.concatenate([np.arange(r.pos0, r.pos0 + r.n_rows) for r in runs]).astype(np.int32)
    of_lane = np.concatenate([np.full(r.n_rows, r.lane) for r in runs]).astype(np.int32)
    wanted = draw(st.lists(st.integers(0, row - 1), unique=True).map(sorted))
    return Batch(
        tokens=np.arange(100, 100 + row, dtype=np.int32),
        positions=positions,
        lanes=of_lane,
        cells=table[of_lane, positions],
        runs=tuple(runs),
        cell_table=table,
        out_rows=np.array(wanted, np.int32),
    )


def planned(batch: Batch) -> tuple[StepPlan, np.ndarray]:
    words = np.full(LIMITS.input_words, 12345, np.int32)
    return plan_step(batch, HEADS, LIMITS, words), words


@given(batches())
def test_every_row_is_there_once_with_its_list(batch: Batch) -> None:
    plan, words = planned(batch)
    assert plan.n_words <= LIMITS.input_words
    assert (words[plan.n_words :] == 12345).all()
    tokens, positions, cells, lists = words[: 4 * LIMITS.n_decode].reshape(4, -1)
    for row in range(plan.n_decode):
        assert (tokens[row], positions[row], cells[row]) == (
            batch.tokens[row],
            batch.positions[row],
            batch.cells[row],
        )
        n = positions[row] + 1
        np.testing.assert_array_equal(words[lists[row] : lists[row] + n], batch.cell_table[batch.lanes[row], :n])
    if plan.n_decode:
        assert plan.bucket == bucket(plan.n_decode)
        for padded in (tokens, positions, cells):
            assert (padded[plan.n_decode :] == PADDING).all()
    prompt = words[plan.prompt_at : plan.prompt_at + 3 * plan.n_prompt].reshape(3, -1)
    np.testing.assert_array_equal(prompt[0], batch.tokens[plan.n_decode :])
    np.testing.assert_array_equal(prompt[2], batch.cells[plan.n_decode :])


@given(batches())
def test_the_tiles_cover_every_prompt_row_once(batch: Batch) -> None:
    plan, words = planned(batch)
    tiles = words[plan.tiles_at : plan.tiles_at + 4 * plan.n_tiles].reshape(-1, 4)
    assert plan.tiles_at % 4 == 0, "tiles are read 16 bytes at a time"
    seen = []
    for first, n, at, position in tiles.tolist():
        for i in range(n):
            row = plan.n_decode + first + i
            seen.append(row)
            assert batch.positions[row] == position + i
            assert words[at + position + i] == batch.cells[row]
    assert seen == list(range(plan.n_decode, batch.n_rows))


@given(batches())
def test_every_wanted_row_has_its_place(batch: Batch) -> None:
    plan, words = planned(batch)
    wanted = words[plan.wanted_at : plan.wanted_at + plan.n_wanted]
    rows = [*range(plan.n_decode), *(wanted + plan.n_decode).tolist()]
    assert [rows[place] for place in plan.places.tolist()] == batch.out_rows.tolist()


@given(batches(), st.integers(5, 9), st.data())
def test_rounds_hold_what_fits_and_every_row_once(batch: Batch, most: int, data: st.DataObject) -> None:
    plan, _ = planned(batch)
    full = data.draw(st.sets(st.integers(0, max(plan.n_results - 1, 0))))
    rounds = split_rounds(plan, full, most)
    rows = [row for parts in rounds for part in parts for row in range(part.first, part.first + part.n)]
    assert rows == list(range(plan.n_results))
    for parts in rounds:
        assert all(part.n <= most for part in parts)
        assert sum(row in full for part in parts for row in range(part.first, part.first + part.n)) <= most
