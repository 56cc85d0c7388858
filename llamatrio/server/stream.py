"""Server-sent events, sans I/O: bytes of one chunk for each event.

The cost of a streamed token is spent here and below, so what does not change within a stream is encoded once:
a text chunk is a prefix, the text as JSON, and a suffix.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

_encode = msgspec.json.Encoder().encode
_MARK = "\x00text\x00"


def to_json(value: Any) -> bytes:
    """`value` as JSON in UTF-8; what UTF-8 cannot hold is escaped. Not-a-number and infinities become null."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def event(value: Any) -> bytes:
    """One event with `value` as its data."""
    return b"data: " + to_json(value) + b"\n\n"


class TextEvent:
    """An event whose one changing part is a string: the string `HOLE` in the value that it is made from."""

    __slots__ = ("_after", "_before")

    HOLE = _MARK

    def __init__(self, value: Any) -> None:
        self._before, self._after = event(value).split(_encode(_MARK))

    def fill(self, text: str) -> bytes:
        """The event with `text` in it."""
        return self._before + _encode(text) + self._after


class Head(NamedTuple):
    """What every chunk of an OpenAI answer repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A chunk, or a whole answer, with these choices."""
        return {**self._asdict(), "choices": choices, **more}
