"""From token pieces to the text a client may see: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamatrio.model.text_decoder import TextDecoder


class Shown(NamedTuple):
    """Text that is certain now, and the stop string that ended it, if one did."""

    text: str
    stopping_word: str | None = None


class TextAssembler:
    """Assembles one continuation. Text that could be the beginning of a stop string is held back until it is decided.

    Whatever the pieces, the joined text is that of the joined bytes, cut before the first stop string; of stop
    strings that begin at the same place the one listed first wins. Empty ones are ignored.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(filter(None, stop))
        self._decoder = TextDecoder()
        self._held = ""

    def feed(self, piece: bytes) -> Shown:
        """Adds a token's bytes."""
        text = self._held + self._decoder.feed(piece)
        if not self._stop:
            return Shown(text)
        found = [(at, order) for order, word in enumerate(self._stop) if (at := text.find(word)) >= 0]
        if found:
            at, order = min(found)
            self._held = ""
            return Shown(text[:at], self._stop[order])
        n_held = max(_overlap(text, word) for word in self._stop)
        self._held = text[len(text) - n_held :]
        return Shown(text[: len(text) - n_held])

    def flush(self) -> str:
        """Ends the text: what was held back, and one U+FFFD for a character that was cut off."""
        text, self._held = self._held + self._decoder.flush(), ""
        return text


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `word`."""
    for n in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:n]):
            return n
    return 0
