"""From token pieces to the text a client may see: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamatrio.model.text_decoder import TextDecoder
from llamatrio.sched.stops import automaton


class Shown(NamedTuple):
    """Text that is certain now, and the stop string that ended it, if one did."""

    text: str
    stopping_word: str | None = None


class TextAssembler:
    """Assembles one continuation. Text that could be the beginning of a stop string is held back until it is decided.

    Whatever the pieces, the joined text is that of the joined bytes, cut before the stop string that is complete first;
    of those that are complete with the same character, before the longest. Empty ones are ignored.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        words = tuple(filter(None, stop))
        self._stops = automaton(words) if words else None
        self._state = 0
        self._decoder = TextDecoder()
        self._held = ""
        """The text that the state stands for."""

    def feed(self, piece: bytes) -> Shown:
        """Adds a token's bytes."""
        new = self._decoder.feed(piece)
        if self._stops is None:
            return Shown(new)
        self._state, found = self._stops.run(self._state, new)
        text = self._held + new
        if found is not None:
            at = len(self._held) + found.end - len(found.word)
            self._held, self._state = "", 0
            return Shown(text[:at], found.word)
        n_shown = len(text) - self._stops.depth[self._state]
        self._held = text[n_shown:]
        return Shown(text[:n_shown])

    def flush(self) -> str:
        """Ends the text: what was held back, and one U+FFFD for a character that was cut off."""
        text, self._held, self._state = self._held + self._decoder.flush(), "", 0
        return text
