"""A transformer of bare kernel launches: the order in which a step uses them, with nothing around it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from cuda_rig import Rig
from cuda_weights import upload

from llamatrio.backends.cuda.kernels import attention as at
from llamatrio.backends.cuda.kernels import matmul, rows
from llamatrio.backends.cuda.kernels import weights as w
from llamatrio.backends.cuda.kernels.cells import PoolShape
from llamatrio.backends.cuda.kernels.rows import HeadShape, RowKind, Rows
from llamatrio.model.arch import spec_from_gguf
from llamatrio.model.gguf import GGUFFile, open_gguf
from llamatrio.model.rope import rope_frequencies
from llamatrio.sched.types import Run

As = Literal["prompt", "decode"]


class KernelModel:
    """One sequence of at most n_cells tokens on scattered cells; its rows run as prompt rows or as decode rows."""

    def __init__(self, rig: Rig, path: Path, *, q8_kv: bool, n_cells: int) -> None:
        with open_gguf(path) as file:
            self.spec = spec_from_gguf(file)
            self.weights = {
                name: _upload(rig, file, name) for name in file.tensors if len(file.tensors[name].shape) > 1
            }
            self.vectors = {
                name: rig.put(file.data(name).reshape(-1))
                for name in file.tensors
                if len(file.tensors[name].shape) == 1
            }
            factors = "rope_freqs.weight" in file.tensors and file.data("rope_freqs.weight").view(np.float32).reshape(
                -1
            )
        spec = self.spec
        self.rig, self.run = rig, rig.run
        self.heads = HeadShape(spec.n_head, spec.n_head_kv, spec.head_dim, q8_kv, q8_kv)
        self.pool_shape = PoolShape(n_cells, spec.n_layer, self.heads.k_row_bytes, self.heads.v_row_bytes)
        self.pool = rig.put(np.zeros(self.pool_shape.nbytes, np.uint8))
        self.cells = np.random.default_rng(0).permutation(n_cells).astype(np.int32)
        self.table = rig.put(self.cells)
        known = None if factors is False else factors
        self.turns = [
            rig.put(rows.rope_turns(rope_frequencies(spec.rope, known, windowed=windowed)))
            for windowed in (False, True)
        ]

    def logits(self, tokens: np.ndarray, how: As) -> np.ndarray:
        """float32 [n, n_vocab], all rows in one step."""
        return _Step(self, tokens, how).run()


def _upload(rig: Rig, file: GGUFFile, name: str) -> w.Matrix:
    tensor = file.tensors[name]
    return upload(rig, w.WeightType(tensor.type), file.data(name).reshape(-1), *tensor.shape)


class _Step:
    def __init__(self, model: KernelModel, tokens: np.ndarray, how: As) -> None:
        rig, n = model.rig, len(tokens)
        self.m, self.spec, self.n, self.how = model, model.spec, n, how
        self.tokens = rig.put(tokens.astype(np.int32))
        self.positions = rig.put(np.arange(n, dtype=np.int32))
        self.lanes = rig.put(np.zeros(n, np.int32))
        self.cells = rig.put(model.cells[:n])
        tiles = at.prefill_tiles([Run(0, 0, n, 0, is_decode=False)], model.heads)
        self.tiles, self.n_tiles = rig.put(tiles), len(tiles)

    def floats(self, width: int) -> int:
        return self.m.rig.empty(self.n * width * 4)

    def rows_for(self, matrix: w.Matrix) -> Rows:
        """Room for the rows that the matrix is multiplied with."""
        kind = RowKind.F16 if self.how == "prompt" else matmul.decode_kind(matrix)
        out, extra = rows.row_bytes(kind, matrix.k)
        return Rows(kind, self.m.rig.empty(self.n * out), self.m.rig.empty(self.n * extra))

    def vector(self, name: str) -> int:
        return self.m.vectors.get(name, 0)

    def multiply(self, name: str, x: Rows, out: int, stride: int = 0) -> None:
        product = matmul.matmul_tile if self.how == "prompt" else matmul.matmul_rows
        matrix, bias = self.m.weights[f"{name}.weight"], self.vector(f"{name}.bias")
        product(self.m.run, matrix, x, bias, out, n_rows=self.n, out_stride=stride)

    def norm(self, name: str, x: int, delta: int, to: Rows) -> None:
        sizes = {"n_rows": self.n, "k": self.spec.n_embd, "eps": self.spec.norm_eps}
        rows.rms_norm(self.m.run, x, delta, self.vector(name), to, **sizes)

    def run(self) -> np.ndarray:
        spec, run = self.spec, self.m.run
        x, delta = self.floats(spec.n_embd), 0
        embedding = self.m.weights["token_embd.weight"]
        w.embed_rows(run, embedding, self.tokens, x, n_rows=self.n, scale=spec.embd_scale)
        for layer in range(spec.n_layer):
            delta = self.attend(layer, x, delta)
            delta = self.after(f"blk.{layer}.post_attention_norm.weight", x, delta)
            delta = self.feed_forward(layer, x, delta)
            delta = self.after(f"blk.{layer}.post_ffw_norm.weight", x, delta)
        head = "token_embd" if spec.tied_head else "output"
        last, logits = self.rows_for(self.m.weights[f"{head}.weight"]), self.floats(spec.n_vocab)
        self.norm("output_norm.weight", x, delta, last)
        self.multiply(head, last, logits)
        return self.m.rig.get(logits, (self.n, spec.n_vocab), np.float32)

    def after(self, name: str, x: int, delta: int) -> int:
        """gemma's norm on a sublayer's output adds it to x by itself."""
        if not self.spec.has_post_norm:
            return delta
        sizes = {"n_rows": self.n, "k": self.spec.n_embd, "eps": self.spec.norm_eps}
        rows.post_norm(self.m.run, x, delta, self.vector(name), **sizes)
        return 0

    def attend(self, layer: int, x: int, delta: int) -> int:
        spec, m, blk, heads = self.spec, self.m, f"blk.{layer}", self.m.heads
        normed = self.rows_for(m.weights[f"{blk}.attn_q.weight"])
        self.norm(f"{blk}.attn_norm.weight", x, delta, normed)
        width, kv_width = heads.n_head * heads.head_dim, heads.n_head_kv * heads.head_dim
        stride = width + 2 * kv_width
        qkv = self.floats(stride)
        for name, first in (("attn_q", 0), ("attn_k", width), ("attn_v", width + kv_width)):
            self.multiply(f"{blk}.{name}", normed, qkv + 4 * first, stride)
        k_rows, v_rows = m.pool_shape.k_rows(m.pool, layer), m.pool_shape.v_rows(m.pool, layer)
        rows.rope_store(
            m.run, qkv, self.vector(f"{blk}.attn_q_norm.weight"), self.vector(f"{blk}.attn_k_norm.weight"),
            self.positions, self.cells, m.turns[spec.is_windowed(layer)], k_rows, v_rows, n_rows=self.n,
            stride=stride, heads=heads, n_dims=spec.rope.n_dims, neox=spec.rope.style == "neox", eps=spec.norm_eps,
            magnitude=spec.rope.attn_factor,
        )  # fmt: skip
        rule = at.Rule(spec.attn_scale, spec.attn_softcap, spec.window if spec.is_windowed(layer) else 0)
        cached, attended = at.Cached(k_rows, v_rows, m.table, len(m.cells)), self.floats(width)
        if self.how == "prompt":
            at.attention_prefill(
                m.run, qkv, cached, self.tiles, attended, n_tiles=self.n_tiles, q_stride=stride, heads=heads, rule=rule
            )
        else:
            partial = m.rig.empty(at.partial_bytes(heads, self.n, 1))
            at.attention_decode(
                m.run, qkv, cached, self.lanes, self.positions, attended, partial,
                n_rows=self.n, q_stride=stride, heads=heads, rule=rule, n_splits=1,
            )  # fmt: skip
        to, out = self.rows_for(m.weights[f"{blk}.attn_output.weight"]), self.floats(spec.n_embd)
        if to.kind is not RowKind.F32:
            rows.convert_rows(m.run, attended, to, n_rows=self.n, k=width)
        self.multiply(f"{blk}.attn_output", to if to.kind is not RowKind.F32 else to._replace(out=attended), out)
        return out

    def feed_forward(self, layer: int, x: int, delta: int) -> int:
        spec, m, blk = self.spec, self.m, f"blk.{layer}"
        normed = self.rows_for(m.weights[f"{blk}.ffn_gate.weight"])
        self.norm(f"{blk}.ffn_norm.weight", x, delta, normed)
        both, out = self.floats(2 * spec.n_ff), self.floats(spec.n_embd)
        self.multiply(f"{blk}.ffn_gate", normed, both, 2 * spec.n_ff)
        self.multiply(f"{blk}.ffn_up", normed, both + 4 * spec.n_ff, 2 * spec.n_ff)
        to = self.rows_for(m.weights[f"{blk}.ffn_down.weight"])
        act = rows.Activation[spec.activation.upper()]
        rows.glu(
            m.run, both, both + 4 * spec.n_ff, to, n_rows=self.n, k=spec.n_ff, stride=2 * spec.n_ff, activation=act
        )
        self.multiply(f"{blk}.ffn_down", to, out)
        return out
