"""Registers, spills and shared memory of every kernel variant, as ptxas reports them: `make kernels-report`.

    python -m bench.kernels_report [sm_90 ...]

Needs NVRTC, but no device and no driver. Exits with 1 when a kernel spills on sm_80 or later.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from llamatrio.backends.cuda.compiler import compile_kernel
from llamatrio.backends.cuda.kernels.weights import WeightType

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
HEAD_SIZES = (32, 64, 96, 128, 256)
QUANTIZED = tuple(t for t in WeightType if not t.is_float)


class Variant(NamedTuple):
    """A kernel and its macros."""

    name: str
    defines: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.defines)])


class Resources(NamedTuple):
    """What a compiled kernel takes."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def variant(name: str, **defines: int) -> Variant:
    return Variant(name, tuple(sorted((key, int(value)) for key, value in defines.items())))


ONE_OF_EACH = (
    variant("gather_cells"),
    variant("scatter_cells"),
    variant("convert_rows", OUT=1),
    variant("rms_norm", OUT=1),
    variant("post_norm"),
    variant("add_rows"),
    variant("take_rows"),
    variant("glu", OUT=1, ACT=0),
    variant("rope_store", D=128, NEOX=1, K_Q8=1, V_Q8=1),
    variant("planar_rows", TYPE=WeightType.Q4_K),
    variant("embed_rows", TYPE=WeightType.Q4_K),
    variant("matmul_rows", TYPE=WeightType.Q4_K, ROWS=1),
    variant("matmul_float", TYPE=WeightType.F16, ROWS=1),
    variant("matmul_tile", TYPE=WeightType.Q4_K, ROWS=128),
    variant("attention_decode", D=128, K_Q8=1, V_Q8=1),
    variant("attention_combine", D=128),
    variant("attention_prefill", D=128, K_Q8=1, V_Q8=1),
    variant("top_k_part"),
    variant("top_k_merge"),
    variant("moe_route", PER_LANE=4),
    variant("moe_plan"),
    variant("moe_sum"),
)
"""Every file once."""


def all_variants() -> Iterator[Variant]:
    """Every variant that a model may need."""
    yield from (v for v in ONE_OF_EACH if not v.defines)
    for out in range(3):
        yield variant("convert_rows", OUT=out)
        yield variant("rms_norm", OUT=out)
        yield from (variant("glu", OUT=out, ACT=act) for act in range(3))
    yield from (variant("moe_route", PER_LANE=n) for n in (1, 2, 4, 8))
    for type in WeightType:
        if type in QUANTIZED:
            yield variant("planar_rows", TYPE=type)
        yield variant("embed_rows", TYPE=type)
        few = "matmul_rows" if type in QUANTIZED else "matmul_float"
        yield from (variant(few, TYPE=type, ROWS=n) for n in (1, 2, 4, 8, 16))
        yield from (variant("matmul_tile", TYPE=type, ROWS=n) for n in (16, 64, 128))
    for d in HEAD_SIZES:
        yield variant("attention_combine", D=d)
        for kinds in ({"K_Q8": k, "V_Q8": v} for k in (0, 1) for v in (0, 1)):
            yield from (variant("rope_store", D=d, NEOX=n, **kinds) for n in (0, 1))
            yield variant("attention_decode", D=d, **kinds)
            yield variant("attention_prefill", D=d, **kinds)


def resources(log: str) -> Resources:
    """Reads `ptxas -v`. ValueError where it says nothing of the kernel."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    shared = re.search(r"(\d+) bytes smem", log)
    if registers is None or not spills:
        raise ValueError(f"no resources in the compiler's log: {log!r}")
    return Resources(int(registers[1]), sum(map(int, spills)), int(shared[1]) if shared else 0)


def compile_resources(one: Variant, arch: str) -> Resources:
    return resources(compile_kernel(one.name, one.defines, arch).log)


def main(architectures: list[str]) -> int:
    spilled = 0
    print(f"{'kernel':52}" + "".join(f"{arch:>22}" for arch in architectures))
    print(f"{'':52}" + f"{'regs / spill / smem':>22}" * len(architectures))
    for one in all_variants():
        found = [compile_resources(one, arch) for arch in architectures]
        print(f"{one!s:52}" + "".join(f"{r.registers:9} /{r.spill_bytes:4} /{r.shared_bytes:6}" for r in found))
        spilled += sum(r.spill_bytes > 0 for r, arch in zip(found, architectures, strict=True) if arch != "sm_75")
    print(f"{spilled} spilling kernels on sm_80 and later")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(ARCHITECTURES)))
