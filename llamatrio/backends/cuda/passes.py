"""The two passes of a step (forward.py): decode rows at fixed addresses, for graphs, and the rows of prompts."""

from __future__ import annotations

from llamatrio.backends.cuda.forward import I32_BYTES, DeviceModel, Emitted, Pass
from llamatrio.backends.cuda.kernels import matmul, rows
from llamatrio.backends.cuda.kernels.attention import attention_decode, attention_prefill
from llamatrio.backends.cuda.kernels.experts import ExpertPlan, moe_plan, plan_tiles
from llamatrio.backends.cuda.kernels.launcher import DevicePointer, Launcher
from llamatrio.backends.cuda.kernels.rows import RowKind
from llamatrio.backends.cuda.kernels.top_k import top_k
from llamatrio.backends.cuda.kernels.weights import Matrix
from llamatrio.backends.cuda.plan import StepPlan
from llamatrio.backends.cuda.shape import qkv_width


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

    def multiply_experts(
        self, matrix: Matrix, x: Emitted, bias: DevicePointer, out: DevicePointer, *, n_pairs: int, share: int
    ) -> None:
        experts, sizes = self.model.scratch.chosen, {"n_pairs": n_pairs, "share": share}
        matmul.matmul_expert_rows(self.run, matrix, x[self.kind(matrix)], bias, experts, out, **sizes)

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

    def plan_experts(self, n_pairs: int) -> None:
        n_expert = self.model.spec.n_expert
        plan = self._expert_plan(n_pairs)
        moe_plan(self.run, self.model.scratch.chosen, plan, n_pairs=n_pairs, n_expert=n_expert)

    def multiply_experts(
        self, matrix: Matrix, x: Emitted, bias: DevicePointer, out: DevicePointer, *, n_pairs: int, share: int
    ) -> None:
        plan, sizes = self._expert_plan(n_pairs), {"n_pairs": n_pairs, "share": share}
        matmul.matmul_expert_tile(self.run, matrix, x[RowKind.F16], bias, plan, out, **sizes)

    def _expert_plan(self, n_pairs: int) -> ExpertPlan:
        scratch, n_expert = self.model.scratch, self.model.spec.n_expert
        tile_rows = matmul.tile_rows(n_pairs // n_expert)
        n_tiles = plan_tiles(n_pairs, n_expert, tile_rows)
        return ExpertPlan(scratch.expert_order, scratch.expert_tiles, n_tiles, tile_rows)

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
