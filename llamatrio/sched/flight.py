"""A step on its way: planned run by run, then in flight as a batch, then read row by row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llamatrio.kv.cells import Int32Array
from llamatrio.sched.sampler import Choice, Row
from llamatrio.sched.sequence import Sequence
from llamatrio.sched.types import Batch, Run, StepOutput


class Part(NamedTuple):
    """One sequence's share of a step."""

    seq: Sequence
    run: Run
    cells: list[int]


class Flight:
    """The parts of a step. Owned by the scheduler."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.n_rows = 0
        self._out: list[Part] = []
        """Parts whose last row's logits are wanted, in order."""
        self._whole: dict[int, int] = {}
        """Index into _out -> index of its whole row in the output."""

    def __contains__(self, seq: Sequence) -> bool:
        return any(part.seq is seq for part in self.parts)

    def add(self, seq: Sequence, cells: list[int], *, is_decode: bool) -> None:
        """Plans the sequence's next len(cells) tokens."""
        assert seq.lane is not None
        self.parts.append(Part(seq, Run(seq.lane, self.n_rows, len(cells), seq.n_past, is_decode), cells))
        self.n_rows += len(cells)

    def batch(self, cell_table: Int32Array, n_vocab: int) -> Batch:
        """What the device gets."""
        tokens: list[int] = []
        positions: list[int] = []
        lanes: list[int] = []
        cells: list[int] = []
        for seq, run, new in self.parts:
            end = run.pos0 + run.n_rows
            tokens += seq.tokens[run.pos0 : end]
            positions += range(run.pos0, end)
            lanes += [run.lane] * run.n_rows
            cells += new
        self._out = [part for part in self.parts if _wants_token(part)]
        wanted = [part.seq.sampler.n_candidates(part.seq.tokens, part.seq.n_predicted) for part in self._out]
        whole = [i for i, n in enumerate(wanted) if n is None]
        self._whole = {i: at for at, i in enumerate(whole)}
        return Batch(
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            lanes=np.array(lanes, np.int32),
            cells=np.array(cells, np.int32),
            runs=tuple(part.run for part in self.parts),
            cell_table=cell_table,
            out_rows=np.array([part.run.row + part.run.n_rows - 1 for part in self._out], np.int32),
            n_candidates=min(max((n for n in wanted if n is not None), default=1), n_vocab),
            needs_sums=any(part.seq.request.sampling.n_probs for part in self._out),
            full_rows=np.array(whole, np.int32),
        )

    def choices(self, output: StepOutput) -> list[tuple[Sequence, Choice | None]]:
        """The next token of every sequence that wanted one and is still there; None where no token may follow."""
        rows = zip(output.ids.tolist(), output.logits.tolist(), output.logsumexp.tolist(), strict=True)
        found: list[tuple[Sequence, Choice | None]] = []
        for i, (part, (ids, logits, logsumexp)) in enumerate(zip(self._out, rows, strict=True)):
            seq = part.seq
            if not seq.is_finished:
                at = self._whole.get(i)
                row = Row(ids, logits, logsumexp, None if at is None else output.full[at])
                found.append((seq, seq.sampler.next_token(row, seq.tokens, seq.n_predicted)))
        return found


def _wants_token(part: Part) -> bool:
    seq, run, _ = part
    return seq.n_past + run.n_rows == len(seq.tokens) and seq.request.max_tokens != 0
