"""How near the CUDA backend comes to what the device can do: copies, gathers, attention, whole steps. Needs a GPU.

    python -m bench.gpu [-m MODEL] [--small] [--only copies,cells,...] [--stall] [--out FILE]

Every rate stands beside the device's own: memory copied on the device, and between device and pinned memory. Without
a model, one of Qwen3-1.7B's shape with random Q4_K weights is written to a temporary folder: its text means nothing,
its speed is that of a real one. The last line is JSON. `bench/gpu.sh` runs this and the tests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common import finish, print_table
from llamatrio.backends.cuda.backend import CudaBackend, open_cuda_backend
from llamatrio.backends.cuda.compiler import KernelLoader
from llamatrio.backends.cuda.completion import completions
from llamatrio.backends.cuda.device import Gpu, open_gpu
from llamatrio.backends.cuda.kernels import attention
from llamatrio.backends.cuda.kernels.cells import PoolShape
from llamatrio.backends.cuda.kernels.launcher import Launcher
from llamatrio.backends.cuda.kernels.rows import HeadShape
from llamatrio.backends.cuda.memory import device_arena, pinned_memory
from llamatrio.backends.cuda.transfer import CellTransfer
from llamatrio.config import cache_dir
from llamatrio.sched.types import Batch, Run

Figures = dict[str, float]
GB = 1e9


class Sizes(NamedTuple):
    """How much work there is."""

    copy_bytes: int = 1 << 30
    n_layer: int = 36
    n_cells: int = 16_384
    context: int = 4096
    n_calls: int = 20
    n_steps: int = 64


SMALL = Sizes(copy_bytes=1 << 20, n_layer=2, n_cells=700, context=64, n_calls=2, n_steps=3)
HEADS = HeadShape(32, 8, 128, k_q8=True, v_q8=True)


class Bench:
    """A device, its kernels, and a clock on its compute stream."""

    def __init__(self, gpu: Gpu, sizes: Sizes, stack: ExitStack) -> None:
        self.gpu, self.sizes, self.stack = gpu, sizes, stack
        self.loader = KernelLoader(gpu.arch, cache_dir() / "kernels")
        self.run = Launcher(self.loader, gpu.compute)
        self._start, self._end = gpu.new_event(stack), gpu.new_event(stack)

    def seconds(self, work: Callable[[], object]) -> float:
        """Device time of one call, the best of three rounds."""
        work()
        rounds = []
        for _ in range(3):
            self.gpu.compute.record(self._start)
            for _ in range(self.sizes.n_calls):
                work()
            self.gpu.compute.record(self._end)
            self._end.sync()
            rounds.append(float(self._end - self._start) / 1000 / self.sizes.n_calls)
        return max(min(rounds), 1e-9)


def copies(bench: Bench) -> Figures:
    """Bytes per second of plain copies; on the device a byte is read and written."""
    n, stream = bench.sizes.copy_bytes, bench.gpu.compute
    with device_arena(bench.gpu, 2 * n, "the bench") as arena, pinned_memory(n, "the bench") as pinned:
        one, other = arena.view(arena.address, n), arena.view(arena.address + n, n)
        one.fill(0, stream=stream)
        return {
            "device_copy_gb_s": 2 * n / GB / bench.seconds(lambda: other.copy_from(one, stream=stream)),
            "to_host_gb_s": n / GB / bench.seconds(lambda: pinned.download(0, n, arena, arena.address, stream)),
            "to_device_gb_s": n / GB / bench.seconds(lambda: pinned.upload(0, n, arena, arena.address, stream)),
        }


def cells(bench: Bench) -> Figures:
    """323 scattered cells: the gather and the scatter alone, and a whole save and restore as the engine makes them."""
    from llamatrio.backends.cuda.kernels.cells import gather_cells, scatter_cells

    shape = PoolShape(bench.sizes.n_cells, bench.sizes.n_layer, HEADS.k_row_bytes, HEADS.v_row_bytes)
    wanted = np.random.default_rng(0).permutation(shape.n_cells)[:323].astype(np.int32)
    with ExitStack() as stack:
        pool = stack.enter_context(device_arena(bench.gpu, shape.nbytes, "the bench"))
        pool.view(pool.address, shape.nbytes).fill(0, stream=bench.gpu.compute)
        owner = stack.enter_context(ExitStack())
        done = stack.enter_context(completions(bench.gpu, "copy"))
        transfer = CellTransfer(bench.gpu, bench.loader, pool.address, shape, done)
        staging = transfer.new_staging(323, owner)
        n_bytes = 323 * transfer.record_bytes
        seconds = _wall(lambda: transfer.gather(wanted, staging).landed.result(timeout=60), bench.sizes.n_calls)
        restore = _wall(lambda: transfer.scatter(staging, wanted).result(timeout=60), bench.sizes.n_calls)
        at = (pool.address, staging.cells_address, staging.records_address)
        gather = bench.seconds(lambda: gather_cells(bench.run, *at, n=323, shape=shape))
        scatter = bench.seconds(lambda: scatter_cells(bench.run, *at, n=323, shape=shape))
    return {
        "gather_gb_s": 2 * n_bytes / GB / gather,
        "scatter_gb_s": 2 * n_bytes / GB / scatter,
        "save_ms": seconds * 1e3,
        "restore_ms": restore * 1e3,
        "save_gb_s": n_bytes / GB / seconds,
    }


def _wall(work: Callable[[], object], n: int) -> float:
    work()
    started = time.perf_counter()
    for _ in range(n):
        work()
    return (time.perf_counter() - started) / n


def attend(bench: Bench) -> Figures:
    """Attention over scattered q8_0 cells: decode rows by the bytes that they read, a prompt by its arithmetic."""
    n, heads = bench.sizes.context, HEADS
    width = heads.n_head * heads.head_dim
    figures: Figures = {}
    with ExitStack() as stack:
        lanes = max(1, min(8, bench.sizes.n_cells // n))
        shape = PoolShape(lanes * n, 1, heads.k_row_bytes, heads.v_row_bytes)
        sizes = (shape.nbytes, 4 * lanes * n, 4 * 512 * width, 4 * 512 * width, 4096, 4096, 64 << 10)
        arena = stack.enter_context(device_arena(bench.gpu, sum(sizes) + 4096, "the bench"))
        pool, table, q, out, lane_list, positions, tiles = (arena.take(size) for size in sizes)
        states = stack.enter_context(
            device_arena(bench.gpu, attention.partial_bytes(heads, lanes, 64), "the bench")
        ).address
        pinned = stack.enter_context(pinned_memory(sizes[1] + (64 << 10), "the bench"))
        arena.view(arena.address, arena.nbytes).fill(0, stream=bench.gpu.compute)

        def put(values: np.ndarray, to: int) -> None:
            pinned.bytes[: values.nbytes] = values.astype(np.int32).reshape(-1).view(np.uint8)
            pinned.upload(0, values.nbytes, arena, to, bench.gpu.compute)
            bench.gpu.compute.sync()

        put(np.random.default_rng(0).permutation(lanes * n).astype(np.int32), table)
        put(np.arange(lanes, dtype=np.int32), lane_list)
        put(np.full(lanes, n - 1, np.int32), positions)
        cached = attention.Cached(shape.k_rows(pool, 0), shape.v_rows(pool, 0), table, n)
        rule = attention.Rule(heads.head_dim**-0.5)
        for rows in sorted({1, lanes}):
            decode = partial(
                attention.attention_decode, bench.run, q, cached, lane_list, positions, out, states,
                n_rows=rows, q_stride=width, heads=heads, rule=rule, n_splits=64,
            )  # fmt: skip
            seconds = bench.seconds(decode)
            figures[f"decode_attention_{rows}_gb_s"] = rows * shape.nbytes / lanes / GB / seconds
        n_rows = min(512, n)
        work = attention.prefill_tiles([Run(0, 0, n_rows, n - n_rows, is_decode=False)], heads)
        put(work, tiles)
        seconds = bench.seconds(
            lambda: attention.attention_prefill(
                bench.run, q, cached, tiles, out, n_tiles=len(work), q_stride=width, heads=heads, rule=rule
            )
        )
        seen = n_rows * (n - n_rows / 2)
        figures["prefill_attention_tflop_s"] = 4 * seen * width / seconds / 1e12
    return figures


def steps(model: Path, sizes: Sizes) -> Figures:
    """Whole steps of a model: decode of 1 and 8 streams beside the weights' bytes, and a prompt of 512 rows."""
    figures: Figures = {}
    n_rows = 512 if sizes.n_steps > 8 else 16
    with open_cuda_backend(model, n_cells=sizes.n_cells, n_lanes=8, type_k="q8_0", type_v="q8_0") as backend:
        figures["prompt_tokens_s"] = n_rows / _wall(lambda: _step(backend, [0], 0, n_rows), 3)
        for n_streams in (1, 8):
            position = n_rows
            seconds = []
            for _ in range(sizes.n_steps):
                seconds.append(_step(backend, list(range(n_streams)), position, 1))
                position += 1
            figures[f"decode_{n_streams}_tokens_s"] = n_streams / float(np.median(seconds))
            figures[f"decode_{n_streams}_weights_gb_s"] = model.stat().st_size / GB / float(np.median(seconds))
    return figures


