"""Sizes: what the kernels can run, how a cell is stored, and the device memory that a model takes beside its weights.

Decode rows are padded to a bucket, the next power of two: a graph is captured once for each. Everything that a step
writes lies in the scratch at addresses that never change, so that a graph finds it again.
"""

from __future__ import annotations

from typing import NamedTuple

from llamatrio.backends.cuda.kernels import top_k
from llamatrio.backends.cuda.kernels.attention import TILE, partial_bytes
from llamatrio.backends.cuda.kernels.cells import PoolShape
from llamatrio.backends.cuda.kernels.experts import MAX_EXPERTS, plan_tiles
from llamatrio.backends.cuda.kernels.launcher import DevicePointer
from llamatrio.backends.cuda.kernels.rows import HeadShape, RowKind, row_bytes
from llamatrio.backends.cuda.memory import DeviceArena, aligned
from llamatrio.errors import UnsupportedModelError
from llamatrio.model.spec import KVLayout, KVType, ModelSpec

LAYOUT_NAME = "cuda-2"
MOST_CANDIDATES = 256
MOST_HEAD_DIM = 256
LEAST_HEAD_ROWS = 16
"""Rows of logits that fit at once, where the decode rows are fewer."""
PART = 128
"""Cells of one part of a split decode row (kernels/attention.py)."""
MOST_SPLITS = 64
LEAST_TILE_ROWS = 16
"""Rows of the smallest tile of an expert's product (kernels/matmul.py)."""


def check_spec(spec: ModelSpec) -> None:
    """Raises UnsupportedModelError for a model that the kernels do not have."""
    if spec.n_expert > MAX_EXPERTS:
        raise UnsupportedModelError(f"CUDA needs at most {MAX_EXPERTS} experts, not {spec.n_expert}")
    if spec.head_dim % 32 or spec.head_dim > MOST_HEAD_DIM:
        raise UnsupportedModelError(
            f"CUDA needs a head size that is a multiple of 32 up to {MOST_HEAD_DIM}, not {spec.head_dim}"
        )
    for name, n in (("n_embd", spec.n_embd), ("n_ff", spec.n_ff)):
        if n % 32:
            raise UnsupportedModelError(f"CUDA needs {name} to be a multiple of 32, not {n}")
    if spec.n_head // spec.n_head_kv > TILE:
        raise UnsupportedModelError(f"CUDA needs at most {TILE} heads to a KV head")
    most = top_k.MAX_PARTS * top_k.SLICE
    if spec.n_vocab > most:
        raise UnsupportedModelError(f"CUDA needs a vocabulary of at most {most}, not {spec.n_vocab}")


def head_shape(spec: ModelSpec, type_k: KVType, type_v: KVType) -> HeadShape:
    """What the attention kernels know of the model."""
    return HeadShape(spec.n_head, spec.n_head_kv, spec.head_dim, type_k == "q8_0", type_v == "q8_0")


def kv_layout(spec: ModelSpec, heads: HeadShape) -> KVLayout:
    """Record layout of this backend."""
    return KVLayout(LAYOUT_NAME, spec.n_layer, heads.k_row_bytes, heads.v_row_bytes)


def pool_shape(layout: KVLayout, n_cells: int) -> PoolShape:
    """The pool of `n_cells` such cells."""
    return PoolShape(n_cells, layout.n_layer, layout.k_row_bytes, layout.v_row_bytes)


def bucket(n: int) -> int:
    """The power of two that n rows are padded to."""
    return 1 << (n - 1).bit_length()


