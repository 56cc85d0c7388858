"""A model whose weights no cache holds: how long it loads, what memory it takes, how near to the read limit it runs.

    python -m bench.large [-m MODEL] [--folder DIR] [--threads N] [--kv-type f16] [--out FILE]

Without a model, one of Qwen3-8B's shape with random Q4_K_M weights (4.7 GB) is written to a temporary folder: its text
means nothing, its speed does. Prints memory and times, then per number of streams the bytes of weights that a step
reads each second beside a plain read loop, and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from numpy.typing import NDArray

from bench.common import finish, machine, print_table
from bench.limits import Bench
from llamatrio import config
from llamatrio.backends.cpu.arena import Arena, padded
from llamatrio.backends.cpu.backend import CpuBackend, open_cpu_backend
from llamatrio.backends.cpu.levels import current_level
from llamatrio.backends.cpu.weights import weights_bytes
from llamatrio.model.arch import spec_from_gguf
from llamatrio.model.gguf import open_gguf
from llamatrio.sched.types import Batch, Run

N_LAYER, N_EMBD, N_HEAD, N_HEAD_KV, HEAD_DIM, N_FF, N_VOCAB = 36, 4096, 32, 8, 128, 12288, 151_936
N_CELLS, CONTEXT, N_STEPS = 4096, 64, 12
STREAMS = (1, 2, 4, 8)
_BLOCK_BYTES = {Type.Q4_K: 144, Type.Q6_K: 210}
_READ_SHAPE = (65_536, 4096)
"""Of a f32 matrix that the read loop reads: 1 GiB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="a GGUF file (default: random weights)")
    parser.add_argument("--folder", type=Path, help="where the random model is written")
    parser.add_argument("--threads", type=int, default=config.n_usable_cores())
    parser.add_argument("--kv-type", choices=("f16", "q8_0"), default="f16")
    parser.add_argument("--out", type=Path, help="write the JSON line here too")
    args = parser.parse_args()
    about = machine(f"{args.threads} threads")
    print(about, flush=True)
    read = read_rate(args.threads)
    with ExitStack() as stack:
        model = args.model or stack.enter_context(random_model(args.folder))
        found = measure(model, args.threads, args.kv_type)
    rates = {n: found["step_bytes"] / seconds / 1e9 for n, seconds in found["step_seconds"].items()}
    memory = {name: f"{found[name] / 1e9:.2f} GB" for name in ("file_bytes", "planned_bytes", "anonymous_bytes")}
    print_table(["", *memory, "load"], [["memory", *memory.values(), f"{found['load_seconds']:.1f} s"]])
    print_table(
        ["streams", "step ms", "tokens/s", "GB/s of weights", "read loop GB/s", "share"],
        [[str(n), 1e3 * s, n / s, rates[n], read, rates[n] / read] for n, s in found["step_seconds"].items()],
    )
    finish({"bench": "large", "machine": about, "read_gb_s": read, "weights_gb_s": rates, **found}, args.out)


def measure(model: Path, n_threads: int, kv_type: Any) -> dict[str, Any]:
    """Loads the model and times its decode steps."""
    with open_gguf(model) as file:
        spec = spec_from_gguf(file)
        embedding = "token_embd.weight" if has_head(file.tensors) else ""
        n_weights = weights_bytes(file, spec)
        n_read = n_weights - (padded(len(file.data(embedding).ravel())) if embedding else 0)
    start = time.perf_counter()
    with open_cpu_backend(
        model, n_cells=N_CELLS, n_lanes=max(STREAMS), n_threads=n_threads, type_k=kv_type, type_v=kv_type
    ) as backend:
        loaded = time.perf_counter() - start
        seconds = {n: step_seconds(backend, n) for n in STREAMS}
        return {
            "file_bytes": model.stat().st_size,
            "planned_bytes": n_weights + N_CELLS * backend.layout.record_bytes,
            "anonymous_bytes": anonymous_bytes(),
            "load_seconds": loaded,
            "step_bytes": n_read,
            "step_seconds": seconds,
        }


def has_head(tensors: Any) -> bool:
    """Whether the head has weights of its own, so that a step reads only rows of the embedding."""
    return "output.weight" in tensors


