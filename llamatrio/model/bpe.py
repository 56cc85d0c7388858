"""Byte-pair encoding by the `tokenizers` library, fed from a GGUF vocabulary.

Two kinds: byte-level (GPT-2's: each byte of a word is spelled as one printable character, so that any text can be
encoded), and Gemma 4's, which merges characters, spells a space as U+2581, and falls back to byte tokens.
"""

from __future__ import annotations

import re

from tokenizers import Regex
from tokenizers import Tokenizer as Machine
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from llamatrio.errors import GGUFError
from llamatrio.model.metadata import Metadata
from llamatrio.model.pretokenizer import PreTokenizer
from llamatrio.model.vocabulary import Vocabulary

SPACE = "\u2581"

_SURROGATE = re.compile("[\ud800-\udfff]")
_NEWLINE_RUNS = r"[^\n]+|\n+"


class ByteLevelBPE:
    """GPT-2's scheme, with the words that a pre-tokenizer cuts."""

    def __init__(self, vocabulary: Vocabulary, merges: list[tuple[str, str]], rule: PreTokenizer) -> None:
        texts = _encodable(vocabulary, merges)
        # A byte that the vocabulary lacks (Falcon: vertical tab) has no id, but what stands around it must not merge.
        # It gets an id past the last one here, which `encode` leaves out.
        lacking = [character for character in byte_alphabet() if character not in texts]
        self._n_tokens = vocabulary.n_tokens
        self._lacks_bytes = bool(lacking)
        texts |= {character: vocabulary.n_tokens + i for i, character in enumerate(lacking)}
        cuts = [Split(Regex(pattern), "isolated") for pattern in rule.patterns]
        self._machine = Machine(BPE(texts, merges, ignore_merges=rule.ignore_merges))
        self._machine.pre_tokenizer = Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text."""
        ids: list[int] = self._machine.encode(text, add_special_tokens=False).ids
        return [id for id in ids if id < self._n_tokens] if self._lacks_bytes else ids


class CharacterBPE:
    """Gemma 4's scheme: merges within a line, of characters; unknown characters become their bytes."""

    def __init__(self, vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> None:
        self._machine = Machine(BPE(_encodable(vocabulary, merges), merges, byte_fallback=True))
        self._machine.pre_tokenizer = Split(Regex(_NEWLINE_RUNS), "isolated")

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text."""
        return list(self._machine.encode(text.replace(" ", SPACE), add_special_tokens=False).ids)


def read_merges(metadata: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """`tokenizer.ggml.merges` as pairs, the first to be merged first.

    Raises:
        GGUFError: a merge is no pair of tokens that makes a token.
    """
    pairs: dict[tuple[str, str], None] = {}
    for merge in metadata.strings("tokenizer.ggml.merges"):
        # A token may itself begin with a space, so the space that divides is not the first character.
        middle = merge.find(" ", 1)
        left, right = merge[:middle], merge[middle + 1 :]
        if (
            middle < 0
            or left not in vocabulary.ids
            or right not in vocabulary.ids
            or left + right not in vocabulary.ids
        ):
            raise GGUFError(f"the merge {merge!r} in 'tokenizer.ggml.merges' is not of two tokens into a third")
        pairs[left, right] = None
    return list(pairs)


def _encodable(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> dict[str, int]:
    """What ordinary text may become: no control tokens, unless merges make them, and none that are not UTF-8."""
    control = {text for id in vocabulary.control if len(text := vocabulary.texts[id]) > 1}
    control.difference_update([left + right for left, right in merges])
    return {
        text: id for text, id in vocabulary.ids.items() if text not in control and (text.isascii() or _is_unicode(text))
    }


def _is_unicode(text: str) -> bool:
    return _SURROGATE.search(text) is None


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character of each byte: bytes that print stand for themselves, the others start at U+0100."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
