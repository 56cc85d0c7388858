"""From an emitted function to machine code at an address.

A kernel is one function of i64 arguments (addresses and sizes) that returns nothing. It is compiled for one
level, once per machine: the object file is kept under cache_dir()/kernels/<fingerprint>/<name>.<level>.o, where
the fingerprint covers this package's sources, so an edit never meets stale code. A cache entry starts with its
own SHA-256; a damaged one is compiled again. Nothing depends on the cache being writable.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import inspect
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from llamatrio import config
from llamatrio.backends.cpu.levels import Level, code_fingerprint, current_level
from llamatrio.backends.cpu.vector import Asm, i64

Emit = Callable[..., None]
"""emit(asm, *args): writes the kernel's body; every args[i] is an i64 value."""

_log = logging.getLogger("llamatrio.cpu")

_lock = threading.RLock()
_addresses: dict[tuple[str, str], int] = {}
_DIGEST_BYTES = 32


def compile_kernel(name: str, emit: Emit, level: Level | None = None) -> int:
    """Address of the kernel that `emit(asm, *i64 values)` writes, compiled for `level` (default: current_level()).

    `name` identifies the kernel in this process and on disk: the same name must always mean the same code. The
    address stays valid until the process ends.
    """
    level = level or current_level()
    with _lock:
        key = (name, level.name)
        if key not in _addresses:
            path = config.cache_dir() / "kernels" / code_fingerprint(level) / f"{name}.{level.name}.o"
            code = _read_entry(path)
            if code is None:
                _announce_compilation(level.name)
                code = _build_object(name, emit, level)
                _write_entry(path, code)
            _addresses[key] = _load_object(name, code, level)
        return _addresses[key]


@cache
def _announce_compilation(level_name: str) -> None:
    """Once per process and level: the first start on a machine takes seconds longer, and should say why."""
    _log.info("compiling the %s kernels for this processor: this start takes some seconds more", level_name)


def python_function(address: int, n_args: int) -> Callable[..., None]:
    """The kernel at `address` as a Python callable of `n_args` ints. It runs without the GIL."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * n_args)(address)


def emit_ir(name: str, emit: Emit, level: Level) -> ir.Module:
    """The module holding the kernel, as LLVM IR before optimisation."""
    module = ir.Module(name)
    n_args = len(inspect.signature(emit).parameters) - 1
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [i64] * n_args), _symbol(name, level))
    function.attributes.add("nounwind")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    emit(Asm(builder, level), *function.args)
    builder.ret_void()
    return module


def emit_assembly(name: str, emit: Emit, level: Level) -> str:
    """The kernel's assembly text, for tests and for reading."""
    machine = _target_machine(level)
    return str(machine.emit_assembly(_optimised(emit_ir(name, emit, level), machine)))


def _symbol(name: str, level: Level) -> str:
    return f"llamatrio_{name}_{level.name}"


@cache
def _target_machine(level: Level) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=level.cpu, features=level.features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )


def _optimised(module: ir.Module, machine: Any) -> Any:
    """Parses and optimises. The code is vectors already: no vectorizer, and loops stay as written."""
    parsed = llvm.parse_assembly(str(module))
    parsed.triple = machine.triple
    parsed.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False
    options.loop_unrolling = options.loop_interleaving = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed


def _build_object(name: str, emit: Emit, level: Level) -> bytes:
    machine = _target_machine(level)
    return bytes(machine.emit_object(_optimised(emit_ir(name, emit, level), machine)))


@cache
def _engine(level: Level) -> Any:
    """MCJIT, which links the objects; it owns their pages for the life of the process."""
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=level.cpu, features=level.features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def _load_object(name: str, code: bytes, level: Level) -> int:
    _target_machine(level)  # initialises LLVM's native target
    engine = _engine(level)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = int(engine.get_function_address(_symbol(name, level)))
    assert address, f"kernel {name} was not linked"
    return address


def _read_entry(path: Path) -> bytes | None:
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, code = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write_entry(path: Path, code: bytes) -> None:
    """Writes under a temporary name and renames, so that another process never reads half an entry."""
    with contextlib.suppress(OSError):  # a read-only home costs a compilation, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
