"""Text to token ids and back, with the ids llama.cpp gives for the same file.

Encoding has two stages. First the text is cut at tokens that it spells out whole: user-defined tokens always,
control tokens only where the caller says so (`parse_special`). Then each ordinary part is encoded by the
vocabulary's own scheme: BPE or scored merges.

A vocabulary with `add_space_prefix` (Llama 2) puts a space before each ordinary part that opens the text or
follows a cut; `decode` takes it away again, so that decoding gives back what was encoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from llamatrio.errors import GGUFError, RequestError, UnsupportedModelError
from llamatrio.model.bpe import SPACE, ByteLevelBPE, CharacterBPE, byte_alphabet, read_merges
from llamatrio.model.metadata import Metadata
from llamatrio.model.pretokenizer import pre_tokenizer
from llamatrio.model.special_tokens import SpecialTokens
from llamatrio.model.spm import ScoredMerges
from llamatrio.model.vocabulary import TokenKind, Vocabulary, read_vocabulary

_SURROGATE = re.compile("[\ud800-\udfff]")
_WHITESPACE = " \t\n\v\f\r"
# Tokens after which Phi-3 keeps white space; after all its other special tokens it drops it.
_KEEPS_WHITESPACE = ("<unk>", "<s>", "<|endoftext|>")


class _Scheme(Protocol):
    """Encodes ordinary text: no token is spelled out in it."""

    def encode(self, text: str) -> list[int]: ...


class Tokenizer:
    """The tokenizer of one model. Made by `load_tokenizer`; may be used from several threads at once."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        scheme: _Scheme,
        pieces: list[bytes],
        *,
        add_bos: bool,
        add_eos: bool,
        add_space_prefix: bool = False,
        strips_after: frozenset[int] = frozenset(),
    ) -> None:
        self.add_bos = add_bos and vocabulary.bos_id is not None
        """Whether encoding with `add_special` begins with the BOS token; never where the file names none."""
        self.add_eos = add_eos and vocabulary.eos_id is not None
        self._vocabulary = vocabulary
        self._scheme = scheme
        self._pieces = pieces
        self._add_space_prefix = add_space_prefix
        self._strips_after = strips_after
        self._cut_ids = vocabulary.user_defined | vocabulary.control
        self._user_defined = _finder(vocabulary, vocabulary.user_defined)
        self._typed = _finder(vocabulary, vocabulary.user_defined - vocabulary.markup)
        self._markup = _finder(vocabulary, vocabulary.markup)
        self._all_special = _finder(vocabulary, self._cut_ids)

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return self._vocabulary.n_tokens

    @property
    def bos_id(self) -> int | None:
        """Beginning of text; None when the file names none."""
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """End of text; None when the file names none."""
        return self._vocabulary.eos_id

    @property
    def eot_id(self) -> int | None:
        """End of turn, by key or by name; None when there is none."""
        return self._vocabulary.eot_id

    @property
    def eog_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        return self._vocabulary.eog_ids

    @property
    def control_ids(self) -> frozenset[int]:
        """Tokens that ordinary text never turns into."""
        return self._vocabulary.control

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of `text`.

        With `add_special`, BOS comes first and EOS last where the model wants them, also when the text spells
        one out itself: the raw interface adds what the file says. With `parse_special`, control tokens that the
        text spells out become their ids; otherwise they are ordinary text.

        Raises:
            RequestError: the text holds a lone surrogate.
        """
        check_unicode(text)
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        ids += self.encode_parts((self._all_special if parse_special else self._user_defined).split(text))
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def split_special(self, text: str) -> Iterator[str | int]:
        """The text cut at every special token that it spells out: its ordinary parts and the ids between them."""
        return self._all_special.split(text)

    def split_typed(self, text: str) -> Iterator[str | int]:
        """As `split_special`, at those tokens only that everyone may write: user-defined and no markup."""
        return self._typed.split(text)

    def markup_places(self, text: str) -> list[int]:
        """Where `text` spells out a token of markup, or ends in what could be the beginning of one."""
        return self._markup.places(text)

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """Ids of ordinary parts and the special tokens between them, as `split_special` gives them."""
        ids: list[int] = []
        follows_cut, strips = True, False
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                follows_cut, strips = True, part in self._strips_after
                continue
            text = part.lstrip(_WHITESPACE) if strips else part
            if text:
                ids += self._scheme.encode(" " + text if follows_cut and self._add_space_prefix else text)
                follows_cut, strips = False, False
        return ids

    def piece(self, id: int, *, special: bool = False) -> bytes:
        """The bytes that token `id` stands for; a control token has none unless `special`.

        Raises:
            ValueError: no such id.
        """
        self._check_id(id)
        if id in self._vocabulary.control and not special:
            return b""
        return self._pieces[id]

    def token_text(self, id: int) -> str:
        """The token as the file spells it.

        Raises:
            ValueError: no such id.
        """
        self._check_id(id)
        return self._vocabulary.texts[id]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `ids`: the inverse of `encode`, except that bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: an id does not exist.
        """
        out: list[bytes] = []
        follows_cut = True
        for id in ids:
            piece = self.piece(id, special=special)
            if id in self._cut_ids:
                out.append(piece)
                follows_cut = True
            else:
                drop = follows_cut and self._add_space_prefix and piece.startswith(b" ")
                out.append(piece[1:] if drop else piece)
                follows_cut = False
        return b"".join(out).decode("utf-8", "replace")

    def _check_id(self, id: int) -> None:
        if type(id) is not int or not 0 <= id < len(self._pieces):
            raise ValueError(f"expected a token id from 0 to {self.n_vocab - 1}, not {id!r}")