def step_seconds(backend: CpuBackend, n: int) -> float:
    """The shortest of some steps of n streams: whatever else the machine does only adds time."""
    table = np.arange(N_CELLS, dtype=np.int32).reshape(max(STREAMS), -1)
    lanes = np.arange(n, dtype=np.int32)
    batch = Batch(
        tokens=lanes + 5,
        positions=np.full(n, CONTEXT, np.int32),
        lanes=lanes,
        cells=table[:n, CONTEXT].copy(),
        runs=tuple(Run(i, i, 1, CONTEXT, True) for i in range(n)),
        cell_table=table,
        out_rows=lanes,
        n_candidates=1,
    )
    return min(backend.forward(batch).result().seconds for _ in range(N_STEPS))


def read_rate(n_threads: int) -> float:
    """GB/s of a plain read loop over more than any cache holds."""
    n, k = _READ_SHAPE
    with Arena(3 << 30) as arena, ThreadPoolExecutor(n_threads) as pool:
        bench = Bench(n, k, current_level(), n_threads, 3.0, arena)
        return 4 * n * k / bench.time(pool, bench.read(4 * n * k)) / 1e9


def anonymous_bytes() -> int:
    """Memory of this process that is no file's: what the system cannot take back."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


@contextmanager
def random_model(folder: Path | None) -> Iterator[Path]:
    """A file of Qwen3-8B's shape, quantized as Q4_K_M: attn_v and ffn_down Q6_K in every other layer, and the head."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "random-8b.gguf"
        writer = GGUFWriter(path, "qwen3")
        _write_metadata(writer)
        shapes = _shapes()
        for name, (rows, k, type) in shapes.items():
            if type is None:
                writer.add_tensor_info(name, (k,), np.dtype(np.float32), 4 * k)
            else:
                size = k // 256 * _BLOCK_BYTES[type]
                writer.add_tensor_info(name, (rows, size), np.dtype(np.uint8), rows * size, raw_dtype=type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        some = {type: _random_blocks(type, 1 << 16) for type in _BLOCK_BYTES}
        for rows, k, type in shapes.values():
            writer.write_tensor_data(np.ones(k, np.float32) if type is None else _rows(some[type], rows, k // 256))
        writer.close()
        yield path


def _write_metadata(writer: GGUFWriter) -> None:
    writer.add_block_count(N_LAYER)
    writer.add_context_length(40_960)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    texts = ["a", "b", "ab", *(f"<unused{i}>" for i in range(N_VOCAB - 3))]
    writer.add_token_list(texts)
    writer.add_token_types([1] * 3 + [5] * (N_VOCAB - 3))
    writer.add_token_merges(["a b"])


def _shapes() -> dict[str, tuple[int, int, Type | None]]:
    """Name: rows, columns and type; None for a vector of f32."""
    q, kv = N_HEAD * HEAD_DIM, N_HEAD_KV * HEAD_DIM
    shapes: dict[str, tuple[int, int, Type | None]] = {"token_embd.weight": (N_VOCAB, N_EMBD, Type.Q4_K)}
    for i in range(N_LAYER):
        finer = Type.Q6_K if i % 2 else Type.Q4_K
        layer: dict[str, tuple[int, int, Type | None]] = {
            "attn_norm": (1, N_EMBD, None),
            "attn_q": (q, N_EMBD, Type.Q4_K),
            "attn_k": (kv, N_EMBD, Type.Q4_K),
            "attn_v": (kv, N_EMBD, finer),
            "attn_q_norm": (1, HEAD_DIM, None),
            "attn_k_norm": (1, HEAD_DIM, None),
            "attn_output": (N_EMBD, q, Type.Q4_K),
            "ffn_norm": (1, N_EMBD, None),
            "ffn_gate": (N_FF, N_EMBD, Type.Q4_K),
            "ffn_up": (N_FF, N_EMBD, Type.Q4_K),
            "ffn_down": (N_EMBD, N_FF, finer),
        }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"output_norm.weight": (1, N_EMBD, None), "output.weight": (N_VOCAB, N_EMBD, Type.Q6_K)}


def _random_blocks(type: Type, n: int) -> NDArray[np.uint8]:
    blocks = np.random.default_rng(0).integers(0, 256, (n, _BLOCK_BYTES[type]), np.uint8)
    if type is Type.Q4_K:
        blocks[:, :4] = np.array([2e-4, 1e-3], np.float16).view(np.uint8)  # a scale and a minimum of likely size
    else:
        blocks[:, -2:] = np.array([1e-5], np.float16).view(np.uint8)
    return blocks


def _rows(blocks: NDArray[np.uint8], n_rows: int, n_blocks: int) -> NDArray[np.uint8]:
    """As many rows of `n_blocks` blocks as asked for, from few blocks."""
    return np.resize(blocks, (n_rows, n_blocks * blocks.shape[1]))


if __name__ == "__main__":
    main()
