"""Compiles the kernels of `cuda_src` for a device, once: NVRTC, then a file in the cache folder.

A variant is a kernel's name and its macros; its module holds one entry point of that name. The cache's key is a
hash of every source file, the macros, the architecture and NVRTC's version, so nothing stale is ever loaded. The
PTX is kept beside the cubin: it is what one reads, or emulates, where there is no device.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from cuda.bindings import nvrtc
from cuda.core import Kernel, ObjectCode, Program, ProgramOptions

from llamatrio.errors import BackendError

Defines = tuple[tuple[str, int], ...]


class Compiled(NamedTuple):
    """One variant's machine code and PTX, and what the compiler said (ptxas -v: registers, spills, shared memory)."""

    cubin: bytes
    ptx: bytes
    log: str


@cache
def source_dir() -> Path:
    """The kernels' sources: inside the package in a wheel, at the repository's root in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "_cuda_src", package.parent / "cuda_src"):
        if (folder / "common.cuh").is_file():
            return folder
    raise BackendError(f"the CUDA sources are missing: neither {package / '_cuda_src'} nor a checkout's cuda_src")


@cache
def source_hash() -> str:
    """Hash of every file of the sources, names included."""
    digest = hashlib.sha256()
    for path in sorted(source_dir().glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def nvrtc_version() -> str:
    """NVRTC's version, as "13.5"."""
    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BackendError(f"NVRTC does not answer: {status.name}")
    return f"{major}.{minor}"


def cache_key(name: str, defines: Defines, arch: str) -> str:
    """Names a variant's file in the cache."""
    text = repr((name, sorted(defines), arch, nvrtc_version(), source_hash()))
    return f"{name}-{arch}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def compile_kernel(name: str, defines: Defines, arch: str) -> Compiled:
    """Compiles `name`.cu with `defines` for `arch` ("sm_90"). Needs NVRTC but no driver. Raises BackendError."""
    options = ProgramOptions(
        name=f"{name}.cu",
        arch=arch,
        std="c++17",
        lineinfo=True,
        use_bundled_headers=True,
        include_path=str(source_dir()),
        define_macro=[(key, str(value)) for key, value in defines] or None,
        ptxas_options=["-v"],
    )
    log = StringIO()
    program = Program((source_dir() / f"{name}.cu").read_text(), "c++", options)
    try:
        cubin = bytes(program.compile("cubin", logs=log).code)
        return Compiled(cubin, _ptx_of(program), log.getvalue())
    except Exception as error:
        raise BackendError(f"kernel {name} {dict(defines)} does not compile for {arch}: {error}") from error
    finally:
        program.close()


def _ptx_of(program: Program) -> bytes:
    """The PTX that the compilation to a cubin left behind."""
    status, size = nvrtc.nvrtcGetPTXSize(program.handle)
    ptx = bytes(size)
    if status == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        (status,) = nvrtc.nvrtcGetPTX(program.handle, ptx)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BackendError(f"NVRTC gives no PTX: {status.name}")
    return ptx.rstrip(b"\0")


def open_cubin(path: Path) -> ObjectCode:
    """Loads a cached module into the current context."""
    return ObjectCode.from_cubin(path.read_bytes(), name=path.stem)


class KernelLoader:
    """Compiled kernels by name and macros, for one architecture. Not thread-safe; owned by the backend."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.arch = arch
        self.folder = folder
        self._kernels: dict[tuple[str, Defines], Kernel] = {}

    def kernel(self, name: str, **defines: int) -> Kernel:
        """The kernel, compiled on first use (about 0.1 s, or 1 ms from the cache). Raises BackendError."""
        key = (name, tuple(sorted(defines.items())))
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = open_cubin(self.compiled(*key)).get_kernel(name)
        return found

    def compiled(self, name: str, defines: Defines) -> Path:
        """The variant's cubin in the cache; needs no device."""
        path = self.folder / f"{cache_key(name, defines, self.arch)}.cubin"
        if not path.is_file():
            made = compile_kernel(name, defines, self.arch)
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_whole(path.with_suffix(".ptx"), made.ptx)
            _write_whole(path, made.cubin)
        return path


def _write_whole(path: Path, data: bytes) -> None:
    """Writes through a temporary name, so that another process never sees half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
