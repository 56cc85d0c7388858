"""Finding the tokens that a text spells out whole, before anything is merged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class SpecialTokens:
    """A set of tokens to find in text: of those that begin at one place the longest, from left to right.

    A vocabulary may have thousands (Gemma 3: 6,414), so a place is looked at only when its character begins a
    token, and then once for each length that tokens with that beginning have.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._beginnings = re.compile(f"[{re.escape(''.join(sorted(lengths)))}]") if lengths else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text's ordinary parts, none empty, and the ids between them."""
        done = at = 0
        while self._beginnings and (match := self._beginnings.search(text, at)):
            at = match.start()
            token = self._longest_at(text, at)
            if not token:
                at += 1
                continue
            if at > done:
                yield text[done:at]
            yield self._ids[token]
            done = at = at + len(token)
        if done < len(text):
            yield text[done:]

    def _longest_at(self, text: str, at: int) -> str:
        for length in self._lengths[text[at]]:
            if (word := text[at : at + length]) in self._ids:
                return word
        return ""