def _step(backend: CudaBackend, lanes: list[int], position: int, n: int) -> float:
    """Runs n rows of each lane from a position on; the device's seconds."""
    share = backend.n_cells // 8
    table = np.arange(8 * share, dtype=np.int32).reshape(8, share)
    decode = n == 1
    runs = tuple(Run(lane, i * n, n, position, is_decode=decode) for i, lane in enumerate(lanes))
    positions = np.tile(np.arange(position, position + n, dtype=np.int32), len(lanes))
    lane_of = np.repeat(np.array(lanes, np.int32), n)
    batch = Batch(
        tokens=np.full(n * len(lanes), 7, np.int32),
        positions=positions % share,
        lanes=lane_of,
        cells=table[lane_of, positions % share],
        runs=runs,
        cell_table=table,
        out_rows=np.array([run.row + n - 1 for run in runs], np.int32),
        n_candidates=40,
    )
    return backend.forward(batch).result(timeout=120).seconds


def stall(model: Path) -> dict[str, Any]:
    """The stall scenario's JSON line, or what went wrong."""
    command = [sys.executable, "-m", "bench.stall", "-m", str(model), "--rounds", "1", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        return {"error": done.stderr[-400:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {name: value for name, value in found.items() if name != "runs"}


@contextmanager
def a_model(named: Path | None, *, small: bool) -> Iterator[Path]:
    """The named model, or one of random weights."""
    if named is not None:
        yield named
        return
    from tests.helpers_gguf import RawTensor, tiny_model

    shape: dict[str, Any] = {"n_layer": 28, "n_embd": 2048, "n_head": 16, "n_head_kv": 8, "head_dim": 128, "n_ff": 6144}
    if small:
        shape |= {"n_layer": 2, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_ff": 256}
    rng = np.random.default_rng(0)

    def q4_k(rows: int, k: int) -> RawTensor:
        blocks = rng.integers(0, 256, (rows * k // 256, 144), np.uint8)
        blocks[:, :4] = np.array([2e-4, 1e-3], np.float16).view(np.uint8)  # a scale and a minimum of likely size
        return RawTensor(12, (rows, k), blocks.tobytes())

    e, q, kv, f = shape["n_embd"], shape["n_head"], shape["n_head_kv"], shape["n_ff"]
    d = shape["head_dim"]
    layer = {"attn_q": (q * d, e), "attn_k": (kv * d, e), "attn_v": (kv * d, e), "attn_output": (e, q * d),
             "ffn_gate": (f, e), "ffn_up": (f, e), "ffn_down": (e, f)}  # fmt: skip
    tensors = {f"blk.{i}.{name}.weight": q4_k(*size) for i in range(shape["n_layer"]) for name, size in layer.items()}
    with tempfile.TemporaryDirectory() as folder:
        yield tiny_model(Path(folder) / "random.gguf", "qwen3", n_ctx=32_768, tensors=tensors, **shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="a GGUF file (default: random weights)")
    parser.add_argument("--small", action="store_true", help="tiny sizes: shows that it works, not how well")
    parser.add_argument("--only", default="copies,cells,attention,steps", help="sections, separated by commas")
    parser.add_argument("--stall", action="store_true", help="run the stall scenario, too")
    parser.add_argument("--tests", default="", help="what the tests said, for the JSON line")
    parser.add_argument("--out", type=Path, help="write the JSON line here too")
    args = parser.parse_args()
    sizes, wanted = SMALL if args.small else Sizes(), args.only.split(",")
    result: dict[str, Any] = {"bench": "gpu", "tests": args.tests}
    with ExitStack() as stack:
        gpu = stack.enter_context(open_gpu())
        result["device"] = f"{gpu.name}, {gpu.arch}"
        print(result["device"], flush=True)
        bench = Bench(gpu, sizes, stack.enter_context(ExitStack()))
        for name, section in (("copies", copies), ("cells", cells), ("attention", attend)):
            if name in wanted:
                report(result, name, section(bench))
    if "steps" in wanted or args.stall:
        with a_model(args.model, small=args.small) as model:
            if "steps" in wanted:
                report(result, "steps", steps(model, sizes))
            if args.stall:
                result["stall"] = stall(model)
    finish(result, args.out)


def report(result: dict[str, Any], name: str, figures: Figures) -> None:
    """Prints a section as a table; rates of memory also as a share of the device's copy rate."""
    limit = result.get("copies", figures).get("device_copy_gb_s", 0.0)
    result[name] = figures
    rows = [[key, value, value / limit if limit and "gb_s" in key else ""] for key, value in figures.items()]
    print_table([name, "", "of copy rate"], rows)


if __name__ == "__main__":
    main()
