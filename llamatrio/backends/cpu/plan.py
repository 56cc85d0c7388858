"""Which rows of a batch go together, and the order in which the step sees them.

The rule, for each run of consecutive positions: a prompt is cut at the multiples of PIECE positions, and a piece of
it is part of a *span* if enough of its rows are in this batch; everything else, and every generated token, is a *lone*
row. Spans attend on tiles, and where there are panel kernels their products take these. The scheduler cuts prompts at
multiples of PIECE only, so what a position is, and with it every bit of its result, does not depend on what else runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from llamatrio.sched.types import PIECE, Batch, Int32Array

LEAST_SPAN_ROWS = 12
"""Fewer rows attend sooner one by one: a span collects its cells first. Measured with contexts of 512 and 2,048."""
LEAST_PANEL_ROWS = 32
"""The same where a span's products take panels: these convert the weights first."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions of one sequence: internal rows [row, row + n_rows)."""

    row: int
    n_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Internal row r is batch row order[r]; n_lone lone rows come first, then the rows of the spans."""

    order: Int32Array | None
    """None: the rows as they come."""
    n_lone: int
    spans: tuple[Span, ...]


def plan_rows(batch: Batch, *, least_span_rows: int | None, most_span_rows: int) -> Plan:
    """Orders the rows of `batch`.

    A piece of a prompt becomes a span from `least_span_rows` rows on; None: every row is a lone one. A span joins
    neighbouring pieces of a run, up to `most_span_rows` rows (at least PIECE).
    """
    lone: list[int] = []
    together: list[int] = []
    spans: list[Span] = []
    for run in batch.runs:
        if run.is_decode or least_span_rows is None:
            lone.extend(range(run.row, run.row + run.n_rows))
            continue
        size = 0
        for first, last in _pieces(run.pos0, run.pos0 + run.n_rows):
            piece = range(run.row + first - run.pos0, run.row + last - run.pos0)
            if len(piece) >= least_span_rows:
                if size + len(piece) > most_span_rows:
                    spans.append(Span(len(together) - size, size))
                    size = 0
                together.extend(piece)
                size += len(piece)
            else:
                lone.extend(piece)
        if size:
            spans.append(Span(len(together) - size, size))
    if not together:
        return Plan(None, len(lone), ())
    placed = tuple(Span(len(lone) + span.row, span.n_rows) for span in spans)
    return Plan(np.array(lone + together, np.int32), len(lone), placed)


def _pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """[start, stop) cut at the multiples of PIECE."""
    borders = [start, *range((start // PIECE + 1) * PIECE, stop, PIECE), stop]
    return list(pairwise(borders))
