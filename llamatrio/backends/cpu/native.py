"""What compiled Python needs beyond Numba: memory by address, atomics, and a pause for spin loops.

Addresses are int64 everywhere, so that one compiled step takes tables of numbers and no types.
"""

# Numba derives types from these functions by calling them with its own objects, so they carry none.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, no-any-return, call-overload"

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_POINTER = ir.PointerType()
_I32, _I64 = ir.IntType(32), ir.IntType(64)

inner = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")
"""Compiles a function that only compiled functions call: without wrappers a third less is compiled.

Division by zero is undefined; nothing here divides by a number that can be 0.
"""


def _loader(numba_type, llvm_type):
    @intrinsic
    def load(typing_context, address, index):
        def codegen(context, builder, signature, args):
            place = builder.gep(builder.inttoptr(args[0], _POINTER), [args[1]], source_etype=llvm_type)
            return builder.load(place, typ=llvm_type)

        return numba_type(types.int64, types.int64), codegen

    return load


def _storer(numba_type, llvm_type):
    @intrinsic
    def store(typing_context, address, index, value):
        def codegen(context, builder, signature, args):
            place = builder.gep(builder.inttoptr(args[0], _POINTER), [args[1]], source_etype=llvm_type)
            builder.store(args[2], place)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), codegen

    return store


# load_*(address, index) is element `index` of the array at `address`; store_*(address, index, value) writes it.
# Numba's own array views do the same, but cost seconds of compilation.
load_f32, store_f32 = _loader(types.float32, ir.FloatType()), _storer(types.float32, ir.FloatType())
load_i32, store_i32 = _loader(types.int32, _I32), _storer(types.int32, _I32)
load_i64, store_i64 = _loader(types.int64, _I64), _storer(types.int64, _I64)


@intrinsic
def atomic_add(typing_context, address, value):
    """Adds to the int64 at `address`; returns what was there before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _POINTER), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_exchange(typing_context, address, value):
    """Replaces the int64 at `address`; returns what was there before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", builder.inttoptr(args[0], _POINTER), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typing_context, address):
    """The int64 at `address`, with everything written before it was stored."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], _POINTER), "acquire", 8, typ=_I64)

    return types.int64(types.int64), codegen


@intrinsic
def pause(typing_context):
    """Tells the core that this is a spin loop."""

    def codegen(context, builder, signature, args):
        triple = str(builder.module.triple)
        if triple.startswith(("x86_64", "i686")):
            builder.call(_declare(builder, "llvm.x86.sse2.pause", []), [])
        elif triple.startswith(("aarch64", "arm64")):
            builder.call(_declare(builder, "llvm.aarch64.hint", [_I32]), [ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(), codegen


def _declare(builder, name, args):
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(ir.VoidType(), args), name)
