"""One kernel of a PTX module as a C++ file that exports `emu_kernel` (see kernel/kernel_abi.h).

Device functions that are not inlined become C++ functions. They return whether the thread has exited.
"""

from __future__ import annotations

from .emitter import Emitter, NoRule, Unit, c_name
from .parser import Brace, BranchTargets, Function, Instruction, Label, Module, PtxError, Registers, Variable
from .rules import RULES
from .rules.control import function_name
from .types import type_of


def translate(module: Module, entry: str) -> str:
    """C++ text for one .entry. Raises PtxError when it is not there, NoRule where an instruction has no rule."""
    kernel = module.functions.get(entry)
    if kernel is None or not kernel.is_entry:
        known = ", ".join(sorted(f.name for f in module.functions.values() if f.is_entry))
        raise PtxError(f"no entry {entry} in this module; it has {known}")
    unit = Unit(module)
    bodies = [_entry(unit, kernel)]
    done = 0
    while done < len(unit.functions):  # a function may call more of them
        bodies.append(_device_function(unit, module.functions[unit.functions[done]]))
        done += 1
    declarations = [_signature(module.functions[name]) + ";" for name in unit.functions]
    static_shared = -(-unit.shared_bytes // 16) * 16
    return "\n".join(
        [
            '#include "kernel_rt.h"',
            "using namespace emu;",
            f"constexpr uint32_t STATIC_SHARED = {static_shared};",
            *declarations,
            *bodies,
            _description(unit, kernel, static_shared),
            "",
        ]
    )


def _body(emitter: Emitter, function: Function) -> None:
    for statement in function.body:
        if isinstance(statement, BranchTargets):
            emitter.branch_targets[statement.name] = statement.labels
    for statement in function.body:
        match statement:
            case Instruction():
                emitter.translate(statement, RULES)
            case Label(name):
                emitter.emit(f"{c_name(name)}: ;")
            case Brace(text):
                emitter.emit(text)
            case Registers(type_, names):
                emitter.declare(type_, names)
            case Variable():
                emitter.declare_variable(statement)


_PROLOGUE = "const bool checked = t->checked; (void)checked; uint32_t carry = 0; (void)carry;"


def _entry(unit: Unit, kernel: Function) -> str:
    emitter = Emitter(unit, kernel)
    for variable, offset in zip(kernel.params, _offsets(kernel), strict=True):
        emitter.locals[variable.name] = f"(P + {offset})"
    _body(emitter, kernel)
    return "\n".join(["static bool kernel_body(Thread* t, char* P) {", _PROLOGUE, *emitter.lines, "return false; }"])


def _device_function(unit: Unit, function: Function) -> str:
    emitter = Emitter(unit, function)
    for variable in (*function.returns, *function.params):
        emitter.locals[variable.name] = c_name(variable.name)
    _body(emitter, function)
    return "\n".join([_signature(function) + " {", _PROLOGUE, *emitter.lines, "return false; }"])


def _signature(function: Function) -> str:
    names = ["Thread* t", *(f"char* {c_name(v.name)}" for v in (*function.returns, *function.params))]
    return f"static bool {function_name(function.name)}({', '.join(names)})"


def _offsets(kernel: Function) -> list[int]:
    offsets, end = [], 0
    for variable in kernel.params:
        start = -(-end // variable.align) * variable.align
        offsets.append(start)
        end = start + variable.bytes
    return offsets


def _initial_bytes(variable: Variable) -> bytes:
    type_ = type_of(variable.type)
    data = bytearray()
    for token in variable.initial or ():
        if token[:2].lower() in ("0f", "0d"):
            data += int(token[2:], 16).to_bytes(type_.bytes, "little")
        else:
            try:
                value = int(token.rstrip("U"), 0)
            except ValueError:
                raise NoRule(f"variable {variable.name}: initializer {token} is not a number") from None
            data += (value & (1 << type_.bits) - 1).to_bytes(type_.bytes, "little")
    return bytes(data.ljust(variable.bytes, b"\0"))


def _array(ctype: str, name: str, items: list[str]) -> str:
    return f"static const {ctype} {name}[] = {{ {', '.join(items or ['0'])} }};"


def _description(unit: Unit, kernel: Function, static_shared: int) -> str:
    lines, rows = [], []
    for n, variable in enumerate(unit.globals):
        initial = "nullptr"
        if variable.initial:
            initial = f"initial_{n}"
            lines.append(_array("unsigned char", initial, [str(b) for b in _initial_bytes(variable)]))
        rows.append(f'{{"{variable.name}", {variable.bytes}, {variable.align}, {initial}}}')
    sizes = [str(v.bytes) for v in kernel.params]
    sites = [f'"{place}"' for place in unit.sites]
    return "\n".join(
        [
            *lines,
            _array("GlobalVariable", "variables", rows or ['{"", 0, 0, nullptr}']),
            _array("int", "sizes", sizes),
            _array("int", "offsets", [str(o) for o in _offsets(kernel)]),
            _array("char* const", "sites", sites or ['""']),
            "static void enter(Thread* t, char* P) { kernel_body(t, P); }",
            'extern "C" __attribute__((visibility("default"))) const Kernel emu_kernel = {',
            f'"{kernel.name}", enter, {len(sizes)}, sizes, offsets, {static_shared}, {kernel.max_threads}, sites,',
            f"{len(unit.globals)}, variables }};",
        ]
    )
