"""Finding any of many strings in text that comes in pieces: an automaton of Aho and Corasick (1975).

A state stands for the longest end of the text so far that begins one of the strings. Each character takes one step
down the tree of their beginnings, after as many falls back as there were steps down before: the cost is that of the
text's length, whatever the number and length of the strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

MAX_STOP = 8192
"""Most characters that a request's stop strings have together: the automaton has as many states."""


class Found(NamedTuple):
    """A string that ends before `end` of the piece."""

    word: str
    end: int


class Automaton:
    """The strings as a tree of their beginnings. Immutable once made, so that requests share it."""

    def __init__(self, words: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        """state -> character -> state, along the tree only."""
        self.depth = [0]
        """Length of the beginning that a state stands for."""
        self._word = [""]
        """The longest string that ends in a state, if one does."""
        for word in words:
            self._add(word)
        self._fall_back = self._link()
        """The state of the longest proper end that begins a string as well."""

    def _add(self, word: str) -> None:
        state = 0
        for at, character in enumerate(word, start=1):
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(at)
                self._word.append("")
            state = following
        self._word[state] = word

    def _link(self) -> list[int]:
        """By increasing depth: where a state falls back to is less deep."""
        self._fall_back = [0] * len(self._next)
        level = list(self._next[0].values())
        while level:
            for state in level:
                back = self._fall_back[state]
                self._word[state] = self._word[state] or self._word[back]
                for character, following in self._next[state].items():
                    self._fall_back[following] = self._step(back, character)
            level = [following for state in level for following in self._next[state].values()]
        return self._fall_back

    def _step(self, state: int, character: str) -> int:
        while (following := self._next[state].get(character)) is None:
            if not state:
                return 0
            state = self._fall_back[state]
        return following

    def run(self, state: int, text: str) -> tuple[int, Found | None]:
        """The state after `text`, or after the first string in it that is complete, and that string.

        Of strings that end at the same place it is the longest.
        """
        for end, character in enumerate(text, start=1):
            state = self._step(state, character)
            if self._word[state]:
                return state, Found(self._word[state], end)
        return state, None


@lru_cache(maxsize=64)
def automaton(words: tuple[str, ...]) -> Automaton:
    """The strings' automaton; clients tend to send the same ones each time."""
    return Automaton(words)
