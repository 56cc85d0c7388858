"""Token ids of llama.cpp for 75 awkward texts and 16 vocabularies.

The vocabularies are large, so they are looked for in the folder that LLAMATRIO_TEST_MODELS names: the files
`ggml-vocab-*.gguf` of llama.cpp's repository, SmolLM2-135M-Instruct.Q4_1.gguf and a Gemma 3 270M.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest

from llamatrio.model.gguf import open_gguf
from llamatrio.model.tokenizer import Tokenizer, load_tokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokenizer.json").read_text(encoding="utf-8"))
NAMES = list(GOLDEN["vocabularies"])

pytestmark = pytest.mark.model


@cache
def tokenizer_of(name: str) -> Tokenizer:
    folder = os.environ.get("LLAMATRIO_TEST_MODELS")
    if not folder:
        pytest.skip("LLAMATRIO_TEST_MODELS names no folder of models")
    file_name = GOLDEN["vocabularies"][name]["file"]
    for path in (Path(folder) / file_name, Path(folder) / file_name.replace("gemma3-", "gemma-3-")):
        if path.is_file():
            with open_gguf(path) as file:
                return load_tokenizer(file.metadata)
    pytest.skip(f"{folder} has no {file_name}")


@pytest.mark.parametrize("mode", ["plain", "special"])
@pytest.mark.parametrize("name", NAMES)
def test_ids(name: str, mode: str) -> None:
    tokenizer = tokenizer_of(name)
    is_special = mode == "special"
    wrong = []
    for text, expected in zip(GOLDEN["texts"], GOLDEN["vocabularies"][name][mode], strict=True):
        found = tokenizer.encode(text, add_special=is_special, parse_special=is_special)
        if found != expected:
            wrong.append((text, expected, found))
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
def test_decoding_gives_back_the_text(name: str) -> None:  # B28
    tokenizer = tokenizer_of(name)
    for text in GOLDEN["texts"]:
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        # Where U+2581 spells a space, one that a text holds itself cannot be told from it.
        assert tokenizer.decode(ids, special=True) in (text, text.replace("\u2581", " "))


def test_qwen2_and_llama3_rules() -> None:  # B31
    def plain(name: str, text: str) -> list[int]:
        return tokenizer_of(name).encode(text, add_special=False, parse_special=False)

    assert plain("qwen2", "->") == [405]
    assert plain("qwen2", "(x):\n") == [2075, 982]
    assert len(plain("qwen2", "2024")) == 4
    llama3 = tokenizer_of("llama-bpe")
    assert [llama3.token_text(id) for id in plain("llama-bpe", "2024")] == ["202", "4"]


def test_gemma_has_no_space_after_a_special_token() -> None:  # B28
    gemma = tokenizer_of("gemma3")
    ids = gemma.encode("<pad>text<eos>", add_special=False, parse_special=True)
    assert [gemma.token_text(id) for id in ids] == ["<pad>", "text", "<eos>"]
