"""Loads the emulated driver into this process, and sees to it that the driver knows each cubin's PTX.

The product is not changed and knows nothing of this. Two seams:
 * `cuda.core.Program` is replaced by a subclass that, after a compile to a cubin for the emulated architecture, asks
   NVRTC for the PTX of that compile (or, without line information, compiles once more for it);
 * the product keeps the PTX beside each cubin of its own cache: `compiler.open_cubin` registers the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests import cxx

from . import build
from .control import Control

ARCHITECTURE = "sm_80"


def missing() -> str | None:
    """Why the emulated driver cannot be used here, or None."""
    if cxx.compiler() is None:
        return cxx.NO_COMPILER
    if importlib.util.find_spec("cuda.core") is None:
        return "needs cuda-python"
    if importlib.util.find_spec("nvidia.cu13") is None:
        return "needs NVRTC: nvidia-cuda-nvrtc"
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    return None


@functools.cache
def install() -> Control:
    """Loads the driver and hooks compiles; the same Control each time. Call it before anything asks for a device."""
    if _mapped("libcuda.so"):
        raise RuntimeError("this process has loaded another libcuda; the emulated one must come first")
    control = Control(build.driver_library())
    control.set_kernel_builder(build.kernel_dir(), build.builder_command())
    control.set_workers(min(os.cpu_count() or 1, 4))
    _hook_program(control)
    _hook_product(control)
    return control


def _mapped(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return any(name in line and str(build.root()) not in line for line in maps)


def register(control: Control, cubin: bytes, ptx: bytes) -> None:
    """Makes the kernels of a cubin known: its PTX is what runs."""
    ptx = ptx.rstrip(b"\0")
    folder = build.kernel_dir() / hashlib.sha256(ptx).hexdigest()[:16]
    if not folder.exists():
        scratch = Path(tempfile.mkdtemp(dir=build.kernel_dir()))
        (scratch / "module.ptx").write_bytes(ptx)
        with contextlib.suppress(OSError):  # another process was first
            scratch.rename(folder)
    control.register(cubin, folder)


def environment() -> dict[str, str]:
    """Variables for a child process that is to see the emulated driver: start it as `python -m tests.emucuda.run`."""
    return {
        "LD_LIBRARY_PATH": _before(str(build.driver_library().parent), "LD_LIBRARY_PATH"),
        "PYTHONPATH": _before(str(build.HERE.parents[1]), "PYTHONPATH"),
    }


def _before(path: str, variable: str) -> str:
    old = os.environ.get(variable)
    return f"{path}:{old}" if old else path


def _hook_product(control: Control) -> None:
    from llamatrio.backends.cuda import compiler

    original = compiler.open_cubin

    def open_and_register(path: Path) -> Any:
        register(control, path.read_bytes(), path.with_suffix(".ptx").read_bytes())
        return original(path)

    compiler.open_cubin = open_and_register


def _hook_program(control: Control) -> None:
    import cuda.core

    original = cuda.core.Program

    class RecordingProgram(original):  # type: ignore[misc, valid-type]
        """Compiles as before, and registers the PTX of each cubin for the emulated architecture."""

        def __init__(self, code: Any, code_type: Any, options: Any = None) -> None:
            super().__init__(code, code_type, options)
            self._source = (code, code_type, options)

        def compile(self, target_type: Any, name_expressions: Any = (), logs: Any = None, *, cache: Any = None) -> Any:
            compiled = super().compile(target_type, name_expressions, logs, cache=cache)
            options = self._source[2]
            wanted = str(getattr(target_type, "value", target_type)) == "cubin" and options.arch == ARCHITECTURE
            if wanted:
                ptx = _ptx_of(self) if options.lineinfo and cache is None else self._compile_ptx(name_expressions)
                register(control, compiled.code, ptx)
            return compiled

        def _compile_ptx(self, name_expressions: Any) -> bytes:
            code, code_type, options = self._source
            program = original(code, code_type, dataclasses.replace(options, lineinfo=True))
            program.compile("cubin", name_expressions)
            ptx = _ptx_of(program)
            program.close()
            return ptx

    for module in list(sys.modules.values()):  # whoever imported the class before
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, RecordingProgram)


def _ptx_of(program: Any) -> bytes:
    """The PTX that a compile to a cubin left behind."""
    from cuda.bindings import nvrtc

    status, size = nvrtc.nvrtcGetPTXSize(program.handle)
    ptx = bytes(size)
    if status == 0:
        (status,) = nvrtc.nvrtcGetPTX(program.handle, ptx)
    if status != 0:
        raise RuntimeError(f"NVRTC gives no PTX: {status}")
    return ptx
