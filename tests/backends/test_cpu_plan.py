"""Which rows go together, and the memory plan."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_streams import Piece, Stream, make_batch
from hypothesis import given
from hypothesis import strategies as st

from llamatrio.backends.cpu.plan import Plan, plan_rows
from llamatrio.backends.memory import MemoryPlan, check_memory
from llamatrio.config import MIB
from llamatrio.errors import BackendError
from llamatrio.sched.types import PIECE

LEAST = 32


def plan_of(*pieces: tuple[int, int, bool], least: int | None = LEAST) -> Plan:
    """Pieces are (first position, rows, is_decode)."""
    made = []
    for lane, (position, n, is_decode) in enumerate(pieces):
        stream = Stream(lane, np.arange(2000))
        stream.n_past = position
        made.append(Piece(stream, np.zeros(n, np.int32), is_decode=is_decode))
    return plan_rows(make_batch(made, n_lanes=len(pieces)), least_span_rows=least, most_span_rows=128)


def order_of(plan: Plan) -> list[int]:
    return list(range(plan.n_lone)) if plan.order is None else plan.order.tolist()


def test_generated_tokens_and_short_pieces_are_lone_rows() -> None:
    plan = plan_of((100, 1, True), (0, 31, False), (200, 1, True))
    assert (plan.n_lone, plan.spans) == (33, ())
    assert plan.order is None


def test_a_prompt_is_cut_at_absolute_blocks() -> None:
    # 50 .. 63 is short, 64 .. 127 whole, 128 .. 159 just long enough.
    plan = plan_of((50, 110, False))
    assert plan.n_lone == 14
    assert [(span.row, span.n_rows) for span in plan.spans] == [(14, 96)]


def test_spans_stay_within_one_sequence_and_the_limit() -> None:
    plan = plan_of((5, 1, True), (0, 320, False), (64, 64, False))
    assert [(span.row, span.n_rows) for span in plan.spans] == [(1, 128), (129, 128), (257, 64), (321, 64)]


def test_without_spans_every_row_is_a_lone_one() -> None:
    plan = plan_of((0, 200, False), least=None)
    assert (plan.n_lone, plan.spans) == (200, ())


@given(st.integers(0, 500), st.integers(1, 300), st.integers(0, 300))
def test_a_position_goes_the_same_way_wherever_a_block_border_cuts_the_prompt(start: int, n: int, cut: int) -> None:
    border = (start + cut) // PIECE * PIECE

    def span_positions(first: int, last: int) -> set[int]:
        plan = plan_of((first, last - first, False))
        return {first + row for row in order_of(plan)[plan.n_lone :]}

    whole = span_positions(start, start + n)
    if start < border < start + n:
        assert span_positions(start, border) | span_positions(border, start + n) == whole
    rows_in_spans = [sum(p // PIECE == block for p in whole) for block in {p // PIECE for p in whole}]
    assert all(count >= LEAST for count in rows_in_spans)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 200)), min_size=1, max_size=5))
def test_every_row_has_one_place(runs: list[tuple[int, int]]) -> None:
    plan = plan_of(*[(position, n, n == 1) for position, n in runs])
    n_rows = sum(n for _, n in runs)
    assert sorted(order_of(plan)) == list(range(n_rows))
    assert sum(span.n_rows for span in plan.spans) == n_rows - plan.n_lone


def test_the_memory_plan_says_how_many_cells_would_fit() -> None:
    def plan_for(n: int) -> MemoryPlan:
        return MemoryPlan(100 * MIB, 10 * MIB, n * MIB)

    assert check_memory(plan_for, 90, 200 * MIB).total == 200 * MIB
    assert check_memory(plan_for, 10**9, None).cells == 10**9 * MIB
    with pytest.raises(BackendError, match=r"100 MiB for weights.*91 KV cells.*90 cells would fit"):
        check_memory(plan_for, 91, 200 * MIB)
    with pytest.raises(BackendError, match="no number of cells fits"):
        check_memory(plan_for, 91, 50 * MIB)
