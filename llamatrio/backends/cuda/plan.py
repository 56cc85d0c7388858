"""A batch as the device reads it: one array of int32 words, so that a step needs one upload.

    decode rows     tokens, positions, cells, lists: `n_decode` words each, padded to the bucket with -1 (lists: 0)
    tiles           int4 each: the prompt rows' work (kernels.attention.prefill_tiles)
    prompt rows     tokens, positions, cells
    wanted rows     prompt rows whose logits are wanted
    lists           for each lane of the batch, its cells in order of position

The decode rows stand first, at addresses that a graph knows. Everywhere a "lane" of the attention kernels is the word
at which its list begins, and their table is this array with a stride of 1: so only the lists in use are uploaded, and
the device keeps no table that could grow stale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamatrio.backends.cuda.kernels.attention import prefill_tiles
from llamatrio.backends.cuda.kernels.rows import HeadShape
from llamatrio.backends.cuda.shape import Limits, bucket
from llamatrio.sched.types import Batch, Int32Array

PADDING = -1


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What a step runs on, and where in the words it lies. Rows of results: the decode rows, then the wanted prompt
    rows."""

    n_words: int
    n_decode: int
    bucket: int
    """Decode rows with padding; 0 where there are none."""
    n_prompt: int
    n_tiles: int
    tiles_at: int
    prompt_at: int
    wanted_at: int
    n_wanted: int
    """Prompt rows whose logits are wanted."""
    places: NDArray[np.int64]
    """[m] row of results of each of the batch's out_rows."""

    @property
    def n_results(self) -> int:
        """Rows of results."""
        return self.n_decode + self.n_wanted


def check_batch(batch: Batch, n_vocab: int, limits: Limits) -> None:
    """Raises ValueError, naming what is wrong, for a batch that the device cannot take."""
    n, n_cells, most = batch.n_rows, limits.n_cells, limits.max_rows
    if not 1 <= n <= most:
        raise ValueError(f"expected 1 to {most} rows, not {n}")
    if not len(batch.positions) == len(batch.lanes) == len(batch.cells) == n:
        raise ValueError(f"expected {n} positions, lanes and cells")
    kinds = [run.is_decode for run in batch.runs for _ in range(run.n_rows)]
    if len(kinds) != n or kinds != sorted(kinds, reverse=True):
        raise ValueError(f"expected runs that cover {n} rows, decode rows first, not {len(kinds)}")
    if sum(kinds) > limits.n_decode or len(set(batch.lanes.tolist())) > limits.n_lanes:
        raise ValueError(f"expected decode rows and runs of at most {limits.n_lanes} lanes")
    if not 0 <= batch.tokens.min() <= batch.tokens.max() < n_vocab:
        raise ValueError(f"expected tokens below {n_vocab}, not {batch.tokens.min()} to {batch.tokens.max()}")
    if not 0 <= batch.positions.min() <= batch.positions.max() < min(n_cells, batch.cell_table.shape[1]):
        raise ValueError(f"expected positions below {min(n_cells, batch.cell_table.shape[1])}")
    if not 0 <= batch.cells.min() <= batch.cells.max() < n_cells:
        raise ValueError(f"expected cells below {n_cells}, not {batch.cells.min()} to {batch.cells.max()}")
    if batch.cell_table.dtype != np.int32 or batch.cell_table.strides[1] != 4:
        raise ValueError("expected cell_table to be int32 with contiguous rows")


def plan_step(batch: Batch, heads: HeadShape, limits: Limits, words: Int32Array) -> StepPlan:
    """Writes the batch into `words` [limits.input_words]."""
    n_decode = sum(run.n_rows for run in batch.runs if run.is_decode)
    n_prompt = batch.n_rows - n_decode
    most = limits.n_decode
    tiles_at = 4 * most
    prompts = [run for run in batch.runs if not run.is_decode]
    n_tiles = len(prefill_tiles(prompts, heads)) if prompts else 0
    prompt_at = tiles_at + 4 * n_tiles
    wanted_at = prompt_at + 3 * n_prompt
    first_wanted = int(np.searchsorted(batch.out_rows, n_decode))
    wanted = batch.out_rows[first_wanted:] - n_decode
    lists, n_words = _write_lists(batch, words, wanted_at + len(wanted))
    if n_decode:
        _write_decode(batch, n_decode, lists, words[:tiles_at].reshape(4, most))
    if prompts:
        placed = [run._replace(row=run.row - n_decode, lane=lists[run.lane]) for run in prompts]
        words[tiles_at:prompt_at] = prefill_tiles(placed, heads).reshape(-1)
        rows = words[prompt_at:wanted_at].reshape(3, n_prompt)
        rows[0], rows[1], rows[2] = batch.tokens[n_decode:], batch.positions[n_decode:], batch.cells[n_decode:]
        words[wanted_at : wanted_at + len(wanted)] = wanted
    places = np.arange(len(batch.out_rows), dtype=np.int64) - first_wanted + n_decode
    places[:first_wanted] = batch.out_rows[:first_wanted]
    return StepPlan(
        n_words=n_words,
        n_decode=n_decode,
        bucket=bucket(n_decode) if n_decode else 0,
        n_prompt=n_prompt,
        n_tiles=n_tiles,
        tiles_at=tiles_at,
        prompt_at=prompt_at,
        wanted_at=wanted_at,
        n_wanted=len(wanted),
        places=places,
    )


def _write_lists(batch: Batch, words: Int32Array, at: int) -> tuple[dict[int, int], int]:
    """The lanes' lists from word `at` on: where each begins, and where the last ends."""
    lengths: dict[int, int] = {}
    for run in batch.runs:
        lengths[run.lane] = max(lengths.get(run.lane, 0), run.pos0 + run.n_rows)
    lists: dict[int, int] = {}
    for lane, n in lengths.items():
        words[at : at + n] = batch.cell_table[lane, :n]
        lists[lane] = at
        at += n
    return lists, at


def _write_decode(batch: Batch, n: int, lists: dict[int, int], rows: Int32Array) -> None:
    """rows [4, most]: tokens, positions, cells, lists."""
    rows[:3] = PADDING
    rows[3] = 0
    rows[0, :n], rows[1, :n], rows[2, :n] = batch.tokens[:n], batch.positions[:n], batch.cells[:n]
    rows[3, :n] = [lists[lane] for lane in batch.lanes[:n].tolist()]
