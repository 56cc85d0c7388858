"""What compiled Python needs beyond Numba: memory by address, atomics, and a pause for spin loops.

Addresses are int64 everywhere, so that one compiled step takes tables of numbers and no types.
"""

# Numba derives types from these functions by calling them with its own objects, so they carry none.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, no-any-return"

from __future__ import annotations

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

_POINTER = ir.PointerType()
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _pointer_cast(numba_type):
    @intrinsic
    def cast(typing_context, address):
        pointer = types.CPointer(numba_type)

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(types.int64), codegen

    return cast


_f32_pointer = _pointer_cast(types.float32)
_i32_pointer = _pointer_cast(types.int32)
_i64_pointer = _pointer_cast(types.int64)
_u8_pointer = _pointer_cast(types.uint8)


@njit(inline="always")
def f32_at(address, n):
    """float32 [n] at `address`."""
    return carray(_f32_pointer(address), (n,))


@njit(inline="always")
def i32_at(address, n):
    """int32 [n] at `address`."""
    return carray(_i32_pointer(address), (n,))


@njit(inline="always")
def i64_at(address, n):
    """int64 [n] at `address`."""
    return carray(_i64_pointer(address), (n,))


@njit(inline="always")
def u8_at(address, n):
    """uint8 [n] at `address`."""
    return carray(_u8_pointer(address), (n,))


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
def atomic_store(typing_context, address, value):
    """Stores an int64 so that whoever loads it sees everything written before."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], _POINTER), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


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
