"""Builds the driver library and kernel objects, cached by the contents of what they are made of.

Rules:
 * everything lies under config.cache_dir()/emucuda: `driver-<hash>/libcuda.so.1`, `kernels-<hash>/<image key>/`;
 * a hash covers the sources that take part, so a change of the driver keeps the kernels, and the other way round;
 * a result appears by rename, so that processes may build at the same time.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llamatrio.config import cache_dir
from tests import cxx

HERE = Path(__file__).parent
DRIVER_FLAGS = [
    "-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-tree-loop-vectorize",  # gcc 12.2 -O2 -mavx2 loses the sums of `c[i][j] += a[i][k] * b[k][j]`
]  # fmt: skip
KERNEL_FLAGS = [
    "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w",
    "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-fno-math-errno",
]  # fmt: skip


def root() -> Path:
    return cache_dir() / "emucuda"


@functools.cache
def kernel_dir() -> Path:
    """Where PTX and kernel objects lie, for this state of the translator."""
    sources = [*(HERE / "ptx").rglob("*.py"), *(HERE / "kernel").glob("*.h"), Path(__file__)]
    path = root() / f"kernels-{cxx.hash_of(sources)}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def driver_library() -> Path:
    """Path of libcuda.so.1, built if need be. Raises BuildError."""
    sources = sorted((HERE / "driver").glob("*.cpp"))
    headers = [*(HERE / "driver").glob("*.h"), *(HERE / "kernel").glob("*.h")]
    folder = root() / f"driver-{cxx.hash_of([*sources, *headers, Path(__file__)])}"
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _build_driver(sources, library)
    return library


def _build_driver(sources: list[Path], library: Path) -> None:
    scratch = library.with_name(f"build-{os.getpid()}")
    scratch.mkdir(exist_ok=True)

    def compile_one(source: Path) -> Path:
        target = scratch / f"{source.stem}.o"
        cxx.compile_cxx(*DRIVER_FLAGS, *cxx.MACHINE_FLAGS, "-c", str(source), "-o", str(target))
        return target

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = [str(path) for path in pool.map(compile_one, sources)]
    linked = scratch / "libcuda.so.1"
    soname = ["-Wl,-soname,libcuda.so.1"]
    cxx.compile_cxx("-shared", *objects, "-o", str(linked), *soname, "-lpthread", "-ldl")
    linked.rename(library)
    shutil.rmtree(scratch)


def build_kernel(ptx: Path, entry: str, target: Path) -> None:
    """Translates one entry of a PTX file into the shared object `target`. Raises PtxError or BuildError."""
    from .ptx.parser import parse
    from .ptx.translate import translate

    text = translate(parse(ptx.read_text()), entry)
    source = target.with_suffix(f".{os.getpid()}.cpp")
    source.write_text(text)
    built = target.with_suffix(f".{os.getpid()}.so")
    include = f"-I{HERE / 'kernel'}"
    cxx.compile_cxx(*KERNEL_FLAGS, *cxx.MACHINE_FLAGS, include, str(source), "-o", str(built))
    source.rename(target.with_suffix(".cpp"))
    built.rename(target)


def builder_command() -> str:
    """The shell command by which the driver builds a kernel: `COMMAND folder entry stem`."""
    return f"'{sys.executable}' '{HERE / 'build_kernel.py'}'"
