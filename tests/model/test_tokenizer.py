from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from llamatrio.errors import GGUFError, ModelError, RequestError, UnsupportedModelError
from llamatrio.model.metadata import Metadata
from llamatrio.model.pretokenizer import pre_tokenizer
from llamatrio.model.tokenizer import Tokenizer, load_tokenizer
from tests.helpers_gguf import spm_vocabulary, tiny_vocabulary

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def bpe(**keys: Any) -> Tokenizer:
    return load_tokenizer(Metadata({**tiny_vocabulary(), **{f"tokenizer.ggml.{k}": v for k, v in keys.items()}}))


# Scores are negative ranks: "▁text" is reached by merging t e, x t, te xt, then the space.
WORDS = {"▁": -90.0, **{c: -100.0 - i for i, c in enumerate("texwos")}}
WORDS |= {"te": -1.0, "xt": -2.0, "text": -3.0, "▁text": -4.0, "▁t": -50.0, "▁▁": -60.0, "▁▁▁": -60.0}


def spm(**keys: Any) -> Tokenizer:
    return load_tokenizer(Metadata(spm_vocabulary(WORDS, **keys)))


def spelled(tokenizer: Tokenizer, text: str, **how: bool) -> list[str]:
    ids = tokenizer.encode(text, **{"add_special": False, "parse_special": False, **how})
    return [tokenizer.token_text(id) for id in ids]


def test_byte_level_merges() -> None:
    assert spelled(bpe(), "in the xin") == ["in", "Ġthe", "Ġ", "x", "in"]


@given(UNICODE)
def test_byte_level_decoding_gives_back_any_text(text: str) -> None:
    tokenizer = bpe()
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == text


def test_a_byte_that_the_vocabulary_lacks_still_keeps_its_neighbours_apart() -> None:
    texts = ["no byte" if text == "~" else text for text in tiny_vocabulary()["tokenizer.ggml.tokens"]]
    assert spelled(bpe(tokens=texts), "i~n in") == ["i", "n", "Ġ", "in"]


def test_pre_tokenizers_differ_in_digits() -> None:  # B31
    digits = {"merges": ["2 0", "20 2", "202 4"], "tokens": None}
    vocabulary = tiny_vocabulary()
    texts = [*vocabulary["tokenizer.ggml.tokens"][:-3], "20", "202", "2024"]

    def cut(pre: str) -> list[str]:
        return spelled(bpe(**digits | {"tokens": texts, "pre": pre}), "2024")

    assert cut("qwen2") == ["2", "0", "2", "4"]
    assert cut("llama-bpe") == ["202", "4"]
    assert cut("gpt-2") == ["2024"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("HelloWorld helloWorld", "Hello|World| hello|World"),
        ("HTTPServer it's IT'S", "HTTPServer| it's| IT'S"),
        ("ÄÖüb/Été ÜberÄrger", "ÄÖüb|/Été| Über|Ärger"),
        ("12345 6", "123|45| |6"),
        ("a//\n\n b", "a|//\n\n| b"),
        ("हिन्दी में", "हिन्दी| में"),
        ("x  \n\n  y", "x|  \n\n| | y"),
    ],
)
def test_words_of_o200k_end_where_a_capital_begins(text: str, words: str) -> None:
    """The vocabulary of gpt-oss and Phi-4-mini: a letter's case counts in every alphabet, and marks are letters."""
    split = Split(Regex(pre_tokenizer("gpt-4o").patterns[0]), "isolated")
    assert "|".join(word for word, _ in split.pre_tokenize_str(text)) == words


def test_unknown_pre_tokenizer_is_refused() -> None:  # B31
    with pytest.raises(UnsupportedModelError, match="'brand-new'"):
        bpe(pre="brand-new")
    keys = tiny_vocabulary()
    del keys["tokenizer.ggml.pre"]
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre"):
        load_tokenizer(Metadata(keys))


def test_unknown_tokenizer_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'rwkv'"):
        bpe(model="rwkv")


def test_ignore_merges_keeps_a_word_that_is_a_token() -> None:
    texts = [*tiny_vocabulary()["tokenizer.ggml.tokens"][:-1], "zebra"]
    assert spelled(bpe(tokens=texts, pre="llama-bpe"), "zebra") == ["zebra"]
    assert spelled(bpe(tokens=texts, pre="gpt-2"), "zebra") == [*"zebra"]


def test_control_tokens_are_parsed_on_demand() -> None:
    tokenizer = bpe()
    assert spelled(tokenizer, "in<|im_end|>", parse_special=True) == ["in", "<|im_end|>"]
    assert "<|im_end|>" not in spelled(tokenizer, "in<|im_end|>")
    assert tokenizer.decode(tokenizer.encode("in<|im_end|>", add_special=False, parse_special=True)) == "in"


