"""The tokens of a model: their texts, their kinds, and which of them mean something to the server.

llama.cpp recognises some tokens by their text, because files often carry no key or a wrong kind for them; the
names below are its list (src/llama-vocab.cpp).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamatrio.errors import GGUFError
from llamatrio.model.metadata import Metadata


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# The first of each that the vocabulary has.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
_END_OF_MESSAGE = ("<|eom_id|>",)

# Tokens after which there is nothing more to say, wherever they appear.
_END_OF_GENERATION = (
    *_END_OF_TURN,
    *_END_OF_MESSAGE,
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
)

# Fill-in-the-middle markers: control tokens, and those of padding, repository and file also end a generation.
_FILL_IN = (
    ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
    ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
    ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
)
_FILL_IN_ENDS = (
    ("tokenizer.ggml.fim_pad_token_id", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    (
        "tokenizer.ggml.fim_rep_token_id",
        ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ),
    ("tokenizer.ggml.fim_sep_token_id", ("<|file_sep|>",)),
)


# Command R's roles and Gemma 4's tool calls are user-defined tokens, but no less markup than control tokens.
_MARKUP = re.compile(r"<\|.*>|<.*\|>", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Texts and kinds by id, and the ids that have a meaning. None: the file has no such token."""

    texts: list[str]
    """As the file has them; bytes that are not UTF-8 are surrogate escapes."""
    ids: dict[str, int]
    kinds: list[int]
    scores: NDArray[np.float32] | None
    control: frozenset[int]
    """Tokens that no ordinary text may turn into: control tokens and the unknown token."""
    user_defined: frozenset[int]
    """Tokens whose text always turns into them."""
    markup: frozenset[int]
    """Tokens that only a chat template may write: control tokens, and user-defined ones spelled as markup."""
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    """End of turn."""
    unknown_id: int | None
    eog_ids: frozenset[int]
    """Tokens that end a generation: eos, eot and their kin."""

    @property
    def n_tokens(self) -> int:
        """Number of ids."""
        return len(self.texts)


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """The vocabulary in a file's metadata.

    Raises:
        GGUFError: a key is missing, of another length than the tokens, or names an id that does not exist.
    """
    texts = metadata.strings("tokenizer.ggml.tokens")
    ids = {text: id for id, text in enumerate(texts) if text}
    if len(ids) < len(texts) - texts.count(""):
        raise GGUFError("key 'tokenizer.ggml.tokens' has the same token twice")
    kinds = _read_kinds(metadata, len(texts))
    meaning = _read_meanings(metadata, ids, len(texts))
    of_kind = {kind: {id for id, found in enumerate(kinds) if found == kind} for kind in TokenKind}
    control = of_kind[TokenKind.CONTROL] | of_kind[TokenKind.UNKNOWN] | meaning.markers
    control -= meaning.look_alikes
    user_defined = of_kind[TokenKind.USER_DEFINED] - control
    return Vocabulary(
        texts=texts,
        ids=ids,
        kinds=kinds,
        scores=_read_scores(metadata, len(texts)),
        control=frozenset(control),
        user_defined=frozenset(user_defined),
        markup=frozenset(control | {id for id in user_defined if _MARKUP.fullmatch(texts[id])}),
        bos_id=_special_id(metadata, "tokenizer.ggml.bos_token_id", len(texts)),
        eos_id=meaning.eos_id,
        eot_id=meaning.eot_id,
        unknown_id=_special_id(metadata, "tokenizer.ggml.unknown_token_id", len(texts)),
        eog_ids=meaning.ends,
    )


class _Meanings(NamedTuple):
    eos_id: int | None
    eot_id: int | None
    ends: frozenset[int]
    markers: frozenset[int]
    """Control tokens by their names, whatever kind the file gives them."""
    look_alikes: frozenset[int]


def _read_meanings(metadata: Metadata, ids: dict[str, int], n_tokens: int) -> _Meanings:
    def keyed_or_named(key: str, names: tuple[str, ...]) -> int | None:
        keyed = _special_id(metadata, key, n_tokens)
        return _first(ids, names) if keyed is None else keyed

    eos_id = _special_id(metadata, "tokenizer.ggml.eos_token_id", n_tokens)
    eot_id = keyed_or_named("tokenizer.ggml.eot_token_id", _END_OF_TURN)
    eom_id = keyed_or_named("tokenizer.ggml.eom_token_id", _END_OF_MESSAGE)
    fill_in_ends = [keyed_or_named(key, names) for key, names in _FILL_IN_ENDS]
    named = [ids[name] for name in _END_OF_GENERATION if name in ids]
    fill_in = [_first(ids, names) for names in _FILL_IN]
    look_alikes = _look_alikes(ids)
    return _Meanings(
        eos_id,
        eot_id,
        ends=_present(eos_id, eot_id, eom_id, *named, *fill_in_ends) - look_alikes,
        markers=_present(eot_id, eom_id, *named, *fill_in_ends, *fill_in),
        look_alikes=look_alikes,
    )


def _present(*ids: int | None) -> frozenset[int]:
    return frozenset(id for id in ids if id is not None)


def _read_kinds(metadata: Metadata, n_tokens: int) -> list[int]:
    if "tokenizer.ggml.token_type" not in metadata:
        return [TokenKind.NORMAL] * n_tokens
    kinds = metadata.numbers("tokenizer.ggml.token_type")
    _check_length("tokenizer.ggml.token_type", len(kinds), n_tokens)
    return [int(kind) for kind in kinds.tolist()]


def _read_scores(metadata: Metadata, n_tokens: int) -> NDArray[np.float32] | None:
    if "tokenizer.ggml.scores" not in metadata:
        return None
    scores = metadata.numbers("tokenizer.ggml.scores")
    _check_length("tokenizer.ggml.scores", len(scores), n_tokens)
    return scores.astype(np.float32)


def _check_length(key: str, length: int, n_tokens: int) -> None:
    if length != n_tokens:
        raise GGUFError(f"key {key!r} has {length} entries for {n_tokens} tokens")


def _special_id(metadata: Metadata, key: str, n_tokens: int) -> int | None:
    """The id under `key`, or None: an id is never invented, so a file that names no BOS has none."""
    if key not in metadata:
        return None
    id = metadata.integer(key)
    if not 0 <= id < n_tokens:
        raise GGUFError(f"key {key!r} is {id}, but the vocabulary has {n_tokens} tokens")
    return id


def _first(ids: dict[str, int], names: tuple[str, ...]) -> int | None:
    return next((ids[name] for name in names if name in ids), None)


def _look_alikes(ids: dict[str, int]) -> frozenset[int]:
    """Tokens that look like an end but are not one in this vocabulary.

    Where `<|return|>` and `<|call|>` end a message (harmony), `<|end|>` only ends a part of it; where
    `<|tool_response>` is a token (Gemma 4), `</s>` is an HTML tag.
    """
    found = set()
    if ("<|return|>" in ids and "<|call|>" in ids) or ("<|calls|>" in ids and "<|flush|>" in ids):
        found.add("<|end|>")
    if "<|tool_response>" in ids:
        found.add("</s>")
    return frozenset(ids[name] for name in found if name in ids)
