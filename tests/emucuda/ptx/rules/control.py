"""Branches, calls, and ways to end."""

from __future__ import annotations

from ..emitter import Emitter, NoRule, c_name
from ..parser import Instruction, Vector
from ..types import U32
from .registry import rule


@rule("bra")
def branch(e: Emitter, i: Instruction) -> None:
    e.emit(f"goto {c_name(str(i.operands[0]))};")


@rule("brx")
def indexed_branch(e: Emitter, i: Instruction) -> None:
    index, table = i.operands
    labels = e.branch_targets.get(str(table))
    if labels is None:
        raise NoRule("an unknown branch table")
    cases = " ".join(f"case {k}: goto {c_name(label)};" for k, label in enumerate(labels))
    e.emit(f"switch ({e.bits(index, U32)}) {{ {cases} }}")


@rule("ret")
def leave(e: Emitter, i: Instruction) -> None:
    e.emit("return false;")


@rule("exit")
def end_thread(e: Emitter, i: Instruction) -> None:
    e.emit("return true;")


@rule("trap", "brkpt")
def trap(e: Emitter, i: Instruction) -> None:
    e.emit(f't->rt->trap(t, "trap", {e.site});')


@rule("call")
def call(e: Emitter, i: Instruction) -> None:
    operands = list(i.operands)
    returns: tuple[str, ...] = ()
    if isinstance(operands[0], Vector):
        returns = operands.pop(0).items  # type: ignore[union-attr]
    name = str(operands[0])
    arguments = operands[1].items if len(operands) > 1 and isinstance(operands[1], Vector) else ()
    if name == "vprintf":
        text, values = (f"emu::load<uint64_t>({e.locals[a]})" for a in arguments)
        return e.emit(f"t->rt->print(t, (const char*){text}, (const char*){values});")
    if name == "__assertfail":
        return e.emit(f't->rt->trap(t, "assertion failed", {e.site});')
    function = e.unit.module.functions.get(name)
    if function is None or len(operands) > 2:
        raise NoRule("a call of something that is not defined in this module")
    if name not in e.unit.functions:
        e.unit.functions.append(name)
    passed = ", ".join(["t", *(e.locals[a] for a in (*returns, *arguments))])
    e.emit(f"if ({function_name(name)}({passed})) return true;")


def function_name(name: str) -> str:
    return "F" + c_name(name)