class Limits(NamedTuple):
    """What a batch may hold."""

    n_cells: int
    n_lanes: int
    max_rows: int

    @property
    def n_decode(self) -> int:
        """Rows of the largest decode bucket."""
        return bucket(self.n_lanes)

    @property
    def n_logits(self) -> int:
        """Rows of logits that fit at once."""
        return max(LEAST_HEAD_ROWS, self.n_decode)

    @property
    def n_splits(self) -> int:
        """Parts of a decode row. Fixed for the pool, so that a row's numbers do not depend on its company."""
        return min(MOST_SPLITS, -(-self.n_cells // PART))

    @property
    def input_words(self) -> int:
        """Words of a step's input (plan.py): decode and prompt rows, tiles, wanted rows, lists of cells."""
        return 4 * self.n_decode + 8 * self.max_rows + self.n_lanes * self.n_cells

    @property
    def result_words(self) -> int:
        """Words of the largest results: ids, logits and logsumexp."""
        return (self.n_decode + self.max_rows) * (2 * MOST_CANDIDATES + 1)


class Scratch(NamedTuple):
    """Device addresses of everything that a step writes; or, as `scratch_sizes` gives it, the bytes of each."""

    inputs: DevicePointer
    x: DevicePointer
    """f32 [rows, n_embd], the residual stream"""
    delta: DevicePointer
    """f32 [rows, n_embd], what is added to it next"""
    qkv: DevicePointer
    attended: DevicePointer
    gates: DevicePointer
    """f32 [rows, 2 * n_ff]: gate and up side by side; of experts, all gates, then all ups"""
    f32_rows: DevicePointer
    q8_rows: DevicePointer
    q8_meta: DevicePointer
    f16_rows: DevicePointer
    f16_scales: DevicePointer
    partial: DevicePointer
    router: DevicePointer
    """f32 [rows, n_expert]"""
    chosen: DevicePointer
    """i32 [rows, n_expert_used], the experts of each row"""
    chosen_weights: DevicePointer
    pairs: DevicePointer
    """f32 [rows * n_expert_used, n_embd], what each expert made"""
    expert_order: DevicePointer
    expert_tiles: DevicePointer
    head_x: DevicePointer
    head_delta: DevicePointer
    logits: DevicePointer
    candidates: DevicePointer
    stats: DevicePointer
    results: DevicePointer

    def placed(self, arena: DeviceArena) -> Scratch:
        """Sizes to addresses."""
        return Scratch(*(arena.take(nbytes) for nbytes in self))

    @property
    def nbytes(self) -> int:
        """Of sizes: what they take in an arena."""
        return sum(aligned(nbytes) for nbytes in self)


def qkv_width(heads: HeadShape) -> int:
    """Floats of a row of Q, K and V side by side."""
    return (heads.n_head + 2 * heads.n_head_kv) * heads.head_dim


def scratch_sizes(spec: ModelSpec, heads: HeadShape, limits: Limits) -> Scratch:
    """Bytes of the scratch."""
    n_decode, n_logits = limits.n_decode, limits.n_logits
    rows, n_used = max(limits.max_rows, n_decode), max(1, spec.n_expert_used)
    attended = heads.n_head * heads.head_dim
    widest = max(spec.n_embd, attended)
    candidates, stats = top_k.scratch_bytes(n_logits, spec.n_vocab, MOST_CANDIDATES)
    n_pairs = rows * spec.n_expert_used

    def emitted(kind: RowKind, n: int) -> tuple[int, int]:
        """Bytes for n rows of the residual stream or of attention, or for the feed-forward block of n rows."""
        narrow, wide = row_bytes(kind, widest), row_bytes(kind, spec.n_ff)
        return max(n * narrow[0], n * n_used * wide[0]), max(n * narrow[1], n * n_used * wide[1])

    q8_rows, q8_meta = emitted(RowKind.Q8, n_decode)
    f16_rows, f16_scales = emitted(RowKind.F16, max(rows, n_logits))
    return Scratch(
        inputs=4 * limits.input_words,
        x=4 * rows * spec.n_embd,
        delta=4 * rows * spec.n_embd,
        qkv=4 * rows * qkv_width(heads),
        attended=4 * rows * attended,
        gates=8 * rows * n_used * spec.n_ff,
        f32_rows=max(emitted(RowKind.F32, n_decode)[0], 4 * rows * spec.n_embd if spec.n_expert else 0),
        q8_rows=q8_rows,
        q8_meta=q8_meta,
        f16_rows=f16_rows,
        f16_scales=f16_scales,
        partial=partial_bytes(heads, n_decode, limits.n_splits) if limits.n_splits > 1 else 0,
        router=4 * rows * spec.n_expert,
        chosen=4 * n_pairs,
        chosen_weights=4 * n_pairs,
        pairs=4 * n_pairs * spec.n_embd,
        expert_order=4 * n_pairs,
        expert_tiles=16 * plan_tiles(n_pairs, spec.n_expert, LEAST_TILE_ROWS),
        head_x=4 * n_logits * spec.n_embd,
        head_delta=4 * n_logits * spec.n_embd,
        logits=4 * n_logits * spec.n_vocab,
        candidates=candidates,
        stats=stats,
        results=4 * limits.result_words,
    )
