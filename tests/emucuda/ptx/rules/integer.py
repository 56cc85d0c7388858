"""Integer arithmetic, logic, shifts, bit fields; the entries that floats share lead to `floating`."""

from __future__ import annotations

from ..emitter import Emitter, NoRule, part_in, types_in
from ..parser import Instruction
from ..types import B32, PRED, U32, Type
from . import floating
from .registry import rule

_DOUBLED = {
    ("s", 16): "int32_t", ("s", 32): "int64_t", ("s", 64): "__int128",
    ("u", 16): "uint32_t", ("u", 32): "uint64_t", ("u", 64): "unsigned __int128",
}  # fmt: skip


@rule("add", "sub")
def add(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    if ty.is_float:
        return floating.arithmetic(e, i, ty)
    sign = "+" if i.parts[0] == "add" else "-"
    d, a, b = i.operands
    if "sat" in i.parts:
        return e.set(d, f"add_sat({e.value(a, ty)}, {e.value(b, ty)}, {sign}1)")
    if "cc" in i.parts:
        wide = _DOUBLED["u", ty.bits]
        e.emit(f"{{ {wide} w_ = ({wide}){e.bits(a, ty)} {sign} ({wide}){e.bits(b, ty)}; carry = w_ >> {ty.bits} & 1;")
        e.set(d, f"({ty.storage})w_")
        return e.emit("}")
    e.set(d, f"({ty.storage})({e.bits(a, ty)} {sign} {e.bits(b, ty)})")


@rule("addc", "subc")
def add_with_carry(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    sign = "+" if i.parts[0] == "addc" else "-"
    wide = _DOUBLED["u", ty.bits]
    d, a, b = i.operands
    e.emit(f"{{ {wide} w_ = ({wide}){e.bits(a, ty)} {sign} ({wide}){e.bits(b, ty)} {sign} carry;")
    if "cc" in i.parts:
        e.emit(f"carry = w_ >> {ty.bits} & 1;")
    e.set(d, f"({ty.storage})w_")
    e.emit("}")


@rule("mul", "mad")
def multiply(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    if ty.is_float:
        return floating.arithmetic(e, i, ty)
    if "cc" in i.parts or "sat" in i.parts:
        raise NoRule("multiply with carry or saturation")
    d, a, b, *c = i.operands
    wide = _DOUBLED["s" if ty.is_signed else "u", ty.bits]
    product = f"(({wide}){e.value(a, ty)} * ({wide}){e.value(b, ty)})"
    result = ty
    if "wide" in i.parts:
        result = Type("u", ty.bits * 2)
        product = f"({result.storage}){product}"
    elif "hi" in i.parts:
        product = f"({ty.storage})({product} >> {ty.bits})"
    else:
        product = f"({ty.storage})({e.bits(a, ty)} * (uint64_t){e.bits(b, ty)})"
    e.set(d, f"({result.storage})({product} + {e.bits(c[0], result)})" if c else product)


@rule("madc")
def multiply_with_carry(e: Emitter, i: Instruction) -> None:
    raise NoRule("multiply with carry")


@rule("mul24", "mad24")
def multiply_24(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a, b, *c = i.operands

    def cut(operand: object) -> str:
        bits = f"({e.bits(operand, ty)} << 8)"  # type: ignore[arg-type]
        return f"(int64_t)((int32_t){bits} >> 8)" if ty.is_signed else f"(uint64_t)({bits} >> 8)"

    shift = 16 if "hi" in i.parts else 0
    product = f"(uint32_t)(({cut(a)} * {cut(b)}) >> {shift})"
    e.set(d, f"{product} + {e.bits(c[0], ty)}" if c else product)


@rule("sad")
def sum_of_difference(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a, b, c = i.operands
    x, y = e.value(a, ty), e.value(b, ty)
    e.set(d, f"({ty.storage})({e.bits(c, ty)} + ({x} < {y} ? {y} - {x} : {x} - {y}))")


@rule("div")
def divide(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    if ty.is_float:
        return floating.arithmetic(e, i, ty)
    d, a, b = i.operands
    e.set(d, f"({ty.storage})div_int<{ty.value}>({e.value(a, ty)}, {e.value(b, ty)})")


@rule("rem")
def remainder(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a, b = i.operands
    e.set(d, f"({ty.storage})rem_int<{ty.value}>({e.value(a, ty)}, {e.value(b, ty)})")


@rule("min", "max")
def extreme(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    if ty.is_float:
        return floating.arithmetic(e, i, ty)
    name = "lesser" if i.parts[0] == "min" else "greater"
    d, a, b = i.operands
    result = f"{name}<{ty.value}>({e.value(a, ty)}, {e.value(b, ty)})"
    e.set(d, f"({ty.storage})" + (f"greater<{ty.value}>({result}, 0)" if "relu" in i.parts else result))


@rule("neg")
def negate(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a = i.operands
    if ty.is_float:
        return floating.change_sign(e, d, a, ty, "^", "sign")
    e.set(d, f"({ty.storage})(0 - (uint64_t){e.bits(a, ty)})")


@rule("abs")
def absolute(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a = i.operands
    if ty.is_float:
        return floating.change_sign(e, d, a, ty, "&", "rest")
    e.set(d, f"({ty.storage})({e.value(a, ty)} < 0 ? 0 - (uint64_t){e.bits(a, ty)} : {e.bits(a, ty)})")


@rule("and", "or", "xor")
def logic(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    sign = {"and": "&", "or": "|", "xor": "^"}[i.parts[0]]
    d, a, b = i.operands
    e.set(d, f"({ty.storage})({e.bits(a, ty)} {sign} {e.bits(b, ty)})")


@rule("not")
def invert(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a = i.operands
    e.set(d, f"!{e.bits(a, ty)}" if ty == PRED else f"({ty.storage})~{e.bits(a, ty)}")


@rule("cnot")
def logical_not(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    e.set(i.operands[0], f"{e.bits(i.operands[1], ty)} == 0 ? 1 : 0")


@rule("shl", "shr")
def shift(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a, n = i.operands
    e.set(d, f"({ty.storage}){i.parts[0]}<{ty.value}>({e.value(a, ty)}, {e.bits(n, U32)})")


@rule("shf")
def funnel_shift(e: Emitter, i: Instruction) -> None:
    d, low, high, n = i.operands
    count = f"({e.bits(n, U32)} & 31)" if "wrap" in i.parts else f"lesser({e.bits(n, U32)}, 32u)"
    e.set(d, f"shf_{i.parts[1]}({e.bits(low, B32)}, {e.bits(high, B32)}, {count})")


@rule("lop3")
def logic_of_three(e: Emitter, i: Instruction) -> None:
    d, a, b, c, table = i.operands[:5]
    if len(i.operands) != 5:
        raise NoRule("lop3 with a predicate")
    e.set(d, f"lop3({e.bits(a, B32)}, {e.bits(b, B32)}, {e.bits(c, B32)}, {e.bits(table, U32)})")


@rule("prmt")
def permute(e: Emitter, i: Instruction) -> None:
    d, a, b, c = i.operands
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = part_in(i, modes)
    selector = e.bits(c, B32)
    if mode:
        selector = f"prmt_selector({modes.index(mode)}, {selector})"
    e.set(d, f"prmt({e.bits(a, B32)}, {e.bits(b, B32)}, {selector})")


@rule("bfe")
def extract_field(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a, position, length = i.operands
    e.set(d, f"({ty.storage})bfe<{ty.value}>({e.value(a, ty)}, {e.bits(position, U32)}, {e.bits(length, U32)})")


@rule("bfi")
def insert_field(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a, b, position, length = i.operands
    fields = f"{e.bits(a, ty)}, {e.bits(b, ty)}, {e.bits(position, U32)}, {e.bits(length, U32)}"
    e.set(d, f"bfi<{ty.storage}>({fields})")


@rule("bfind")
def find_highest(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    shift_amount = "true" if "shiftamt" in i.parts else "false"
    e.set(i.operands[0], f"bfind<{ty.value}>({e.value(i.operands[1], ty)}, {shift_amount})")


@rule("brev", "clz")
def whole_register(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    e.set(i.operands[0], f"{i.parts[0]}<{ty.storage}>({e.bits(i.operands[1], ty)})")


@rule("popc")
def count_bits(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    e.set(i.operands[0], f"(uint32_t)__builtin_popcountll({e.bits(i.operands[1], ty)})")


@rule("fns")
def find_nth(e: Emitter, i: Instruction) -> None:
    d, mask, base, offset = i.operands
    e.set(d, f"fns({e.bits(mask, B32)}, {e.bits(base, U32)}, (int32_t){e.bits(offset, U32)})")


@rule("bmsk")
def make_mask(e: Emitter, i: Instruction) -> None:
    d, position, length = i.operands
    low = "& 31" if "wrap" in i.parts else ""
    n, p = f"({e.bits(length, U32)} {low})", f"({e.bits(position, U32)} {low})"
    e.set(d, f"shl<uint32_t>((uint32_t)((1ull << lesser({n}, 32u)) - 1), {p})")


@rule("szext")
def extend_at_bit(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a, n = i.operands
    width = f"({e.bits(n, U32)} & 31)" if "wrap" in i.parts else f"lesser({e.bits(n, U32)}, 32u)"
    e.set(d, f"({ty.storage})bfe<{ty.value}>({e.value(a, ty)}, 0, {width})")


@rule("dp4a", "dp2a")
def dot_product(e: Emitter, i: Instruction) -> None:
    a_type, b_type = (ty.is_signed for ty in types_in(i))
    d, a, b, c = i.operands
    operands = f"{e.bits(a, B32)}, {e.bits(b, B32)}, {e.bits(c, B32)}"
    a_bits = 8 if i.parts[0] == "dp4a" else 16
    a_name, b_name = ("int" if s else "uint" for s in (a_type, b_type))
    half = "" if i.parts[0] == "dp4a" else (", true" if "hi" in i.parts else ", false")
    e.set(d, f"{i.parts[0]}<{a_name}{a_bits}_t, {b_name}8_t>({operands}{half})")


@rule("selp")
def select(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a, b, p = i.operands
    e.set(d, f"{e.bits(p, PRED)} ? {e.bits(a, ty)} : {e.bits(b, ty)}")


@rule("slct")
def select_by_sign(e: Emitter, i: Instruction) -> None:
    ty, test = types_in(i)
    d, a, b, c = i.operands
    e.set(d, f"{e.value(c, test)} >= 0 ? {e.bits(a, ty)} : {e.bits(b, ty)}")
