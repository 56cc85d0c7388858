"""One pass of rows through the transformer: the kernels in order, for decode rows or for prompt rows.

A step runs its decode rows and its prompt rows as two passes over the same scratch, one after the other: they are
multiplied by different kernels (int8 or float activations on the one side, tensor cores on the other), and no row
of one pass ever reads a row of the other. So a row's numbers depend on what it is, never on its company.

`x` is the residual stream. What a block adds to it waits in `delta` until the next norm, which adds it on the way;
where the model norms a block's output first (gemma), post_norm adds it at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llamatrio.backends.cuda.kernels import matmul, rows
from llamatrio.backends.cuda.kernels.attention import Cached, Rule
from llamatrio.backends.cuda.kernels.cells import PoolShape
from llamatrio.backends.cuda.kernels.experts import moe_route, moe_sum
from llamatrio.backends.cuda.kernels.launcher import DevicePointer, Launcher
from llamatrio.backends.cuda.kernels.rows import Activation, HeadShape, RowKind, Rows
from llamatrio.backends.cuda.kernels.weights import Matrix, embed_rows
from llamatrio.backends.cuda.shape import Limits, Scratch, qkv_width
from llamatrio.backends.cuda.weights import Dense, Experts, LayerWeights, Linear, ModelWeights
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
        window = spec.window if spec.is_windowed(layer) else 0
        return Rule(spec.attn_scale, spec.attn_softcap, window, self.weights.layers[layer].sinks)

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

    def plan_experts(self, n_pairs: int) -> None:  # noqa: B027 (most passes need no plan)
        """Enqueues what `multiply_experts` needs to know of the chosen experts."""

    @abstractmethod
    def multiply_experts(
        self, matrix: Matrix, x: Emitted, bias: DevicePointer, out: DevicePointer, *, n_pairs: int, share: int
    ) -> None:
        """Enqueues each pair's product with its expert's matrix; a row of x serves `share` pairs."""

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
            if isinstance(weights.feed_forward, Dense):
                self._dense(weights.feed_forward, weights.ffn_norm, delta)
            else:
                self._experts(weights.feed_forward, weights.ffn_norm, delta)
            delta = self._joined(weights.post_ffn_norm)
        return delta

    def head(self, x: DevicePointer, delta: DevicePointer, n_rows: int) -> None:
        """Enqueues the logits of rows [0, n_rows) of x + delta."""
        model, matrix = self.model, self.model.weights.head
        normed = self._norm(x, delta, model.weights.output_norm, {self.kind(matrix)}, n_rows=n_rows)
        self.multiply(matrix, normed, 0, model.scratch.logits, n_rows=n_rows)

    def _attention(self, layer: int, weights: LayerWeights, delta: DevicePointer) -> None:
        model, spec, heads, scratch = self.model, self.model.spec, self.model.heads, self.model.scratch
        stride = qkv_width(heads)
        normed = self._norm(scratch.x, delta, weights.attn_norm, self._kinds(weights.qkv), n_rows=self.n_rows)
        self._side_by_side(weights.qkv, normed, scratch.qkv, stride)
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
        attended = self._converted(Rows(RowKind.F32, scratch.attended), weights.o.matrix)
        self.multiply(weights.o.matrix, attended, weights.o.bias, scratch.delta, n_rows=self.n_rows)

    def _dense(self, block: Dense, norm: DevicePointer, delta: DevicePointer) -> None:
        n_ff, scratch = self.model.spec.n_ff, self.model.scratch
        normed = self._norm(scratch.x, delta, norm, self._kinds(block.gate_up), n_rows=self.n_rows)
        self._side_by_side(block.gate_up, normed, scratch.gates, 2 * n_ff)
        gated = self._gated(scratch.gates + F32_BYTES * n_ff, 2 * n_ff, self.n_rows, block.down.matrix)
        self.multiply(block.down.matrix, gated, block.down.bias, scratch.delta, n_rows=self.n_rows)

    def _experts(self, block: Experts, norm: DevicePointer, delta: DevicePointer) -> None:
        """The router decides in full precision; each of a row's experts makes a row of its own: a pair."""
        spec, scratch, run = self.model.spec, self.model.scratch, self.run
        n_used, n_pairs = spec.n_expert_used, self.n_rows * spec.n_expert_used
        router, readers = block.router.matrix, (block.gate, block.up)
        kinds = self._kinds(readers) | {matmul.decode_kind(router)}
        normed = self._norm(scratch.x, delta, norm, kinds, n_rows=self.n_rows)
        rows_in = normed[matmul.decode_kind(router)]
        matmul.matmul_rows(run, router, rows_in, block.router.bias, scratch.router, n_rows=self.n_rows)
        moe_route(
            run,
            scratch.router,
            self.positions,
            scratch.chosen,
            scratch.chosen_weights,
            n_rows=self.n_rows,
            n_expert=spec.n_expert,
            n_used=n_used,
        )
        self.plan_experts(n_pairs)
        up = scratch.gates + F32_BYTES * n_pairs * spec.n_ff
        for linear, out in zip(readers, (scratch.gates, up), strict=True):
            self.multiply_experts(linear.matrix, normed, linear.bias, out, n_pairs=n_pairs, share=n_used)
        gated = self._gated(up, spec.n_ff, n_pairs, block.down.matrix)
        self.multiply_experts(block.down.matrix, gated, block.down.bias, scratch.pairs, n_pairs=n_pairs, share=1)
        sizes = {"n_rows": self.n_rows, "k": spec.n_embd, "n_used": n_used}
        moe_sum(run, scratch.pairs, scratch.chosen_weights, scratch.delta, **sizes)

    def _side_by_side(self, products: Iterable[Linear], x: Emitted, out: DevicePointer, stride: int) -> None:
        for matrix, bias in products:
            self.multiply(matrix, x, bias, out, n_rows=self.n_rows, stride=stride)
            out += F32_BYTES * matrix.n_out

    def _gated(self, up: DevicePointer, stride: int, n_rows: int, reader: Matrix) -> Emitted:
        """act(gate) * up, as the reader wants it; the gates begin the scratch."""
        spec, to = self.model.spec, self._room(self.kind(reader))
        activation = Activation[spec.activation.upper()]
        gates, sizes = self.model.scratch.gates, {"n_rows": n_rows, "k": spec.n_ff}
        rows.glu(self.run, gates, up, to, stride=stride, activation=activation, **sizes)
        return {to.kind: to}

    def _kinds(self, readers: Iterable[Linear]) -> set[RowKind]:
        return {self.kind(linear.matrix) for linear in readers}

    def _joined(self, post_norm: DevicePointer) -> DevicePointer:
        """What of `delta` is still to be added to x."""
        spec, scratch = self.model.spec, self.model.scratch
        if not post_norm:
            return scratch.delta
        sizes = {"n_rows": self.n_rows, "k": spec.n_embd}
        rows.post_norm(self.run, scratch.x, scratch.delta, post_norm, eps=spec.norm_eps, **sizes)
        return 0

    def _norm(
        self, x: DevicePointer, delta: DevicePointer, weight: DevicePointer, kinds: set[RowKind], *, n_rows: int
    ) -> Emitted:
        """x += delta, and its norm in the wanted forms."""
        k, eps = self.model.spec.n_embd, self.model.spec.norm_eps

        def emit(to: Rows) -> None:
            rows.rms_norm(self.run, x, delta, weight, to, n_rows=n_rows, k=k, eps=eps)

        return self._emitted(emit, kinds, n_rows, k)

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
