"""What each PTX instruction becomes in C++, one module per opcode family."""

from . import control, convert, floating, integer, memory, tensor, warp
from .registry import RULES

__all__ = ["RULES", "control", "convert", "floating", "integer", "memory", "tensor", "warp"]
