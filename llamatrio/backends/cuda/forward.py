"""One pass of rows through the transformer: the kernels in order, for decode rows or for prompt rows.

A step runs its decode rows and its prompt rows as two passes over the same scratch, one after the other: they are
multiplied by different kernels (int8 or float activations on the one side, tensor cores on the other), and no row
of one pass ever reads a row of the other. So a row's numbers depend on what it is, never on its company.

`x` is the residual stream. What a block adds to it waits in `delta` until the next norm, which adds it on the way;
where the model norms a block's output first (gemma), post_norm adds it at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from llamatrio.backends.cuda.kernels import matmul, rows
from llamatrio.backends.cuda.kernels.attention import Cached, Rule, attention_decode, attention_prefill
from llamatrio.backends.cuda.kernels.cells import PoolShape
from llamatrio.backends.cuda.kernels.launcher import DevicePointer, Launcher
from llamatrio.backends.cuda.kernels.rows import Activation, HeadShape, RowKind, Rows
from llamatrio.backends.cuda.kernels.top_k import top_k
from llamatrio.backends.cuda.kernels.weights import Matrix, embed_rows
from llamatrio.backends.cuda.plan import StepPlan
from llamatrio.backends.cuda.shape import Limits, Scratch, qkv_width
from llamatrio.backends.cuda.weights import LayerWeights, ModelWeights
from llamatrio.model.spec import ModelSpec

F32_BYTES = I32_BYTES = 4
Emitted = dict[RowKind, Rows]
"""The same rows in every form that somebody reads."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceModel:
    """A model on the device with everything that a pass runs on."""

    spec: ModelSpec
    weights: ModelWeights
    heads: HeadShape
    pool: DevicePointer
    pool_shape: PoolShape
    scratch: Scratch
    limits: Limits

    def cached(self, layer: int) -> Cached:
        """A layer's cells, and the lists of plan.py as a table with a stride of 1."""
        k_rows, v_rows = self.pool_shape.k_rows(self.pool, layer), self.pool_shape.v_rows(self.pool, layer)
        return Cached(k_rows, v_rows, self.scratch.inputs, 1)

    def rule(self, layer: int) -> Rule:
        """How a layer attends."""
        spec = self.spec
        return Rule(spec.attn_scale, spec.attn_softcap, spec.window if spec.is_windowed(layer) else 0)

    def word(self, at: int) -> DevicePointer:
        """Address of a word of the step's input."""
        return self.scratch.inputs + I32_BYTES * at


