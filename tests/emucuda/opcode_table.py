"""Runs a table of PTX instructions in one kernel: each line of the table on every input, results by line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CONSTRAINT = {2: "h", 4: "r", 8: "l"}
_CTYPE = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}


@dataclass(frozen=True)
class Line:
    """One instruction: `text` with $0 for the result and $1 to $3 for the inputs, and what it must give."""

    text: str
    expected: Callable[..., Any]
    """From the inputs, as unsigned Python integers, to the result's bits."""
    inputs: tuple[str, ...]
    """dtypes of the inputs: u2, u4, u8."""
    output: str = "u4"

    @property
    def id(self) -> str:
        return self.text.split(";")[0] if self.text[0] != "{" else self.text


def values(dtype: str, n: int, seed: int, special: Sequence[int] = ()) -> NDArray[Any]:
    """n values of an unsigned dtype: the special ones first, then random bits."""
    bits = np.dtype(dtype).itemsize * 8
    rng = np.random.default_rng(seed)
    edges = [0, 1, 2, 31, 32, 33, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1, *special]
    found = rng.integers(0, 1 << (bits - 1), n, np.uint64) * 2 + rng.integers(0, 2, n, np.uint64)
    for i, edge in enumerate(rng.permutation(np.array(edges, np.uint64))[: n // 2]):
        found[2 * i] = edge
    return (found & np.uint64((1 << bits) - 1)).astype(dtype)


def kernel_source(lines: Sequence[Line]) -> str:
    """A kernel k(inputs of 2, 4 and 8 bytes, three each; outputs) with a row of outputs per line."""
    body = []
    for row, line in enumerate(lines):
        width = np.dtype(line.output).itemsize
        text = line.text
        for k in range(4):
            text = text.replace(f"${k}", f"%{k}")
        inputs = ", ".join(f'"{_CONSTRAINT[np.dtype(d).itemsize]}"({d}_{k}[i])' for k, d in enumerate(line.inputs))
        body.append(
            f'{{ {_CTYPE[width]} r; asm volatile("{text}" : "={_CONSTRAINT[width]}"(r) : {inputs}); '
            f"out[{row} * n + i] = r; }}"
        )
    pointers = ", ".join(f"const {_CTYPE[w]}* u{w}_{k}" for w in (2, 4, 8) for k in range(3))
    return (
        f'extern "C" __global__ void k({pointers}, unsigned long long* out) {{\n'
        "int i = threadIdx.x, n = blockDim.x;\n" + "\n".join(body) + "\n}\n"
    )


def run_table(lines: Sequence[Line], inputs: dict[str, NDArray[Any]], n: int) -> NDArray[np.uint64]:
    """Results [line, n] for inputs named u4_0, u4_1, ...; those not given are random."""
    from .helpers import Gpu

    arrays = []
    for width in (2, 4, 8):
        for k in range(3):
            name = f"u{width}_{k}"
            arrays.append(inputs.get(name, values(f"u{width}", n, width * 10 + k)))
    out = np.zeros((len(lines), n), np.uint64)
    return Gpu().run(kernel_source(lines), *arrays, out, block=n)[-1]


def default_inputs(n: int) -> dict[str, NDArray[Any]]:
    return {f"u{w}_{k}": values(f"u{w}", n, w * 10 + k) for w in (2, 4, 8) for k in range(3)}
