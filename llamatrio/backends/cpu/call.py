"""Calling a compiled kernel from a Numba function."""

from __future__ import annotations

from typing import Any

import numba
import numba.core.cgutils
from llvmlite import ir
from numba.extending import intrinsic

_types: Any = numba.types  # Numba ships type hints for some of its names only
_cgutils: Any = numba.core.cgutils


@intrinsic
def call_kernel(typingctx: Any, address: Any, *args: Any) -> Any:
    """call_kernel(address, *integers): calls the kernel at `address`. Every argument is passed as an i64.

    Usable in a nogil function: it is a plain indirect call.
    """
    signature = _types.void(_types.int64, _types.BaseTuple.from_types(args))

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        target, packed = values
        arguments = [
            context.cast(builder, value, kind, _types.int64)
            for value, kind in zip(_cgutils.unpack_tuple(builder, packed), signature.args[1], strict=True)
        ]
        i64 = ir.IntType(64)
        function_type = ir.FunctionType(ir.VoidType(), [i64] * len(arguments))
        builder.call(builder.inttoptr(target, function_type.as_pointer()), arguments)
        return context.get_dummy_value()

    return signature, codegen
