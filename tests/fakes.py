"""A backend without numbers, whose every output proves that the right cells were used.

Each cell holds a hash of the whole token prefix up to its position. A step recomputes that chain from the cells the
batch names and fails on the first cell that holds anything else; the next token is a function of the hash. So a
sequence's text is right exactly when sharing, saving, restoring and preemption never mixed anything up, and
`reference` says what it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from llamatrio.backends.base import Gather, StagingBuffer
from llamatrio.model.spec import KVLayout, ModelSpec, RopeSpec
from llamatrio.sched.types import Batch, Int32Array, StepOutput

N_VOCAB = 64
EOG = 0
_CELL = np.dtype([("hash", np.uint64), ("pos", np.int32), ("token", np.int32)])

SPEC = ModelSpec(
    arch="fake", name="fake", n_vocab=N_VOCAB, n_ctx_train=256, n_embd=32, n_layer=1, n_head=1, n_head_kv=1,
    head_dim=32, n_ff=32, norm_eps=1e-5, rope=RopeSpec(32, "norm", 10000.0), activation="silu", attn_scale=1.0,
)  # fmt: skip


def chain(prefix: int, token: int) -> int:
    """The hash of a prefix that goes on with this token."""
    x = (prefix ^ (token + 0x9E3779B9)) * 0x100000001B3 & 0xFFFF_FFFF_FFFF_FFFF
    return x ^ (x >> 29)


def next_ids(prefix_hash: int, k: int) -> list[int]:
    """The k likeliest tokens after a prefix, best first."""
    first = prefix_hash % N_VOCAB
    return [(first + 7 * i) % N_VOCAB for i in range(k)]


def logit(rank: int) -> float:
    return 10.0 - 0.5 * rank


def reference(prompt: Sequence[int], n: int, *, ignore_eos: bool = False) -> list[int]:
    """The greedy continuation of a prompt: at most n tokens, up to an end-of-generation token inclusive."""
    h = 0
    for token in prompt:
        h = chain(h, token)
    out: list[int] = []
    while len(out) < n and EOG not in out:
        out.append(next(i for i in next_ids(h, 2) if not (ignore_eos and i == EOG)))
        h = chain(h, out[-1])
    return out


class FakePool:
    """The cells and what a step does to them; synchronous."""

    def __init__(self, n_cells: int) -> None:
        self.cells = np.zeros(n_cells, _CELL)
        self.cells["pos"] = -1
        self.rows: list[tuple[int, bool]] = []
        """(tokens, is_decode) of every run, in order: what was evaluated."""

    def step(self, batch: Batch) -> StepOutput:
        assert sum(run.n_rows for run in batch.runs) == batch.n_rows
        assert [run.is_decode for run in batch.runs] == sorted((r.is_decode for r in batch.runs), reverse=True)
        assert len(set(batch.cells.tolist())) == batch.n_rows, "two rows write one cell"
        hashes = np.zeros(batch.n_rows, np.uint64)
        for run in batch.runs:
            self.rows.append((run.n_rows, run.is_decode))
            h = self.prefix_hash(batch.cell_table[run.lane, : run.pos0])
            for row in range(run.row, run.row + run.n_rows):
                position, cell = run.pos0 + row - run.row, int(batch.cells[row])
                assert batch.positions[row] == position
                assert batch.lanes[row] == run.lane
                assert batch.cell_table[run.lane, position] == cell
                h = chain(h, int(batch.tokens[row]))
                self.cells[cell] = (h, position, batch.tokens[row])
                hashes[row] = h
        return self.output(batch, hashes)

    def prefix_hash(self, cells: Int32Array) -> int:
        """Checks that these cells hold one prefix, position by position; returns its hash."""
        h = 0
        held = self.cells[cells]
        assert held["pos"].tolist() == list(range(len(cells))), "a cell holds another position"
        for token, hashed in zip(held["token"].tolist(), held["hash"].tolist(), strict=True):
            h = chain(h, token)
            assert hashed == h, "a cell belongs to another prefix"
        return h

    def output(self, batch: Batch, hashes: np.ndarray) -> StepOutput:
        k = batch.n_candidates
        assert 1 <= k <= N_VOCAB
        wanted = [int(hashes[row]) for row in batch.out_rows]
        logits = [logit(rank) for rank in range(N_VOCAB)]
        full = np.zeros((len(batch.full_rows), N_VOCAB), np.float32)
        for at, i in enumerate(batch.full_rows):
            full[at, next_ids(wanted[i], N_VOCAB)] = logits
        return StepOutput(
            ids=np.array([next_ids(h, k) for h in wanted], np.int32).reshape(-1, k),
            logits=np.array([logits[:k] for _ in wanted], np.float32).reshape(-1, k),
            logsumexp=np.full(len(wanted), np.log(np.exp(logits).sum()), np.float32),
            full=full,
            seconds=0.01,
        )


def done(value: object = None) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class FakeBackend:
    """FakePool behind the Backend protocol. Everything completes at once unless a hook holds it.

    `on_forward` and `on_copy` are called with a function that completes the operation, and decide when to call it.
    """

    spec = SPEC
    layout = KVLayout("fake", 1, 8, 8)
    max_rows = 512
    device = "fake"

    def __init__(self, n_cells: int, *, needs_staging: bool = True, takes_every_core: bool = False) -> None:
        self.n_cells = n_cells
        self.needs_staging = needs_staging
        self.takes_every_core = takes_every_core
        self.pool = FakePool(n_cells)
        self.on_forward: Callable[[Callable[[], None]], None] = lambda complete: complete()
        self.on_copy: Callable[[Callable[[], None]], None] = lambda complete: complete()
        self.fail_next_forward: Exception | None = None
        self.fail_next_copy: Exception | None = None
        self.n_gathered = 0
        self.n_scattered = 0
        self.is_closed = False

    def forward(self, batch: Batch) -> Future:
        error, self.fail_next_forward = self.fail_next_forward, None
        return self._queue(self.on_forward, error, lambda: self.pool.step(batch))

    def gather_cells(self, cells: Int32Array, staging: StagingBuffer) -> Gather:
        def copy() -> None:
            staging.records[: len(cells)] = self.pool.cells[cells].view(np.uint8).reshape(len(cells), -1)
            self.n_gathered += len(cells)

        error, self.fail_next_copy = self.fail_next_copy, None
        landed = self._queue(self.on_copy, error, copy)
        return Gather(landed, landed)

    def scatter_cells(self, staging: StagingBuffer, cells: Int32Array) -> Future:
        def copy() -> None:
            self.pool.cells[cells] = staging.records[: len(cells)].reshape(-1).view(_CELL)
            self.n_scattered += len(cells)

        error, self.fail_next_copy = self.fail_next_copy, None
        return self._queue(self.on_copy, error, copy)

    def new_staging(self, n_records: int) -> StagingBuffer:
        return StagingBuffer(np.zeros((n_records, self.layout.record_bytes), np.uint8))

    def close(self) -> None:
        self.is_closed = True

    @staticmethod
    def _queue(hook: Callable, error: Exception | None, work: Callable[[], object]) -> Future:
        future: Future = Future()

        def complete() -> None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(work())

        hook(complete)
        return future
