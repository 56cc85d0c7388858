"""What a rule works with: operands as C++ expressions, and lines of C++ as the result.

Rules (of the generated code):
 * a register is a local variable of the unsigned type of its width, `R_<name>`; floats live in it as bits;
 * `t` is the thread, `checked` whether accesses are checked, `P` the kernel's parameters;
 * a source line that a check may name is a *site*, a small integer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .parser import Function, Instruction, Memory, Module, Operand, Place, PtxError, Variable, Vector
from .types import BF16, F16, PRED, U32, U64, Type, find_type, type_of

_HEX_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})")
_HEX_DOUBLE = re.compile(r"0[dD]([0-9a-fA-F]{16})")
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?")

_SPECIAL_REGISTERS = {
    "%laneid": "t->lane",
    "%warpid": "(t->linear >> 5)",
    "%nwarpid": "((t->ntid.x * t->ntid.y * t->ntid.z + 31) >> 5)",
    "%lanemask_eq": "(1u << t->lane)",
    "%lanemask_lt": "((1u << t->lane) - 1)",
    "%lanemask_le": "((2u << t->lane) - 1)",
    "%lanemask_gt": "~((2u << t->lane) - 1)",
    "%lanemask_ge": "~((1u << t->lane) - 1)",
    "%dynamic_smem_size": "(t->shared_bytes - STATIC_SHARED)",
    "%total_smem_size": "t->shared_bytes",
    "%smid": "0",
    "%nsmid": "4",
    "%gridid": "1",
    "%clock": "0",
    "%clock64": "0",
    "%globaltimer": "0",
    "WARP_SZ": "32",
}
_DIMENSIONED = re.compile(r"%(tid|ntid|ctaid|nctaid)\.([xyz])")


class NoRule(PtxError):
    """An instruction, or a form of one, that the translator does not know."""


@dataclass(slots=True)
class Unit:
    """What one kernel object holds, gathered while its functions are translated."""

    module: Module
    sites: dict[str, int] = field(default_factory=dict)
    globals: list[Variable] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    """Names of device functions that are called, in order of discovery."""
    shared: dict[str, int] = field(default_factory=dict)
    """Offsets of statically sized shared variables."""
    shared_bytes: int = 0

    def site(self, place: Place) -> int:
        return self.sites.setdefault(str(place), len(self.sites))

    def global_index(self, variable: Variable) -> int:
        if variable not in self.globals:
            self.globals.append(variable)
        return self.globals.index(variable)

    def place_shared(self, variable: Variable) -> int:
        if variable.name not in self.shared:
            start = -(-self.shared_bytes // variable.align) * variable.align
            self.shared[variable.name] = start
            self.shared_bytes = start + variable.bytes
        return self.shared[variable.name]


def c_name(name: str) -> str:
    return "R_" + re.sub(r"\W", lambda m: f"_{ord(m[0]):x}_", name.lstrip("%"))


class Emitter:
    """Translates the body of one function."""

    def __init__(self, unit: Unit, function: Function) -> None:
        self.unit = unit
        self.function = function
        self.lines: list[str] = []
        self.widths: dict[str, Type] = {}
        self.locals: dict[str, str] = {}
        self.param_buffers: set[str] = set()
        self.branch_targets: dict[str, tuple[str, ...]] = {}
        self.instruction: Instruction | None = None

    # ---- output
    def emit(self, line: str) -> None:
        self.lines.append(line)

    def set(self, target: Operand, bits: str) -> None:
        """Assigns raw bits to a register; '_' takes and drops them."""
        if not isinstance(target, str):
            raise NoRule(f"cannot assign to {target}")
        if target == "_":
            self.emit(f"(void)({bits});")
        else:
            self.emit(f"{c_name(target)} = {bits};")

    def set_value(self, target: Operand, type_: Type, value: str) -> None:
        """Assigns a computed value: rounded to its float format, or cut to its width."""
        self.set(target, self.to_bits(type_, value))

    def to_bits(self, type_: Type, value: str) -> str:
        if type_ == F16:
            return f"f16_bits({value})"
        if type_ == BF16:
            return f"bf16_bits({value})"
        if type_.is_float:
            return f"bits_of(({type_.value})({value}))"
        return f"({type_.storage})({value})"

    @property
    def site(self) -> int:
        assert self.instruction
        return self.unit.site(self.instruction.place)

    # ---- input
    def bits(self, operand: Operand, type_: Type) -> str:
        """The raw bits of an operand, as an expression of the type's storage."""
        if not isinstance(operand, str):
            raise NoRule(f"operand {operand} where one value is expected")
        if operand.startswith("!"):
            return f"!{self.bits(operand[1:], PRED)}"
        literal = self._literal(operand, type_)
        if literal is not None:
            return literal
        address = self._address_of(operand)
        if address is not None:
            return f"({type_.storage})({address})"
        known = self.widths.get(operand)
        if known is None:
            raise NoRule(f"unknown operand {operand}")
        return c_name(operand) if known.storage == type_.storage else f"({type_.storage}){c_name(operand)}"

    def value(self, operand: Operand, type_: Type) -> str:
        """An operand as the C++ value that its type computes with."""
        bits = self.bits(operand, type_)
        if type_.is_float:
            return self.float_of(bits, type_)
        return f"({type_.value}){bits}" if type_.is_signed else bits

    @staticmethod
    def float_of(bits: str, type_: Type) -> str:
        name = {("f", 16): "f16", ("bf", 16): "bf16", ("f", 32): "f32", ("tf", 32): "f32", ("f", 64): "f64"}
        return f"{name[type_.kind, type_.bits]}({bits})"

    def _literal(self, text: str, type_: Type) -> str | None:
        if match := _HEX_FLOAT.fullmatch(text):
            return f"bits_of((double)f32(0x{match[1]}u))" if type_ == Type("f", 64) else f"0x{match[1]}u"
        if match := _HEX_DOUBLE.fullmatch(text):
            return f"0x{match[1]}ull"
        if _INTEGER.fullmatch(text):
            value = int(text.rstrip("U"), 8 if re.fullmatch(r"-?0[0-7]+U?", text) else 0)
            if type_.kind == "pred":
                return "true" if value else "false"
            return f"({type_.storage}){value & (1 << type_.bits) - 1}ull"
        if match := _DIMENSIONED.fullmatch(text):
            return f"({type_.storage})t->{match[1]}.{match[2]}"
        if text in _SPECIAL_REGISTERS:
            return f"({type_.storage}){_SPECIAL_REGISTERS[text]}"
        return None

    def _address_of(self, name: str) -> str | None:
        """Where a variable lies, in its own space; None when the name is no variable."""
        if name in self.locals:
            return f"(uintptr_t){self.locals[name]}"
        variable = self.unit.module.variables.get(name)
        if variable is None:
            return f"{self.unit.shared[name]}u + kSharedBase" if name in self.unit.shared else None
        if variable.space != "shared":
            return f"(uintptr_t)t->globals[{self.unit.global_index(variable)}]"
        if variable.count is None or variable.bytes == 0:
            return "STATIC_SHARED + kSharedBase"
        return f"{self.unit.place_shared(variable)}u + kSharedBase"

    def memory(self, operand: Operand, space: str) -> str:
        """The C++ address (char*) that a memory operand names."""
        if not isinstance(operand, Memory):
            raise NoRule(f"operand {operand} where an address is expected")
        base, offset = operand
        if space == "param":
            if base not in self.locals:
                return f"((char*){self.bits(base, U64)} + ({offset}))"
            return f"({self.locals[base]} + {offset})"
        if space == "shared":
            return f"shared_pointer(t, {self.bits(base, U32)} + ({offset}))"
        return f"((char*){self.bits(base, U64)} + ({offset}))"

    # ---- declarations
    def declare(self, type_name: str, names: tuple[str, ...]) -> None:
        type_ = type_of(type_name)
        for name in names:
            self.widths[name] = type_
        for i in range(0, len(names), 16):
            self.emit(f"{type_.storage} {', '.join(c_name(n) for n in names[i : i + 16])};")

    def declare_variable(self, variable: Variable) -> None:
        if variable.space == "shared":
            self.unit.place_shared(variable)
            return
        if variable.space == "param" and not variable.name:
            raise NoRule("a parameter without a name")
        name = c_name(variable.name)
        self.locals[variable.name] = name
        self.emit(f"alignas({max(variable.align, 16)}) char {name}[{max(variable.bytes, 1)}];")

    # ---- statements
    def translate(self, instruction: Instruction, rules: dict[str, Callable[[Emitter, Instruction], None]]) -> None:
        self.instruction = instruction
        start = len(self.lines)
        rule = rules.get(instruction.parts[0])
        try:
            if rule is None:
                raise NoRule("no rule for this opcode")
            rule(self, instruction)
        except (NoRule, KeyError, IndexError, ValueError, StopIteration) as error:
            reason = str(error) if isinstance(error, NoRule) else f"{type(error).__name__} {error}"
            raise NoRule(
                f"kernel {self.function.name}, {instruction.place}: cannot translate opcode "
                f"{instruction.opcode} {_show(instruction.operands)}: {reason}"
            ) from error
        if instruction.guard:
            condition = self.bits(instruction.guard, PRED)
            body = self.lines[start:]
            del self.lines[start:]
            self.emit(f"if ({condition}) {{ {' '.join(body)} }}")


def _show(operands: list[Operand]) -> str:
    return ", ".join("{" + ", ".join(o.items) + "}" if isinstance(o, Vector) else str(o) for o in operands)


def part_in(instruction: Instruction, names: tuple[str, ...] | dict[str, str]) -> str | None:
    """The first part of the opcode, after its name, that is one of `names`."""
    return next((p for p in instruction.parts[1:] if p in names), None)


def types_in(instruction: Instruction) -> list[Type]:
    """The types that the opcode names, in order."""
    return [found for part in instruction.parts[1:] if (found := find_type(part))]
