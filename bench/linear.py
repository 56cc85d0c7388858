"""How near the matrix kernels come to the machine's limits.

For each weight type: bytes of packed weights per second of the rows kernel at 1, 4 and 16 rows beside a read loop
over the same bytes, and the arithmetic rate of the prompt kernel at 512 rows. Prints a table and, last, one JSON line.

    python bench/linear.py [--threads N] [--types Q4_1,Q8_0] [--shape N,K] [--level avx2] [--seconds S]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from llamatrio import config
from llamatrio.backends.cpu.activations import bf16_bytes, q8_bytes
from llamatrio.backends.cpu.arena import Arena
from llamatrio.backends.cpu.compile import compile_kernel, python_function
from llamatrio.backends.cpu.formats import ROWS
from llamatrio.backends.cpu.levels import Level, current_level, find_level
from llamatrio.backends.cpu.linear import LinearKernels, linear_kernels, row_stride
from llamatrio.backends.cpu.pack import FORMATS, packed_bytes
from llamatrio.backends.cpu.panel import scratch_bytes
from llamatrio.backends.cpu.rows import PREFETCH
from llamatrio.backends.cpu.vector import Asm, Value, vi32
from llamatrio.model.ggml_type import GGMLType

ROW_COUNTS = (1, 2, 4, 8, 16)
PROMPT_ROWS = 512
N_ROUNDS = 5
FILL = 0x2C
"""Every byte of weights and activations: a harmless number in every format, none of them subnormal."""

Task = Callable[[], None]


class Bench:
    """A matrix of n x k weights, activations and output for one level and a pool of threads."""

    def __init__(self, n: int, k: int, level: Level, n_threads: int, seconds: float, arena: Arena) -> None:
        self.n, self.k, self.level, self.n_threads, self.seconds = n, k, level, n_threads, seconds
        self.weights = arena.take(packed_bytes(GGMLType.F32, n, k))
        self.x = arena.take(max(PROMPT_ROWS * k * 4, q8_bytes(PROMPT_ROWS, k), bf16_bytes(PROMPT_ROWS, k)))
        self.ld_out = row_stride(n)
        self.out = arena.take(PROMPT_ROWS * self.ld_out)
        self.scratch = [arena.take(scratch_bytes(k)) for _ in range(n_threads)]
        for array in (self.weights, self.x, self.out, *self.scratch):
            array[:] = FILL

    def groups(self, thread: int) -> tuple[int, int]:
        """The thread's share, in pairs of groups."""
        pairs = self.n // (2 * ROWS)
        return 2 * (pairs * thread // self.n_threads), 2 * (pairs * (thread + 1) // self.n_threads)

    def rows(self, kernels: LinearKernels, m: int) -> list[Task]:
        run = python_function(kernels.rows, 8)
        fixed = (self.weights.ctypes.data, self.x.ctypes.data, self.out.ctypes.data, m, self.k, self.ld_out)
        return [_bound(run, *fixed, *self.groups(t)) for t in range(self.n_threads)]

    def panel(self, address: int, m: int) -> list[Task]:
        run = python_function(address, 9)
        fixed = (self.weights.ctypes.data, self.x.ctypes.data, self.out.ctypes.data)
        return [
            _bound(run, *fixed, self.scratch[t].ctypes.data, m, self.k, self.ld_out, *self.groups(t))
            for t in range(self.n_threads)
        ]

    def read(self, n_bytes: int) -> list[Task]:
        run = python_function(read_kernel(self.level), 3)
        share = n_bytes // self.n_threads // 512 * 512
        base = self.weights.ctypes.data
        return [_bound(run, base + t * share, share, self.out.ctypes.data) for t in range(self.n_threads)]

    def time(self, pool: ThreadPoolExecutor, tasks: Sequence[Task]) -> float:
        """Seconds of one pass of all threads: the best of rounds that last self.seconds together.

        The best, as the question is what the kernel can do: whatever else the machine does only adds time.
        """
        once = _run(pool, tasks, 1)
        repeats = max(1, int(self.seconds / N_ROUNDS / once))
        return min(_run(pool, tasks, repeats) / repeats for _ in range(N_ROUNDS))


def read_kernel(level: Level) -> int:
    """Kernel (source, n_bytes, sink): reads, with the prefetch of the rows kernels. n_bytes a multiple of 512."""

    def emit(asm: Asm, source: Value, n_bytes: Value, sink: Value) -> None:
        start = asm.pointer(source)

        def step(at: Value, sums: list[Value]) -> list[Value]:
            for line in range(8):
                asm.prefetch(start, asm.add(at, PREFETCH + 64 * line))
            return [asm.builder.xor(total, asm.load(start, asm.add(at, 64 * n), vi32)) for n, total in enumerate(sums)]

        sums = asm.loop(0, n_bytes, [asm.zero(vi32)] * 8, step, step=512)
        total = sums[0]
        for other in sums[1:]:
            total = asm.builder.xor(total, other)
        asm.store(total, asm.pointer(sink), 0)

    return compile_kernel("bench_read", emit, level)


def _bound(run: Callable[..., None], *arguments: int) -> Task:
    return lambda: run(*arguments)


def _run(pool: ThreadPoolExecutor, tasks: Sequence[Task], repeats: int) -> float:
    def repeat(task: Task) -> None:
        for _ in range(repeats):
            task()

    start = time.perf_counter()
    list(pool.map(repeat, tasks))
    return time.perf_counter() - start


def measure(bench: Bench, pool: ThreadPoolExecutor, type: GGMLType) -> dict[str, float | str]:
    """One line of the table: GB/s by rows, the read loop's GB/s, and TF/s of the prompt kernel."""
    kernels = linear_kernels(type, bench.level)
    n_bytes = packed_bytes(type, bench.n, bench.k)
    line: dict[str, float | str] = {"type": type.name, "mb": n_bytes / 1e6}
    line["read"] = n_bytes / bench.time(pool, bench.read(n_bytes)) / 1e9
    for m in ROW_COUNTS:
        line[f"rows{m}"] = n_bytes / bench.time(pool, bench.rows(kernels, m)) / 1e9
    m = PROMPT_ROWS
    prompt = bench.rows(kernels, m) if kernels.panel is None else bench.panel(kernels.panel, m)
    line["prompt_tflops"] = 2 * m * bench.n * bench.k / bench.time(pool, prompt) / 1e12
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=config.n_usable_cores())
    parser.add_argument("--types", default=",".join(type.name for type in FORMATS))
    parser.add_argument("--shape", default="14336,4096")
    parser.add_argument("--level", default=None)
    parser.add_argument("--seconds", type=float, default=0.25, help="time spent on each figure")
    args = parser.parse_args()

    level = find_level(args.level) if args.level else current_level()
    n, k = (int(part) for part in args.shape.split(","))
    n_bytes = packed_bytes(GGMLType.F32, n, k) + PROMPT_ROWS * (row_stride(n) + 8 * k) + args.threads * scratch_bytes(k)
    lines = []
    with ExitStack() as stack:
        arena = stack.enter_context(Arena(n_bytes + (1 << 20)))
        pool = stack.enter_context(ThreadPoolExecutor(args.threads))
        bench = Bench(n, k, level, args.threads, args.seconds, arena)
        print(f"{n} x {k}, level {level.name}, {args.threads} threads; GB/s of weights (share of a read loop), TF/s")
        for name in args.types.split(","):
            line = measure(bench, pool, GGMLType[name])
            lines.append(line)
            read = float(line["read"])
            cells = [
                f"{m:2}: {float(line[f'rows{m}']):5.1f} ({float(line[f'rows{m}']) / read:4.0%})" for m in ROW_COUNTS
            ]
            print(f"{name:6} {float(line['mb']):6.1f} MB read {read:5.1f}  {'  '.join(cells)}", end="")
            print(f"  {PROMPT_ROWS}: {float(line['prompt_tflops']):.2f} TF/s", flush=True)
    print(json.dumps({"shape": [n, k], "level": level.name, "threads": args.threads, "types": lines}))


if __name__ == "__main__":
    main()
