"""Runs instructions that LLVM assembles."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np

Array = np.ndarray[Any, Any]


@functools.cache
def _engine(text: str) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    body = "\\0A".join(line.strip() for line in (*text.splitlines(), "ret"))
    module = llvm.parse_assembly(
        f'define void @run() naked {{\n call void asm sideeffect "{body}", ""()\n unreachable\n}}'
    )
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu="x86-64-v4", features="+amx-tile,+amx-int8,+amx-bf16", jit=True
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def assembled(text: str) -> Callable[..., None]:
    """A function of six integers (rdi, rsi, rdx, rcx, r8, r9) whose body is `text`; $$ is a dollar sign."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(_engine(text).get_function_address("run"))


def run(text: str, *arguments: Array | int) -> None:
    """Calls `text` with addresses of arrays, and integers."""
    values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
    assembled(text)(*values, *[0] * (6 - len(values)))


def config(*shapes: tuple[int, int]) -> Array:
    """The 64 bytes that configure tiles of (rows, bytes per row)."""
    content = np.zeros(64, np.uint8)
    content[0] = 1
    for i, (rows, row_bytes) in enumerate(shapes):
        content[16 + 2 * i], content[48 + i] = row_bytes, rows
    return content
