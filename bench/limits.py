"""How near the matrix kernels come to the machine's limits.

First the limits: reading, and int8, f32 and (where there is AMX) tile products per second. Then for each weight type
the rows kernel at 1 to 16 rows: bytes of packed weights per second, and the share of the limit that it is nearer to,
m for memory (a read loop over the same bytes, measured just before) or a for arithmetic; and the prompt kernel at 512
rows: operations per second, and the share of the arithmetic that it uses. Last, one JSON line.

    python -m bench.limits [--threads N] [--types Q4_1,Q8_0] [--shape N,K] [--level avx2] [--seconds S] [--out FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from bench.common import finish, machine
from bench.peaks import Peak, f32_peak, int8_peak, read_kernel, tile_peak
from llamatrio import config
from llamatrio.backends.cpu.activations import bf16_bytes, q8_bytes
from llamatrio.backends.cpu.arena import Arena
from llamatrio.backends.cpu.compile import python_function
from llamatrio.backends.cpu.formats import ROWS
from llamatrio.backends.cpu.levels import Level, current_level, find_level
from llamatrio.backends.cpu.linear import LinearKernels, linear_kernels, row_stride
from llamatrio.backends.cpu.pack import FORMATS, Packing, packed_bytes
from llamatrio.backends.cpu.panel import scratch_bytes
from llamatrio.backends.cpu.sketch import Q8_SKETCH
from llamatrio.backends.cpu.whole_rows import Q8_WHOLE
from llamatrio.model.ggml_type import GGMLType

ROW_COUNTS = (1, 2, 4, 8, 16)
PROMPT_ROWS = 512
N_ROUNDS = 5
TURNS = 100_000
PACKINGS: dict[str, Packing] = {type.name: type for type in FORMATS}
PACKINGS |= {"Q8_0-whole": Q8_WHOLE, "Q8_0-sketch": Q8_SKETCH}
"""By name; a head is packed in the last two ways where it is most of a step (weights.py)."""
FILL = 0x2C
"""Every byte of weights and activations: a harmless number in every format, none of them subnormal."""

Task = Callable[[], None]
Line = dict[str, float | str]


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

    def multiply(self, kernel: int) -> list[Task]:
        run = python_function(kernel, 3)
        return [_bound(run, self.x.ctypes.data, TURNS, sink.ctypes.data) for sink in self.scratch]

    def time(self, pool: ThreadPoolExecutor, tasks: Sequence[Task]) -> float:
        """Seconds of one pass of all threads: the best of rounds that last self.seconds together.

        The best, as the question is what the kernel can do: whatever else the machine does only adds time.
        """
        once = _run(pool, tasks, 1)
        repeats = max(1, int(self.seconds / N_ROUNDS / once))
        return min(_run(pool, tasks, repeats) / repeats for _ in range(N_ROUNDS))


def _bound(run: Callable[..., None], *arguments: int) -> Task:
    return lambda: run(*arguments)


def _run(pool: ThreadPoolExecutor, tasks: Sequence[Task], repeats: int) -> float:
    def repeat(task: Task) -> None:
        for _ in range(repeats):
            task()

    start = time.perf_counter()
    list(pool.map(repeat, tasks))
    return time.perf_counter() - start


def measure_limits(bench: Bench, pool: ThreadPoolExecutor) -> dict[str, float]:
    """The machine's limits at this level: bytes and operations per second."""
    n_bytes = packed_bytes(GGMLType.F32, bench.n, bench.k)
    limits = {"read": n_bytes / bench.time(pool, bench.read(n_bytes))}
    peaks: dict[str, Peak] = {"int8": int8_peak(bench.level), "f32": f32_peak(bench.level)}
    if bench.level.has_amx:
        peaks["tiles"] = tile_peak(bench.level)
    for name, peak in peaks.items():
        limits[name] = bench.n_threads * TURNS * peak.operations / bench.time(pool, bench.multiply(peak.kernel))
    return limits


def measure(bench: Bench, pool: ThreadPoolExecutor, name: str, limits: dict[str, float]) -> Line:
    """One line of the table: rates in bytes (rows) and operations (prompt) per second, and shares of the limits."""
    kernels = linear_kernels(PACKINGS[name], bench.level)
    n_bytes, work = packed_bytes(PACKINGS[name], bench.n, bench.k), 2 * bench.n * bench.k
    read = n_bytes / bench.time(pool, bench.read(n_bytes))
    line: Line = {"type": name, "bytes": float(n_bytes), "read": read}
    arithmetic = limits["int8" if kernels.rows_form == "q8" else "f32"]
    for m in ROW_COUNTS:
        seconds = bench.time(pool, bench.rows(kernels, m))
        line |= {f"rows{m}": n_bytes / seconds, f"rows{m}_m": n_bytes / seconds / read}
        line[f"rows{m}_a"] = m * work / seconds / arithmetic
    m = PROMPT_ROWS
    prompt = bench.rows(kernels, m) if kernels.panel is None else bench.panel(kernels.panel, m)
    rate = m * work / bench.time(pool, prompt)
    line["prompt"], line["prompt_a"] = rate, rate / (arithmetic if kernels.panel is None else limits["tiles"])
    return line


def print_line(line: Line) -> None:
    """Rates in GB/s and TOP/s, each with its share of the nearer limit."""
    texts = [f"{line['type']:11} {float(line['bytes']) / 1e6:6.1f} MB read {float(line['read']) / 1e9:5.1f} "]
    for m in ROW_COUNTS:
        share, limit = max((float(line[f"rows{m}_{limit}"]), limit) for limit in "ma")
        texts.append(f"{m:2}: {float(line[f'rows{m}']) / 1e9:5.1f} ({limit} {share:4.0%})")
    texts.append(f"{PROMPT_ROWS}: {float(line['prompt']) / 1e12:.2f} ({float(line['prompt_a']):.0%})")
    print("  ".join(texts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=config.n_usable_cores())
    parser.add_argument("--types", default=",".join(PACKINGS))
    parser.add_argument("--shape", default="14336,4096")
    parser.add_argument("--level", default=None)
    parser.add_argument("--seconds", type=float, default=0.25, help="time spent on each figure")
    parser.add_argument("--out", type=Path, help="write the JSON line here too")
    args = parser.parse_args()

    level = find_level(args.level) if args.level else current_level()
    n, k = (int(part) for part in args.shape.split(","))
    n_bytes = packed_bytes(GGMLType.F32, n, k) + PROMPT_ROWS * (row_stride(n) + 8 * k) + args.threads * scratch_bytes(k)
    with ExitStack() as stack:
        arena = stack.enter_context(Arena(n_bytes + (1 << 20)))
        pool = stack.enter_context(ThreadPoolExecutor(args.threads))
        bench = Bench(n, k, level, args.threads, args.seconds, arena)
        print(f"{n} x {k}, level {level.name}, {args.threads} threads")
        limits = measure_limits(bench, pool)
        print(
            ", ".join(
                f"{name} {rate / 1e9:,.0f} {'GB/s' if name == 'read' else 'GOP/s'}" for name, rate in limits.items()
            )
        )
        lines = []
        for name in args.types.split(","):
            lines.append(measure(bench, pool, name, limits))
            print_line(lines[-1])
    result = {"bench": "limits", "machine": machine(), "shape": [n, k], "level": level.name, "threads": args.threads}
    finish(result | {"limits": limits, "types": lines}, args.out)


if __name__ == "__main__":
    main()
