"""The Jinja environment of chat templates: what Hugging Face's offers, in a sandbox and within bounds.

A template comes with the model's file and its input with a request, so neither is trusted. The sandbox keeps the
template from Python's internals and from changing its arguments; the bounds below keep it from using up memory
and time: a limited output, a limited number of steps of `range` in one rendering, and no large widths, repetitions and
powers. They stop mistakes and simple traps; what a template does to strings beyond that costs the thread it runs in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS, do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT = 1 << 24
"""Characters."""
_MAX_RANGE_STEPS = 100_000
_MAX_NUMBER = 1_000_000
"""Largest argument of a string's method."""
_MAX_EXPONENT = 64

# Filters that make much of little, or have no use here.
_DROPPED_FILTERS = ("center", "format", "pprint", "random", "urlize", "wordwrap", "xmlattr")


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration is no ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and bounds chat templates."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        self.filters = {name: filter for name, filter in FILTERS.items() if name not in _DROPPED_FILTERS}
        self.filters |= {"tojson": _to_json, "indent": _indent}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: now().strftime(format),
        }

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses large widths and counts in methods of strings; the arguments of others are only values."""
        if isinstance(getattr(obj, "__self__", None), str):
            for value in (*args, *kwargs.values()):
                _check_number(value)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses powers and repetitions that would not fit the output."""
        if operator == "%" and isinstance(left, str):
            raise jinja2.TemplateRuntimeError("formatting with % is not available")
        if operator == "**" and (not _is_number(right) or abs(right) > _MAX_EXPONENT):
            raise jinja2.TemplateRuntimeError(f"the exponent {right!r} is too large")
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        return super().call_binop(context, operator, left, right)


def new_range() -> Callable[..., Iterator[int]]:
    """A `range` for one rendering: all its uses share one budget of steps."""
    n_left = _MAX_RANGE_STEPS

    def bounded_range(*args: int) -> range:
        nonlocal n_left
        steps = range(*args)
        n_left -= len(steps)
        if n_left < 0:
            raise jinja2.TemplateRuntimeError(f"the template loops more than {_MAX_RANGE_STEPS} times")
        return steps

    return bounded_range  # type: ignore[return-value]


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a model should not read.
    _check_number(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if isinstance(width, int) and width > 1000:
        raise jinja2.TemplateRuntimeError(f"the indentation {width} is too large")
    return do_indent(text, width, first, blank)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _check_number(value: Any) -> None:
    if _is_number(value) and abs(value) > _MAX_NUMBER:
        raise jinja2.TemplateRuntimeError(f"the number {value!r} is too large")


def _check_repetition(repeated: Any, times: Any) -> None:
    if isinstance(repeated, str | list | tuple) and isinstance(times, int) and len(repeated) * times > MAX_OUTPUT:
        raise jinja2.TemplateRuntimeError(f"the repetition by {times} is too long")