def test_a_control_token_is_out_of_reach_even_as_a_whole_word() -> None:
    texts = tiny_vocabulary()["tokenizer.ggml.tokens"]
    texts[-1] = "stop"
    kinds = tiny_vocabulary()["tokenizer.ggml.token_type"]
    kinds[-1] = 3
    tokenizer = bpe(tokens=texts, token_type=kinds, pre="llama-bpe")
    assert spelled(tokenizer, "stop") == [*"stop"]
    assert spelled(tokenizer, "stop", parse_special=True) == ["stop"]


def test_user_defined_tokens_are_always_whole_and_the_longest_wins() -> None:
    texts = [*tiny_vocabulary()["tokenizer.ggml.tokens"][:-2], "<a>", "<a><b>"]
    kinds = tiny_vocabulary()["tokenizer.ggml.token_type"]
    kinds[-2:] = 4
    tokenizer = bpe(tokens=texts, token_type=kinds)
    assert spelled(tokenizer, "<<a>in<a><b>") == ["<", "<a>", "in", "<a><b>"]
    assert tokenizer.decode([286]) == "<a>"


def test_end_of_generation_by_key_and_by_name() -> None:
    tokenizer = bpe()
    assert {tokenizer.token_text(id) for id in tokenizer.eog_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert tokenizer.token_text(tokenizer.eot_id or -1) == "<|im_end|>"
    texts = tiny_vocabulary()["tokenizer.ggml.tokens"]
    texts[-1] = "<end_of_turn>"
    # The kind says unused, the name says otherwise.
    named = bpe(tokens=texts)
    assert len(texts) - 1 in named.eog_ids
    assert len(texts) - 1 in named.control_ids


def test_look_alikes_do_not_end_a_generation() -> None:
    texts = tiny_vocabulary()["tokenizer.ggml.tokens"]
    texts[-3:] = ["<|return|>", "<|call|>", "<|end|>"]
    assert len(texts) - 1 not in bpe(tokens=texts).eog_ids
    texts[-3:] = ["x1", "<|call|>", "<|end|>"]
    assert len(texts) - 1 in bpe(tokens=texts).eog_ids


@pytest.mark.parametrize(
    ("text", "prefixed", "bare"),
    [
        ("", [], []),
        ("text", ["▁text"], ["text"]),
        (" text", ["▁", "▁text"], ["▁text"]),
        ("<s>text</s>", ["<s>", "▁text", "</s>"], ["<s>", "text", "</s>"]),
        ("  two  s", ["▁▁", "▁t", "w", "o", "▁▁", "s"], ["▁", "▁t", "w", "o", "▁▁", "s"]),
    ],
)
def test_space_prefix(text: str, prefixed: list[str], bare: list[str]) -> None:  # B28
    for flag, expected in ((True, prefixed), (False, bare)):
        tokenizer = spm(add_space_prefix=flag)
        ids = tokenizer.encode(text, add_special=False, parse_special=True)
        assert [tokenizer.token_text(id) for id in ids] == expected
        assert tokenizer.decode(ids, special=True) == text


@given(st.text(" texwos▁", max_size=30), st.booleans())
def test_scored_decoding_gives_back_what_was_encoded(text: str, has_prefix: bool) -> None:  # B28
    tokenizer = spm(add_space_prefix=has_prefix)
    ids = tokenizer.encode(text, add_special=True, parse_special=False)
    assert tokenizer.decode(ids) == text.replace("▁", " ")


def greedy(text: str) -> list[str]:
    """The rule of scored merges word for word: best score first, the leftmost of equals."""
    pieces = list(text)
    while True:
        pairs = [(-WORDS[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in WORDS]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@given(st.text("▁▁texwos", max_size=40))
def test_scored_merges_follow_the_greedy_rule(text: str) -> None:
    assert spelled(spm(add_space_prefix=False), text) == greedy(text)


def test_unknown_characters_become_bytes() -> None:
    assert spelled(spm(add_space_prefix=False), "té") == ["t", "<0xC3>", "<0xA9>"]
    tokenizer = spm(add_space_prefix=False)
    assert (
        b"".join(tokenizer.piece(id) for id in tokenizer.encode("é", add_special=False, parse_special=False))
        == "é".encode()
    )


def test_bos_and_eos_as_the_file_says() -> None:  # B29
    def ends(tokenizer: Tokenizer, text: str = "text") -> list[str]:
        return spelled(tokenizer, text, add_special=True, parse_special=True)

    assert ends(spm()) == ["<s>", "▁text"]
    assert ends(spm(add_bos_token=False)) == ["▁text"]
    assert ends(spm(add_eos_token=True)) == ["<s>", "▁text", "</s>"]
    # The raw interface adds what the file says, also to a text that spells it out.
    assert ends(spm(), "<s>text") == ["<s>", "<s>", "▁text"]
    assert ends(bpe(), "in") == ["in"]
    assert ends(bpe(pre="llama-bpe", add_bos_token=True), "in") == ["<|endoftext|>", "in"]


def test_no_bos_is_invented() -> None:  # B29
    keys = spm_vocabulary(WORDS)
    del keys["tokenizer.ggml.bos_token_id"]
    tokenizer = load_tokenizer(Metadata(keys))
    assert tokenizer.bos_id is None
    assert not tokenizer.add_bos
    assert spelled(tokenizer, "text", add_special=True) == ["▁text"]


@pytest.mark.parametrize("id", [-1, 288, 1 << 63, 1.5, True, "1", None])
def test_ids_out_of_range_are_misuse(id: Any) -> None:  # B49
    tokenizer = bpe()
    for use in (tokenizer.piece, tokenizer.token_text, lambda id: tokenizer.decode([id])):
        with pytest.raises(ValueError, match="from 0 to 287"):
            use(id)


def test_lone_surrogates_are_the_clients_fault() -> None:  # B33
    for tokenizer in (bpe(), spm()):
        with pytest.raises(RequestError, match=r"U\+D83D at character 2"):
            tokenizer.encode("ab\ud83d", add_special=True, parse_special=True)


def test_nul_is_ordinary_text() -> None:  # B33
    for tokenizer in (bpe(), spm(add_space_prefix=False)):
        ids = tokenizer.encode("t\0x", add_special=False, parse_special=True)
        assert tokenizer.decode(ids) == "t\0x"


def test_pieces_that_are_no_utf8_decode_to_replacement_characters() -> None:
    tokenizer = bpe()
    half = tokenizer.encode("😀", add_special=False, parse_special=False)[:2]
    assert tokenizer.decode(half) == "\ufffd"


@pytest.mark.parametrize("make", [bpe, spm])
def test_threads_share_a_tokenizer(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=True, parse_special=True)

    texts = [f"text{i} two in the {'ox' * i}" for i in range(200)]
    alone = [encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encode, texts)) == alone


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_missing_keys_are_named(key: str) -> None:  # B54
    keys = tiny_vocabulary()
    del keys[f"tokenizer.ggml.{key}"]
    with pytest.raises(GGUFError, match=rf"'tokenizer\.ggml\.{key}'"):
        load_tokenizer(Metadata(keys))


def test_missing_scores_are_named() -> None:  # B54
    keys = spm_vocabulary(WORDS)
    del keys["tokenizer.ggml.scores"]
    with pytest.raises(GGUFError, match=r"'tokenizer\.ggml\.scores'"):
        load_tokenizer(Metadata(keys))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("token_type", np.ones(7, np.int32), "'tokenizer.ggml.token_type' has 7 entries for 288 tokens"),
        ("scores", np.ones(7, np.float32), "'tokenizer.ggml.scores' has 7 entries for 288 tokens"),
        ("merges", ["t h", "nonsense"], "the merge 'nonsense'"),
        ("merges", ["t q"], "the merge 't q'"),
        ("tokens", ["x"] * 288, "the same token twice"),
        ("bos_token_id", 288, "'tokenizer.ggml.bos_token_id' is 288"),
        ("eos_token_id", 1 << 40, "'tokenizer.ggml.eos_token_id'"),
        ("tokens", np.ones(3), "array of strings"),
    ],
)
def test_vocabularies_that_contradict_themselves(key: str, value: Any, words: str) -> None:  # B54
    with pytest.raises(ModelError) as caught:
        bpe(**{key: value})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_byte_tokens_must_spell_a_byte() -> None:
    keys = spm_vocabulary(WORDS)
    keys["tokenizer.ggml.tokens"][5] = "<0xZZ>"
    with pytest.raises(GGUFError, match="token 5 is a byte token"):
        load_tokenizer(Metadata(keys))


def test_phi3_drops_white_space_after_special_tokens() -> None:
    keys = spm_vocabulary(WORDS, add_space_prefix=False) | {"general.name": "Phi-3 mini"}
    tokenizer = load_tokenizer(Metadata(keys))
    assert spelled(tokenizer, "</s> \n text", parse_special=True) == ["</s>", "text"]
    assert spelled(tokenizer, "<s> text", parse_special=True) == ["<s>", "▁text"]
