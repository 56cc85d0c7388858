"""Drives a backend directly: sequences on lanes, fed in pieces, alone or together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatrio.sched.types import Batch, Run, StepOutput

GOLDEN = Path(__file__).parent.parent / "golden"
Array = NDArray[Any]


def golden_model(name: str) -> Path:
    return GOLDEN / "models" / f"{name}.gguf"


def golden_logits(name: str) -> dict[str, Array]:
    with np.load(GOLDEN / "logits" / f"{name}.npz") as data:
        return dict(data)


class Stream:
    """One sequence: a lane, and the cells it may use in order of position."""

    def __init__(self, lane: int, cells: Sequence[int] | Array) -> None:
        self.lane = lane
        self.cells = np.asarray(cells, np.int32)
        self.n_past = 0


class Piece:
    """The next tokens of a stream in a batch."""

    def __init__(self, stream: Stream, tokens: Sequence[int] | Array, *, is_decode: bool = False) -> None:
        self.stream, self.tokens, self.is_decode = stream, np.asarray(tokens, np.int32), is_decode


def make_batch(pieces: Sequence[Piece], *, n_lanes: int = 8, n_candidates: int = 1) -> Batch:
    """A batch of all pieces; the whole logits of every row are wanted. Streams move on."""
    width = max(len(piece.stream.cells) for piece in pieces)
    table = np.zeros((n_lanes, width), np.int32)
    runs, positions, row = [], [], 0
    for piece in pieces:
        stream, n = piece.stream, len(piece.tokens)
        table[stream.lane, : len(stream.cells)] = stream.cells
        runs.append(Run(stream.lane, row, n, stream.n_past, piece.is_decode))
        positions.append(np.arange(stream.n_past, stream.n_past + n, dtype=np.int32))
        stream.n_past += n
        row += n
    lanes = np.concatenate([np.full(len(p.tokens), p.stream.lane, np.int32) for p in pieces])
    where = np.concatenate(positions)
    return Batch(
        tokens=np.concatenate([piece.tokens for piece in pieces]),
        positions=where,
        lanes=lanes,
        cells=table[lanes, where],
        runs=tuple(runs),
        cell_table=table,
        out_rows=np.arange(row, dtype=np.int32),
        n_candidates=n_candidates,
        full_rows=np.arange(row, dtype=np.int32),
    )


def step(backend: Any, *pieces: Piece, n_candidates: int = 1) -> StepOutput:
    """Runs one batch and waits for it."""
    output: StepOutput = backend.forward(make_batch(pieces, n_candidates=n_candidates)).result(timeout=120)
    return output


def prompt_logits(backend: Any, tokens: Array, chunk: int, *, is_decode: bool = False, seed: int = 0) -> Array:
    """Logits [T, n_vocab] of a prompt fed in pieces of `chunk`, in scattered cells."""
    cells = np.random.default_rng(seed).permutation(backend.n_cells)[: len(tokens)]
    stream = Stream(0, cells)
    parts = [
        step(backend, Piece(stream, tokens[first : first + chunk], is_decode=is_decode)).full
        for first in range(0, len(tokens), chunk)
    ]
    return np.concatenate(parts)


def greedy(backend: Any, tokens: Array, n: int) -> list[int]:
    """The n likeliest tokens one after another, behind a prompt given at once."""
    stream = Stream(0, np.arange(len(tokens) + n))
    found = [int(step(backend, Piece(stream, tokens)).ids[-1, 0])]
    while len(found) < n:
        found.append(int(step(backend, Piece(stream, found[-1:], is_decode=True)).ids[0, 0]))
    return found


def log_softmax(logits: Array) -> Array:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def mean_kl(truth: Array, other: Array) -> float:
    """Mean over the rows of the KL divergence of other's next-token distribution from truth's, in nats."""
    p, q = log_softmax(truth), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())