def check_unicode(text: str) -> None:
    """Raises RequestError, naming the character, when `text` holds a lone surrogate: it has no UTF-8 form."""
    if (match := _SURROGATE.search(text)) is not None:
        raise RequestError(f"the text holds the lone surrogate U+{ord(match[0]):04X} at character {match.start()}")


def load_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer that a file's metadata describes.

    Raises:
        UnsupportedModelError: a kind of vocabulary or a pre-tokenizer we do not have, by name.
        GGUFError: a key is missing or contradicts the others.
    """
    model = metadata.string("tokenizer.ggml.model")
    if model not in _LOADERS:
        raise UnsupportedModelError(f"the tokenizer {model!r} (tokenizer.ggml.model) is not supported")
    return _LOADERS[model](metadata, read_vocabulary(metadata))


def _load_byte_level(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    if "tokenizer.ggml.pre" not in metadata:
        raise UnsupportedModelError("the file does not name its pre-tokenizer (it has no key 'tokenizer.ggml.pre')")
    rule = pre_tokenizer(metadata.string("tokenizer.ggml.pre"))
    alphabet = byte_alphabet()

    def spell(text: str) -> bytes:
        if all(character in alphabet for character in text):
            return bytes(alphabet[character] for character in text)
        return _raw(text)

    return Tokenizer(
        vocabulary,
        ByteLevelBPE(vocabulary, read_merges(metadata, vocabulary), rule),
        _pieces(vocabulary, spell),
        add_bos=metadata.boolean("tokenizer.ggml.add_bos_token", rule.adds_bos),
        add_eos=metadata.boolean("tokenizer.ggml.add_eos_token", False),
        add_space_prefix=metadata.boolean("tokenizer.ggml.add_space_prefix", False),
    )


def _load_character_bpe(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    # Files of Gemma 4 with add_bos_token false exist; they are wrong, and llama.cpp overrides them too.
    return Tokenizer(
        vocabulary,
        CharacterBPE(vocabulary, read_merges(metadata, vocabulary)),
        _pieces(vocabulary, _spell_spaces),
        add_bos=True,
        add_eos=metadata.boolean("tokenizer.ggml.add_eos_token", False),
    )


def _load_scored(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    return Tokenizer(
        vocabulary,
        ScoredMerges(vocabulary),
        _pieces(vocabulary, _spell_spaces),
        add_bos=metadata.boolean("tokenizer.ggml.add_bos_token", True),
        add_eos=metadata.boolean("tokenizer.ggml.add_eos_token", False),
        add_space_prefix=metadata.boolean("tokenizer.ggml.add_space_prefix", True),
        strips_after=_phi3_strips_after(metadata, vocabulary),
    )


_LOADERS = {"gpt2": _load_byte_level, "gemma4": _load_character_bpe, "llama": _load_scored}


def _phi3_strips_after(metadata: Metadata, vocabulary: Vocabulary) -> frozenset[int]:
    """Phi-3's special tokens take the white space after them; GGUF has no key for it, so the name has to tell."""
    name = metadata.string("general.name", "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    kept = {vocabulary.ids[text] for text in _KEEPS_WHITESPACE if text in vocabulary.ids}
    return (vocabulary.control | vocabulary.user_defined) - kept


def _finder(vocabulary: Vocabulary, ids: frozenset[int]) -> SpecialTokens:
    return SpecialTokens({vocabulary.texts[id]: id for id in ids if vocabulary.texts[id]})


def _pieces(vocabulary: Vocabulary, spell: Callable[[str], bytes]) -> list[bytes]:
    """The bytes of each token. Special tokens stand for their text as it is; unused ones for nothing."""
    as_is = vocabulary.control | vocabulary.user_defined
    pieces = []
    for id, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.kinds, strict=True)):
        if id in as_is:
            pieces.append(_raw(text))
        elif kind == TokenKind.BYTE:
            pieces.append(_byte(id, text))
        elif kind == TokenKind.NORMAL:
            pieces.append(spell(text))
        else:
            pieces.append(b"")
    return pieces


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _spell_spaces(text: str) -> bytes:
    return _raw(text.replace(SPACE, " "))


def _byte(id: int, text: str) -> bytes:
    if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
        raise GGUFError(f"token {id} is a byte token, but its text is {text!r}")
    return bytes([int(text[3:5], 16)])
