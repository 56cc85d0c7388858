"""Which instructions the kernels may use.

Levels are ordered `plain < avx2 < avx512 < avx512bf16 < amx`; each is a fixed LLVM target, not "whatever this host
has", so that a forced level runs exactly the code a lesser machine would run. On aarch64 and elsewhere there is only
`plain`, which on aarch64 takes the dot-product instructions where the host has them.

AVX-512 without VNNI (Skylake servers) counts as avx2: its int8 dot products are no faster there.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import llvmlite
import llvmlite.binding as llvm

from llamatrio import config

Dot = Literal["vnni", "maddubs", "sdot", "wide"]
"""How four 8-bit products are summed into a 32-bit lane."""


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set that kernels are compiled for."""

    name: str
    cpu: str
    """LLVM's name of the processor whose instructions are allowed."""
    features: str
    """LLVM features on top of `cpu`, as "+a,+b"."""
    dot: Dot
    has_fma: bool = True
    """Fused multiply-add is an instruction; without it a * b + c rounds twice."""
    has_f16: bool = True
    """f16 <-> f32 are instructions; without them they are bit operations."""
    has_bf16: bool = False
    """f32 -> bf16 and the dot product of bf16 are instructions (x86)."""
    has_amx: bool = False
    streams_weights: bool = False
    """Weights that a step reads once are asked for past the caches (non-temporal prefetch), which then keep what the
    event loop needs. Measured on Zen 5 only: Intel's processors put such lines into L1 alone."""
    n_vectors: int = 32
    """Registers of 16 x f32."""
    row_tile: int = 8
    """Rows that the matrix kernels take at once: as many as the registers hold."""


_AVX2 = frozenset({"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"})
_AVX512 = _AVX2 | frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni"})
_AVX512BF16 = _AVX512 | frozenset({"avx512bf16"})
_AMX = _AVX512BF16 | frozenset({"amx-tile", "amx-bf16"})

_X86_LEVELS: tuple[tuple[frozenset[str], Level], ...] = (
    (frozenset(), Level("plain", "x86-64", "", "wide", has_fma=False, has_f16=False, n_vectors=4, row_tile=2)),
    (_AVX2, Level("avx2", "x86-64-v3", "", "maddubs", n_vectors=8, row_tile=4)),
    (_AVX512, Level("avx512", "x86-64-v4", "+avx512vnni,-prefer-256-bit", "vnni")),
    (
        _AVX512BF16,
        Level(
            "avx512bf16",
            "x86-64-v4",
            "+avx512vnni,+avx512bf16,-prefer-256-bit",
            "vnni",
            has_bf16=True,
            streams_weights=True,
        ),
    ),
    (
        _AMX,
        Level(
            "amx",
            "x86-64-v4",
            "+avx512vnni,+avx512bf16,+amx-tile,+amx-bf16,-prefer-256-bit",
            "vnni",
            has_bf16=True,
            has_amx=True,
        ),
    ),
)

LEVEL_NAMES = tuple(level.name for _, level in _X86_LEVELS)


@cache
def host_levels() -> tuple[Level, ...]:
    """The levels this process can run, lowest first; `plain` is always among them."""
    features = {name for name, present in llvm.get_host_cpu_features().items() if present}
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return tuple(
            level
            for needed, level in _X86_LEVELS
            if needed <= features and (not level.has_amx or _request_amx_permission())
        )
    if machine in ("aarch64", "arm64"):
        if "dotprod" in features:
            return (Level("plain", "generic", "+dotprod", "sdot", n_vectors=8, row_tile=4),)
        return (Level("plain", "generic", "", "wide", n_vectors=8, row_tile=4),)
    return (Level("plain", "generic", "", "wide", has_fma=False, has_f16=False, n_vectors=4, row_tile=2),)


def find_level(name: str) -> Level:
    """The level called `name`. Raises ValueError when there is none, or this host lacks it."""
    if name not in LEVEL_NAMES:
        raise ValueError(f"expected a CPU level of {', '.join(LEVEL_NAMES)}, not {name!r}")
    for level in host_levels():
        if level.name == name:
            return level
    usable = ", ".join(level.name for level in host_levels())
    raise ValueError(f"expected a CPU level that this processor has ({usable}), not {name!r}")


def current_level() -> Level:
    """The forced level (`config.cpu_level()`), else the best this host has. Raises ValueError as find_level."""
    forced = config.cpu_level()
    return host_levels()[-1] if forced is None else find_level(forced)


@cache
def _request_amx_permission() -> bool:
    """Asks Linux for the AMX tile state (arch_prctl ARCH_REQ_XCOMP_PERM); without it the first tile traps."""
    if not sys.platform.startswith("linux"):
        return False
    sys_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata = 158, 0x1023, 18
    refused = ctypes.CDLL(None).syscall(sys_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata)
    return not refused


@cache
def code_fingerprint(level: Level) -> str:
    """Names the machine code that this package's sources give at `level`: 16 hex digits."""
    digest = hashlib.sha256(f"{level}|{llvmlite.__version__}|{sys.platform}|{sys.version_info[:2]}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def configure_numba(level: Level | None = None) -> None:
    """Makes Numba compile for `level` and cache beside the kernels. Call it before Numba compiles anything.

    Numba's own cache sees edits of the jitted file only, not of the intrinsics and emitters it was built from:
    hence a folder named by the fingerprint of all of them.
    """
    import numba

    level = level or current_level()
    settings: Any = numba.config
    settings.CPU_NAME = level.cpu
    settings.CPU_FEATURES = level.features
    settings.CACHE_DIR = str(config.cache_dir() / "numba" / code_fingerprint(level))
