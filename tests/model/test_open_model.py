from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamatrio.errors import GGUFError
from llamatrio.model.model import open_model
from tests.helpers_gguf import spm_vocabulary, tiny_model

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "models").glob("*.gguf"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_models_open(path: Path) -> None:
    with open_model(path) as model:
        assert model.tokenizer.n_vocab == model.spec.n_vocab == 288
        assert not model.chat_template.is_default
        assert model.chat_template.fault is None
        assert model.file.data("token_embd.weight").shape[0] == 288


def test_a_scored_vocabulary_opens(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "a.gguf", "gemma3", metadata=spm_vocabulary({"▁": -1.0, "a": -2.0}))
    with open_model(path) as model:
        ids = model.tokenizer.encode("a a", add_special=True, parse_special=True)
        assert [model.tokenizer.token_text(id) for id in ids] == ["<s>", "▁", "a", "▁", "a"]


def test_tokens_and_embeddings_must_agree(tmp_path: Path) -> None:
    embedding = np.zeros((289, 64), np.float32)
    path = tiny_model(tmp_path / "a.gguf", tensors={"token_embd.weight": embedding})
    with pytest.raises(GGUFError, match="288 tokens, but embeddings for 289"):
        open_model(path)