class Pass(ABC):
    """Rows [0, n_rows) of the scratch. Addresses: i32 [n_rows] each."""

    def __init__(self, model: DeviceModel, run: Launcher, n_rows: int, tokens: int, positions: int, cells: int) -> None:
        self.model, self.run, self.n_rows = model, run, n_rows
        self.tokens, self.positions, self.cells = tokens, positions, cells

    @abstractmethod
    def kind(self, matrix: Matrix) -> RowKind:
        """The form of rows that the matrix is multiplied with."""

    @abstractmethod
    def multiply(
        self, matrix: Matrix, x: Emitted, bias: DevicePointer, out: DevicePointer, *, n_rows: int, stride: int = 0
    ) -> None:
        """Enqueues out = x W^T + bias."""

    @abstractmethod
    def attend(self, layer: int) -> None:
        """Enqueues attention of the scratch's qkv into `attended`."""

    def layers(self) -> DevicePointer:
        """Enqueues everything up to the last block; returns the address of what is still to be added to x, or 0."""
        model, scratch = self.model, self.model.scratch
        embed_rows(
            self.run, model.weights.embedding, self.tokens, scratch.x, n_rows=self.n_rows, scale=model.spec.embd_scale
        )
        delta: DevicePointer = 0
        for layer, weights in enumerate(model.weights.layers):
            self._attention(layer, weights, delta)
            delta = self._joined(weights.post_attn_norm)
            self._feed_forward(weights, delta)
            delta = self._joined(weights.post_ffn_norm)
        return delta

    def head(self, x: DevicePointer, delta: DevicePointer, n_rows: int) -> None:
        """Enqueues the logits of rows [0, n_rows) of x + delta."""
        model, matrix = self.model, self.model.weights.head
        normed = self._norm(x, delta, model.weights.output_norm, (matrix,), n_rows=n_rows)
        self.multiply(matrix, normed, 0, model.scratch.logits, n_rows=n_rows)

    def _attention(self, layer: int, weights: LayerWeights, delta: DevicePointer) -> None:
        model, spec, heads, scratch = self.model, self.model.spec, self.model.heads, self.model.scratch
        normed = self._norm(scratch.x, delta, weights.attn_norm, (weights.q, weights.k, weights.v), n_rows=self.n_rows)
        at, stride = scratch.qkv, qkv_width(heads)
        for matrix, bias in ((weights.q, weights.q_bias), (weights.k, weights.k_bias), (weights.v, weights.v_bias)):
            self.multiply(matrix, normed, bias, at, n_rows=self.n_rows, stride=stride)
            at += F32_BYTES * matrix.n_out
        cached = model.cached(layer)
        rows.rope_store(
            self.run,
            scratch.qkv,
            weights.q_norm,
            weights.k_norm,
            self.positions,
            self.cells,
            weights.turns,
            cached.k_rows,
            cached.v_rows,
            n_rows=self.n_rows,
            stride=stride,
            heads=heads,
            n_dims=spec.rope.n_dims,
            neox=spec.rope.style == "neox",
            eps=spec.norm_eps,
            magnitude=spec.rope.attn_factor,
        )
        self.attend(layer)
        attended = self._converted(Rows(RowKind.F32, scratch.attended), weights.o)
        self.multiply(weights.o, attended, 0, scratch.delta, n_rows=self.n_rows)

    def _feed_forward(self, weights: LayerWeights, delta: DevicePointer) -> None:
        spec, scratch, run = self.model.spec, self.model.scratch, self.run
        normed = self._norm(scratch.x, delta, weights.ffn_norm, (weights.gate, weights.up), n_rows=self.n_rows)
        gate, up, stride = scratch.gates, scratch.gates + F32_BYTES * spec.n_ff, 2 * spec.n_ff
        self.multiply(weights.gate, normed, 0, gate, n_rows=self.n_rows, stride=stride)
        self.multiply(weights.up, normed, 0, up, n_rows=self.n_rows, stride=stride)
        activation, sizes = Activation[spec.activation.upper()], {"n_rows": self.n_rows, "k": spec.n_ff}
        to = self._room(self.kind(weights.down))
        rows.glu(run, gate, up, to, stride=stride, activation=activation, **sizes)
        self.multiply(weights.down, {to.kind: to}, 0, scratch.delta, n_rows=self.n_rows)

    def _joined(self, post_norm: DevicePointer) -> DevicePointer:
        """What of `delta` is still to be added to x."""
        spec, scratch = self.model.spec, self.model.scratch
        if not post_norm:
            return scratch.delta
        sizes = {"n_rows": self.n_rows, "k": spec.n_embd}
        rows.post_norm(self.run, scratch.x, scratch.delta, post_norm, eps=spec.norm_eps, **sizes)
        return 0

    def _norm(
        self, x: DevicePointer, delta: DevicePointer, weight: DevicePointer, readers: tuple[Matrix, ...], *, n_rows: int
    ) -> Emitted:
        """x += delta, and its norm in the forms that the readers want."""
        k, eps = self.model.spec.n_embd, self.model.spec.norm_eps

        def emit(to: Rows) -> None:
            rows.rms_norm(self.run, x, delta, weight, to, n_rows=n_rows, k=k, eps=eps)

        return self._emitted(emit, {self.kind(matrix) for matrix in readers}, n_rows, k)

    def _emitted(self, emit: Callable[[Rows], None], kinds: set[RowKind], n_rows: int, k: int) -> Emitted:
        """Rows in one form as they are made; in several by way of F32."""
        first = self._room(RowKind.F32 if len(kinds) > 1 else next(iter(kinds)))
        emit(first)
        found = {first.kind: first}
        for kind in kinds - found.keys():
            found[kind] = self._room(kind)
            rows.convert_rows(self.run, first.out, found[kind], n_rows=n_rows, k=k)
        return found

    def _converted(self, x: Rows, reader: Matrix) -> Emitted:
        """f32 rows in the form that the reader wants."""
        kind = self.kind(reader)
        if kind is RowKind.F32:
            return {kind: x}
        to = self._room(kind)
        rows.convert_rows(self.run, x.out, to, n_rows=self.n_rows, k=reader.k)
        return {kind: to}

    def _room(self, kind: RowKind) -> Rows:
        scratch = self.model.scratch
        return {
            RowKind.F32: Rows(kind, scratch.f32_rows),
            RowKind.Q8: Rows(kind, scratch.q8_rows, scratch.q8_meta),
            RowKind.F16: Rows(kind, scratch.f16_rows, scratch.f16_scales),
        }[kind]


