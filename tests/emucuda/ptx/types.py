"""PTX's scalar types and their C++ counterparts. Registers hold raw bits: unsigned integers, bool for predicates."""

from __future__ import annotations

import re
from typing import NamedTuple

ROUNDINGS = {"rn": "kNearest", "rna": "kNearest", "rz": "kZero", "rm": "kDown", "rp": "kUp"}


class Type(NamedTuple):
    kind: str
    """pred, u, s, b (untyped bits), f or bf."""
    bits: int
    lanes: int = 1
    """2 for the packed pairs f16x2 and bf16x2."""

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        return self.kind in ("f", "bf", "tf")

    @property
    def is_half(self) -> bool:
        return self.is_float and self.bits // self.lanes == 16

    @property
    def is_signed(self) -> bool:
        return self.kind == "s"

    @property
    def storage(self) -> str:
        return "bool" if self.kind == "pred" else f"uint{self.bits}_t"

    @property
    def value(self) -> str:
        """The C++ type that computes with it."""
        if self.is_float:
            return "double" if self.bits == 64 else "float"
        return f"int{self.bits}_t" if self.is_signed else self.storage

    @property
    def lane(self) -> Type:
        return Type(self.kind, self.bits // self.lanes)


PRED = Type("pred", 8)
B16, B32, B64 = Type("b", 16), Type("b", 32), Type("b", 64)
U8, U16, U32, U64 = Type("u", 8), Type("u", 16), Type("u", 32), Type("u", 64)
F16, F32, F64, BF16 = Type("f", 16), Type("f", 32), Type("f", 64), Type("bf", 16)

_SPECIAL = {"pred": PRED, "f16x2": Type("f", 32, 2), "bf16x2": Type("bf", 32, 2), "tf32": Type("tf", 32)}
_SCALAR = re.compile(r"(u|s|b|f|bf)(8|16|32|64)")


def find_type(name: str) -> Type | None:
    """The type that a part of an opcode names, or None if it names something else."""
    if name in _SPECIAL:
        return _SPECIAL[name]
    match = _SCALAR.fullmatch(name)
    return Type(match[1], int(match[2])) if match else None


def type_of(name: str) -> Type:
    found = find_type(name)
    if found is None:
        raise ValueError(f"not a PTX type: {name}")
    return found
