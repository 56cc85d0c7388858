"""Reads PTX text into functions, variables and statements.

Knows the grammar only as far as NVRTC uses it. Nothing here knows what an instruction does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .types import find_type

_TOKEN = re.compile(
    r'"[^"]*"'
    r"|0[fFdD][0-9a-fA-F]{8,16}(?![\w$])"  # floats as bits
    r"|[%$\w][\w$%]*(?:(?:\.|::)\w+)*"  # registers, numbers, opcodes with their parts
    r"|\.\w+(?:(?:\.|::)\w+)*"  # directives
    r"|[{}\[\],;:|@!+\-<>()=]"
)
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)[^\n]*$", re.M)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"[^\n]*$', re.M)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


class PtxError(Exception):
    """Text that is not understood."""


class Memory(NamedTuple):
    base: str
    offset: int


class Vector(NamedTuple):
    items: tuple[str, ...]


class Pair(NamedTuple):
    """d|p: a result and its predicate."""

    first: str
    second: str


Operand = str | Memory | Vector | Pair


class Place(NamedTuple):
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


@dataclass(slots=True)
class Instruction:
    opcode: str
    operands: list[Operand]
    guard: str
    """Predicate register with an optional leading '!', or '' for none."""
    place: Place
    parts: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = self.opcode.split(".")


class Label(NamedTuple):
    name: str


class BranchTargets(NamedTuple):
    name: str
    labels: tuple[str, ...]


class Brace(NamedTuple):
    """A scope opens ('{') or closes ('}')."""

    text: str


class Registers(NamedTuple):
    type: str
    names: tuple[str, ...]


@dataclass(slots=True)
class Variable:
    space: str
    name: str
    type: str
    count: int | None
    """Elements; None for an extern array of no stated size."""
    align: int
    initial: list[str] | None = None

    @property
    def bytes(self) -> int:
        found = find_type(self.type)
        assert found
        return found.bytes * (1 if self.count is None else self.count)


Statement = Instruction | Label | BranchTargets | Brace | Registers | Variable


@dataclass(slots=True)
class Function:
    name: str
    is_entry: bool
    returns: list[Variable]
    params: list[Variable]
    body: list[Statement]
    max_threads: int = 1024


@dataclass(slots=True)
class Module:
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)


def parse(text: str) -> Module:
    """Reads a PTX module. Raises PtxError."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        text = _COMMENT.sub("", text)
        self.files = {int(n): path for n, path in _FILE.findall(text)}
        text = _FILE.sub("", _LOC.sub(r".loc \1 \2 ;", text))
        self.tokens = _TOKEN.findall(text)
        self.at = 0
        self.place = Place("?", 0)

    # ---- tokens
    def peek(self, ahead: int = 0) -> str:
        i = self.at + ahead
        return self.tokens[i] if i < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if self.next() != token:
            context = " ".join(self.tokens[max(0, self.at - 8) : self.at + 4])
            raise PtxError(f"{self.place}: expected {token!r} near: {context}")

    def accept(self, token: str) -> bool:
        if self.peek() != token:
            return False
        self.at += 1
        return True

    def until(self, end: str) -> list[str]:
        """Tokens up to `end`, which is taken, too."""
        try:
            stop = self.tokens.index(end, self.at)
        except ValueError:
            raise PtxError(f"{self.place}: no {end!r} to the end of the text") from None
        found = self.tokens[self.at : stop]
        self.at = stop + 1
        return found

    # ---- module scope
    def module(self) -> Module:
        module = Module()
        linkage = (".visible", ".weak", ".extern", ".common")
        while self.peek():
            token = self.peek()
            if token in linkage:
                self.at += 1
            elif token in (".entry", ".func"):
                function = self.function()
                if function:
                    module.functions[function.name] = function
            elif token in (".const", ".global", ".shared"):
                variable = self.variable()
                module.variables[variable.name] = variable
            elif token.startswith(".section"):
                self.until("}")
            elif token.startswith((".version", ".target", ".address_size")):
                self.header_directive()
            else:
                self.at += 1
        return module

    def header_directive(self) -> None:
        """These end with their line, which is gone: skip to what can only start something else."""
        self.at += 1
        while self.peek() and not self.peek().startswith("."):
            self.at += 1

    def function(self) -> Function | None:
        """A function with its body; None for a mere declaration."""
        is_entry = self.next() == ".entry"
        returns = self.parameters() if self.peek() == "(" else []
        name = self.next()
        params = self.parameters() if self.peek() == "(" else []
        max_threads = 1024
        while self.peek() not in ("{", ";", ""):
            directive = self.next()
            if directive in (".maxntid", ".reqntid"):
                max_threads = self.product()
        if self.next() == ";":
            return None
        return Function(name, is_entry, returns, params, list(self.body()), max_threads)

    def product(self) -> int:
        total = int(self.next())
        while self.accept(","):
            total *= int(self.next())
        return total

    def parameters(self) -> list[Variable]:
        self.expect("(")
        found = []
        while not self.accept(")"):
            found.append(self.declaration("param", (",", ")")))
            self.accept(",")
        return found

    def declaration(self, space: str, ends: tuple[str, ...]) -> Variable:
        """`.align 4 .b8 name[16]` and the like, up to but without one of `ends` or an initializer."""
        align, type_, name, count = 0, "", "", 1
        sized: int | None = count
        while self.peek() not in (*ends, "=", ""):
            token = self.next()
            if token == ".align":
                align = int(self.next())
            elif token == "[":
                sized = None if self.peek() == "]" else (sized or 1) * int(self.next(), 0)
                self.expect("]")
            elif token.startswith("."):
                type_ = token[1:] if find_type(token[1:]) else type_
            else:
                name = token
        found = find_type(type_)
        if not name or not found:
            raise PtxError(f"{self.place}: a declaration without name or type")
        return Variable(space, name, type_, sized, align or found.bytes)

    def variable(self) -> Variable:
        space = self.next()[1:]
        variable = self.declaration(space, (";",))
        if self.accept("="):
            variable.initial = [token for token in self.until(";") if token not in "{},"]
        else:
            self.expect(";")
        return variable

    # ---- function scope
    def body(self) -> Iterator[Statement]:
        depth = 1
        while True:
            token = self.peek()
            if not token:
                raise PtxError("the text ends inside a function")
            if token in "{}":
                self.at += 1
                depth += 1 if token == "{" else -1
                if depth == 0:
                    return
                yield Brace(token)
            elif token == ";":
                self.at += 1
            elif token == ".loc":
                self.at += 1
                self.place = Place(self.files.get(int(self.next()), "?"), int(self.next()))
            elif token == ".reg":
                self.at += 1
                yield self.registers()
            elif token in (".shared", ".local", ".param"):
                yield self.variable()
            elif token.startswith("."):  # .pragma and the like
                self.until(";")
            elif self.peek(1) == ":":
                yield self.label()
            else:
                yield self.instruction()

    def label(self) -> Label | BranchTargets:
        name = self.next()
        self.expect(":")
        if self.peek() == ".branchtargets":
            self.at += 1
            return BranchTargets(name, tuple(t for t in self.until(";") if t != ","))
        if self.peek() == ".callprototype":
            self.until(";")
        return Label(name)

    def registers(self) -> Registers:
        type_ = self.next()[1:]
        names: list[str] = []
        while not self.accept(";"):
            name = self.next()
            if self.accept("<"):
                names += [f"{name}{i}" for i in range(int(self.next()))]
                self.expect(">")
            else:
                names.append(name)
            self.accept(",")
        return Registers(type_, tuple(names))

    def instruction(self) -> Instruction:
        guard = ""
        if self.accept("@"):
            guard = "!" if self.accept("!") else ""
            guard += self.next()
        opcode = self.next()
        operands: list[Operand] = []
        while not self.accept(";"):
            operand = self.operand()
            if self.accept("|"):
                second = self.operand()
                assert isinstance(operand, str)
                assert isinstance(second, str)
                operand = Pair(operand, second)
            operands.append(operand)
            if self.peek() not in (",", ";"):
                raise PtxError(f"{self.place}: cannot read the operands of {opcode} at {self.peek()!r}")
            self.accept(",")
        return Instruction(opcode, operands, guard, self.place)

    def operand(self) -> Operand:
        token = self.next()
        if token in ("{", "("):
            end = "}" if token == "{" else ")"
            return Vector(tuple(self.signed() for _ in iter(lambda: self.list_goes_on(end), False)))
        if token == "[":
            return self.memory()
        self.at -= 1
        return self.signed()

    def list_goes_on(self, end: str) -> bool:
        self.accept(",")
        return not self.accept(end)

    def signed(self) -> str:
        token = self.next()
        return token + self.next() if token in ("-", "!") else token

    def memory(self) -> Memory:
        base, offset = self.next(), 0
        if self.accept("+"):
            offset = int(self.signed(), 0)
        elif self.accept("-"):
            offset = -int(self.next(), 0)
        self.expect("]")
        return Memory(base, offset)