class DecodePass(Pass):
    """The decode rows of a bucket: from their tokens to their logits, at addresses that never change."""

    def __init__(self, model: DeviceModel, run: Launcher, bucket: int) -> None:
        tokens, positions, cells, self._lists = (model.word(i * model.limits.n_decode) for i in range(4))
        super().__init__(model, run, bucket, tokens, positions, cells)

    def enqueue(self) -> None:
        """Everything that a graph of the bucket holds."""
        self.head(self.model.scratch.x, self.layers(), self.n_rows)

    def kind(self, matrix: Matrix) -> RowKind:
        return matmul.decode_kind(matrix)

    def multiply(
        self, matrix: Matrix, x: Emitted, bias: DevicePointer, out: DevicePointer, *, n_rows: int, stride: int = 0
    ) -> None:
        matmul.matmul_rows(self.run, matrix, x[self.kind(matrix)], bias, out, n_rows=n_rows, out_stride=stride)

    def attend(self, layer: int) -> None:
        model, scratch = self.model, self.model.scratch
        attention_decode(
            self.run,
            scratch.qkv,
            model.cached(layer),
            self._lists,
            self.positions,
            scratch.attended,
            scratch.partial,
            n_rows=self.n_rows,
            q_stride=qkv_width(model.heads),
            heads=model.heads,
            rule=model.rule(layer),
            n_splits=model.limits.n_splits,
        )


class PromptPass(Pass):
    """The prompt rows of a step, and the logits of those that are wanted."""

    def __init__(self, model: DeviceModel, run: Launcher, plan: StepPlan) -> None:
        tokens, positions, cells = (model.word(plan.prompt_at + i * plan.n_prompt) for i in range(3))
        super().__init__(model, run, plan.n_prompt, tokens, positions, cells)
        self._tiles, self._n_tiles = model.word(plan.tiles_at), plan.n_tiles
        self._wanted = model.word(plan.wanted_at)
        self._delta: DevicePointer = 0

    def enqueue(self) -> None:
        """All layers."""
        self._delta = self.layers()

    def wanted_logits(self, first: int, n: int) -> None:
        """Enqueues the logits of the wanted rows [first, first + n)."""
        scratch, k = self.model.scratch, self.model.spec.n_embd
        wanted = self._wanted + I32_BYTES * first
        rows.take_rows(self.run, scratch.x, wanted, scratch.head_x, n=n, k=k)
        if self._delta:
            rows.take_rows(self.run, self._delta, wanted, scratch.head_delta, n=n, k=k)
        self.head(scratch.head_x, scratch.head_delta if self._delta else 0, n)

    def kind(self, matrix: Matrix) -> RowKind:
        return RowKind.F16

    def multiply(
        self, matrix: Matrix, x: Emitted, bias: DevicePointer, out: DevicePointer, *, n_rows: int, stride: int = 0
    ) -> None:
        matmul.matmul_tile(self.run, matrix, x[RowKind.F16], bias, out, n_rows=n_rows, out_stride=stride)

    def attend(self, layer: int) -> None:
        model, scratch = self.model, self.model.scratch
        attention_prefill(
            self.run,
            scratch.qkv,
            model.cached(layer),
            self._tiles,
            scratch.attended,
            n_tiles=self._n_tiles,
            q_stride=qkv_width(model.heads),
            heads=model.heads,
            rule=model.rule(layer),
        )


def choose(
    model: DeviceModel, run: Launcher, *, n_rows: int, k: int, ids: DevicePointer, values: DevicePointer, sums: int
) -> None:
    """Enqueues soft-capping the first n_rows logits, and finding the k largest of each and the logsumexp.

    ids, values [n_rows, k] and sums [n_rows] are device addresses.
    """
    scratch, spec = model.scratch, model.spec
    top_k(
        run,
        scratch.logits,
        scratch.candidates,
        scratch.stats,
        ids,
        values,
        sums,
        n_rows=n_rows,
        n_vocab=spec.n_vocab,
        k=k,
        softcap=spec.final_softcap,
    )
