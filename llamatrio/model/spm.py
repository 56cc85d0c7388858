"""SentencePiece vocabularies as llama.cpp encodes them: merge the best-scored pair until none is left.

Theory of operation. A text starts as its characters, a space spelled U+2581. Of all neighbours whose joined text is
a token, those with the highest score are joined, the leftmost first; this repeats until no pair makes a token. A
character that is no token becomes its bytes. (SentencePiece itself finds the best-scored segmentation as a whole;
models that come as GGUF were served with the greedy rule, and the golden ids are the greedy rule's.)

The rule is expressed here in Python because equal scores, which the `tokenizers` library cannot express, are what
runs of spaces are made of. It stays fast by cutting the text first where no token can straddle: before a space that
follows a character after which no token has a space. The words found so repeat, and are remembered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from heapq import heapify, heappop, heappush

from llamatrio.errors import GGUFError
from llamatrio.model.bpe import SPACE
from llamatrio.model.vocabulary import TokenKind, Vocabulary

_MAX_REMEMBERED_LENGTH = 32
_N_REMEMBERED = 1 << 16


class ScoredMerges:
    """Encoder of a vocabulary with scores."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if vocabulary.scores is None:
            raise GGUFError("the file has no key 'tokenizer.ggml.scores'")
        scores = vocabulary.scores.tolist()
        # Ordinary text must not merge into a control or byte token, whatever its characters are.
        mergeable = [
            id
            for text, id in vocabulary.ids.items()
            if id not in vocabulary.control and vocabulary.kinds[id] != TokenKind.BYTE
        ]
        self._cost = {vocabulary.texts[id]: -scores[id] for id in mergeable}
        self._ids = {vocabulary.texts[id]: id for id in mergeable}
        self._byte_ids = _byte_ids(vocabulary)
        self._unknown = vocabulary.unknown_id or 0
        self._cuts = _cut_pattern(vocabulary.texts[id] for id in mergeable)
        self._remembered = lru_cache(_N_REMEMBERED)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text."""
        ids: list[int] = []
        for word in self._cuts.split(text.replace(" ", SPACE)):
            if len(word) <= _MAX_REMEMBERED_LENGTH:
                ids.extend(self._remembered(word))
            else:
                ids.extend(self._encode_word(word))
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in self._merge(word):
            if piece in self._ids:
                ids.append(self._ids[piece])
            else:
                ids.extend(self._byte_ids.get(byte, self._unknown) for byte in piece.encode())
        return tuple(ids)

    def _merge(self, word: str) -> list[str]:
        """Pieces after all merges. `ends[i]` is where the piece that starts at i ends, 0 once it was absorbed."""
        n = len(word)
        cost = self._cost
        ends = list(range(1, n + 1))
        starts = list(range(-1, n))  # starts[i]: where the piece before the one that starts at i starts
        queue = [(cost[word[i : i + 2]], i, i + 1, i + 2) for i in range(n - 1) if word[i : i + 2] in cost]
        heapify(queue)
        while queue:
            _, left, middle, end = heappop(queue)
            if ends[left] != middle or middle == n or ends[middle] != end:
                continue  # one of the two has been merged since
            ends[left], ends[middle] = end, 0
            if end < n:
                starts[end] = left
                if (joined := word[left : ends[end]]) in cost:
                    heappush(queue, (cost[joined], left, end, ends[end]))
            before = starts[left]
            if before >= 0 and (joined := word[before:end]) in cost:
                heappush(queue, (cost[joined], before, left, end))
        pieces, at = [], 0
        while at < n:
            pieces.append(word[at : ends[at]])
            at = ends[at]
        return pieces


def _byte_ids(vocabulary: Vocabulary) -> dict[int, int]:
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    return {byte: vocabulary.ids[name] for byte, name in names.items() if name in vocabulary.ids}


def _cut_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Where no token can straddle: before a space, unless some token has a space after the character there."""
    before_space = {SPACE}
    for token in tokens:
        at = token.find(SPACE, 1)
        while at > 0:
            before_space.add(token[at - 1])
            at = token.find(SPACE, at + 1)
    return re.compile(f"(?<=[^{re.escape(''.join(sorted(before_space)))}])(?={SPACE})")
