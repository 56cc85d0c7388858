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
        self._prefixes = {text[:n] for text in self._ids for n in range(1, len(text))}
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

    def places(self, text: str) -> list[int]:
        """Where a token begins, overlapping ones included, or where what is left of the text could begin one.

        White space at the end of the text does not count: a template may strip it.
        """
        if self._beginnings is None:
            return []
        end = len(text.rstrip())
        return [
            match.start()
            for match in self._beginnings.finditer(text)
            if self._longest_at(text, match.start())
            or self._could_begin(text[match.start() : end], text[match.start() :])
        ]

    def _could_begin(self, *rests: str) -> bool:
        return any(rest in self._prefixes for rest in rests)

    def _longest_at(self, text: str, at: int) -> str:
        for length in self._lengths[text[at]]:
            if (word := text[at : at + length]) in self._ids:
                return word
        return ""
