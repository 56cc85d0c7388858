"""Keeping what a user typed from becoming a control token, or another that is markup.

A template mixes its own markup with text from the request, and the result is one string. Theory of operation:

1. Before rendering, the first character of every such token that the request's text spells out is replaced by a
   stand-in: a noncharacter (U+FDD0 to U+FDEF) that neither the request nor the template uses. So is the first
   character of what could be the beginning of one at a string's end, which the next string might complete.
2. The rendered text is cut at the special tokens it spells out. Those are the template's.
3. In the parts between, each stand-in becomes its character again, before they are encoded. Text that was guarded
   is thus encoded as ordinary text together with its neighbours.

A template that itself completes a user's text to a token (`<|` + role + `|>`) means to, so that is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llamatrio.errors import RequestError
from llamatrio.model.tokenizer import Tokenizer, check_unicode

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class StandIns:
    """Guards one request's text: `put` before rendering, `split` after."""

    def __init__(self, tokenizer: Tokenizer, template_source: str) -> None:
        self._tokenizer = tokenizer
        self._used = set(template_source)
        self._of: dict[str, str] = {}

    def put(self, value: Any) -> Any:
        """A copy of `value` (nested lists and mappings) in which no string spells out a token of markup.

        Raises:
            RequestError: a lone surrogate, nesting too deep, or all noncharacters in use.
        """
        try:
            for text in _strings(value):
                check_unicode(text)
                self._used.update(text)
            return self._guard(value)
        except RecursionError:
            raise RequestError("the messages are nested too deeply", field="messages") from None

    def split(self, prompt: str) -> Iterator[str | int]:
        """The rendered prompt's ordinary parts, as the user wrote them, and the template's tokens between them."""
        characters = {ord(stand_in): character for character, stand_in in self._of.items()}
        for part in self._tokenizer.split_special(prompt):
            if isinstance(part, str) and characters:
                # What was guarded may belong to a longer token that everyone may write.
                yield from self._tokenizer.split_typed(part.translate(characters))
            else:
                yield part

    def _guard(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._guard_text(value)
        if isinstance(value, Mapping):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item) for item in value]
        return value

    def _guard_text(self, text: str) -> str:
        places = self._tokenizer.markup_places(text)
        if not places:
            return text
        characters = list(text)
        for place in places:
            characters[place] = self._stand_in(characters[place])
        return "".join(characters)

    def _stand_in(self, character: str) -> str:
        if character not in self._of:
            free = next((one for one in _NONCHARACTERS if one not in self._used), None)
            if free is None:
                raise RequestError("the messages use every noncharacter of Unicode", field="messages")
            self._used.add(free)
            self._of[character] = free
        return self._of[character]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
