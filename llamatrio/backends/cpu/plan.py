"""Which rows of a batch take which path, and the order in which the step sees them.

The rule, for each run of consecutive positions: a prompt is cut at the multiples of BLOCK positions, and a piece of
it takes the panel path if at least LEAST_PANEL_ROWS of its rows are in this batch; everything else, and every
generated token, takes the rows path. The scheduler cuts prompts at multiples of BLOCK only, so the path that
a position takes, and with it every bit of its result, does not depend on what else runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from llamatrio.sched.types import Batch, Int32Array

BLOCK = 64
"""Positions of a prompt that take the same path."""
LEAST_PANEL_ROWS = 32


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions of one sequence on the panel path: internal rows [row, row + n_rows)."""

    row: int
    n_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Internal row r is batch row order[r]; rows below n_rows take the rows path, n_panel after them the panel path."""

    order: Int32Array
    n_rows: int
    n_panel: int
    spans: tuple[Span, ...]


def plan_rows(batch: Batch, *, has_panels: bool, most_span_rows: int) -> Plan:
    """Orders the rows of `batch`. Without panels every row takes the rows path.

    A span joins neighbouring pieces of a run, up to `most_span_rows` rows (at least BLOCK).
    """
    rows: list[int] = []
    panel: list[int] = []
    spans: list[Span] = []
    for run in batch.runs:
        if run.is_decode or not has_panels:
            rows.extend(range(run.row, run.row + run.n_rows))
            continue
        size = 0
        for first, last in _pieces(run.pos0, run.pos0 + run.n_rows):
            piece = range(run.row + first - run.pos0, run.row + last - run.pos0)
            if len(piece) >= LEAST_PANEL_ROWS:
                if size + len(piece) > most_span_rows:
                    spans.append(Span(len(panel) - size, size))
                    size = 0
                panel.extend(piece)
                size += len(piece)
            else:
                rows.extend(piece)
        if size:
            spans.append(Span(len(panel) - size, size))
    placed = tuple(Span(len(rows) + span.row, span.n_rows) for span in spans)
    return Plan(np.array(rows + panel, np.int32), len(rows), len(panel), placed)


def _pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """[start, stop) cut at the multiples of BLOCK."""
    borders = [start, *range((start // BLOCK + 1) * BLOCK, stop, BLOCK), stop]
    return list(pairwise(borders))
