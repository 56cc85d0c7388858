"""`top_k`: a few numbers of each row of logits, so that a step brings back no more than those."""

from __future__ import annotations

from llamatrio.backends.cuda.kernels.launcher import DevicePointer, Launcher, f32, i32

SLICE = 4096
"""Logits of one block of top_k_part."""

MAX_PARTS = 256


def n_parts(n_vocab: int) -> int:
    """Slices of a row."""
    return -(-n_vocab // SLICE)


def scratch_bytes(n_rows: int, n_vocab: int, k: int) -> tuple[int, int]:
    """Bytes of top_k's scratch: candidates and stats."""
    return n_rows * n_parts(n_vocab) * k * 8, n_rows * n_parts(n_vocab) * 8


def top_k(
    run: Launcher,
    logits: DevicePointer,
    candidates: DevicePointer,
    stats: DevicePointer,
    ids: DevicePointer,
    values: DevicePointer,
    logsumexp: DevicePointer,
    *,
    n_rows: int,
    n_vocab: int,
    k: int,
    softcap: float,
) -> None:
    """The k largest of each row: ids i32 and values f32 [n_rows, k], of equal logits the lower id first; logsumexp
    f32 [n_rows] over the whole row. Two launches. Where softcap > 0 the logits f32 [n_rows, n_vocab] are capped in
    place first. candidates, stats: see scratch_bytes.
    """
    parts = n_parts(n_vocab)
    if parts > MAX_PARTS:
        raise ValueError(f"expected a vocabulary of at most {MAX_PARTS * SLICE}, not {n_vocab}")
    if not 1 <= k <= n_vocab:
        raise ValueError(f"expected k between 1 and the vocabulary's {n_vocab}, not {k}")
    run("top_k_part", (parts, n_rows), 256, logits, candidates, stats, i32(n_vocab), i32(k), f32(softcap))
    run("top_k_merge", (n_rows,), 256, candidates, stats, ids, values, logsumexp, i32(parts), i32(k))
