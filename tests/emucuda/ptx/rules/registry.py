"""The table of rules: opcode (its part before the first dot) to the function that translates it."""

from __future__ import annotations

from collections.abc import Callable

from ..emitter import Emitter
from ..parser import Instruction

Rule = Callable[[Emitter, Instruction], None]
RULES: dict[str, Rule] = {}


def rule(*opcodes: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        for opcode in opcodes:
            assert opcode not in RULES, opcode
            RULES[opcode] = function
        return function

    return add
