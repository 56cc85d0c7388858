"""AMX in software: the AMX kernels run on processors that have AVX-512 with BF16, but no tiles. See emuamx.cpp.

The product is not changed and knows nothing of this: LLVM compiles for any level anywhere, and only the execution of
a tile instruction traps. Each trap costs some microseconds.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llamatrio.backends.cpu import levels as product
from llamatrio.backends.cpu.levels import Level, host_levels
from llamatrio.config import cache_dir
from tests import cxx

_SOURCE = Path(__file__).with_name("emuamx.cpp")
_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared"]
_NEEDED = "avx512bf16"
"""The level whose other instructions the AMX kernels use."""


def missing() -> str | None:
    """Why AMX cannot be emulated here, or None."""
    if host_levels()[-1].has_amx:
        return "this processor has AMX itself"
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return "emulated AMX needs Linux on x86-64"
    if _NEEDED not in [level.name for level in host_levels()]:
        return f"emulated AMX needs {_NEEDED}, which the AMX kernels use besides"
    if cxx.compiler() is None:
        return f"emulated AMX {cxx.NO_COMPILER}"
    return None


def library() -> Path:
    """Path of the emulator, built if need be. Raises BuildError."""
    path = cache_dir() / "emuamx" / cxx.hash_of([_SOURCE, Path(__file__)]) / "emuamx.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        built = path.with_suffix(f".{os.getpid()}.so")
        cxx.compile_cxx(*_FLAGS, *cxx.MACHINE_FLAGS, str(_SOURCE), "-o", str(built))
        built.rename(path)
    return path


@functools.cache
def install() -> None:
    """From now on, tile instructions work in every thread of this process."""
    if ctypes.CDLL(str(library())).emuamx_install():
        raise OSError("the handler of SIGILL cannot be set")


@functools.cache
def levels() -> tuple[Level, ...]:
    """The levels that kernels can be run at in tests: the host's, and AMX by emulation where the host has none."""
    if missing():
        return host_levels()
    install()
    return (*host_levels(), next(level for _, level in product._X86_LEVELS if level.has_amx))


def emulated() -> list[str]:
    """Names of the levels() that this host lacks."""
    return [level.name for level in levels() if level not in host_levels()]


def needs_amx() -> pytest.MarkDecorator:
    """Skips a test where AMX neither is nor can be emulated."""
    return pytest.mark.skipif(not levels()[-1].has_amx, reason=str(missing()))


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Backends opened meanwhile run at the level called `name`, one of levels()."""
    from llamatrio.backends.cpu.step import compiled_step

    compiled_step()  # for this host: it has no tile instruction, and compiling it once more would take ten seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "host_levels", levels)
        patch.setenv("LLAMATRIO_CPU_LEVEL", name)
        yield
