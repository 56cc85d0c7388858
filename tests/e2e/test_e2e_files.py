"""Cases of files and numbers: B52 and B54 through the command line, B55 B62 B64 through the engine."""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_tools import FULL, GREEDY, open_tiny, prompt, run
from numpy.typing import NDArray

from llamatrio.cli.main import main
from llamatrio.model.gguf import open_gguf
from llamatrio.sched.types import SamplingParams
from tests.helpers_gguf import RawTensor, spm_vocabulary, tiny_model, tiny_vocabulary, write_gguf


@pytest.fixture(autouse=True)
def process_wide_settings() -> Iterator[None]:
    """The command line changes what belongs to the whole process."""
    interval, level = sys.getswitchinterval(), logging.getLogger("llamatrio").level
    yield
    sys.setswitchinterval(interval)
    logging.getLogger("llamatrio").setLevel(level)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line with which a command refuses."""
    assert main([str(argument) for argument in arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("llamatrio: error: ")
    assert err.count("\n") == 1, err
    return err


SERVE = ("serve", "--port", "0", "-m")


# ---------------------------------------------------------------- B52: cut short


def places(path: Path) -> dict[str, int]:
    """Sizes at which a file is cut, by where that is."""
    with open_gguf(path) as file:
        first = min(tensor.offset for tensor in file.tensors.values())
        last = max(tensor.offset + tensor.nbytes for tensor in file.tensors.values())
    data = path.read_bytes()
    in_a_key = data.index(b"general.architecture") + 7
    in_a_tensor_info = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 6
    return {"key": in_a_key, "tensor info": in_a_tensor_info, "header only": first, "last byte": last - 1}


@pytest.mark.parametrize("where", [0, 3, 4, 8, 23, "key", "tensor info", "header only", "last byte"])
def test_b52_a_truncated_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], where: Any) -> None:
    path = tiny_model(tmp_path / "cut.gguf")
    size = places(path)[where] if isinstance(where, str) else where
    path.write_bytes(path.read_bytes()[:size])
    assert str(size) in refusal(capsys, *SERVE, path), "the size of the file is not named"


def test_b52_a_file_without_padding_at_its_end_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_model(tmp_path / "whole.gguf")
    path.write_bytes(path.read_bytes()[: places(path)["last byte"] + 1])
    assert main(["info", str(path)]) == 0
    assert "tiny llama" in capsys.readouterr().out


# ---------------------------------------------------------------- B54: foreign files


def patched(at: int, replacement: bytes) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        data = bytearray(tiny_model(path).read_bytes())
        data[at : at + len(replacement)] = replacement
        path.write_bytes(data)
        return path

    return make


def with_keys(**keys: Any) -> Callable[[Path], Path]:
    named = {name.replace("__", "."): value for name, value in keys.items()}
    return lambda path: tiny_model(path, metadata=named)


FOREIGN: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "big endian": (patched(4, bytes([0, 0, 0, 3])), ["byte order"]),
    "GGML": (patched(0, b"GGML"), ["magic", "GGML"]),
    "FUGG": (patched(0, b"FUGG"), ["magic", "FUGG"]),
    "version 1": (patched(4, struct.pack("<I", 1)), ["version 1"]),
    "version 99": (patched(4, struct.pack("<I", 99)), ["version 99"]),
    "type 999": (
        lambda path: tiny_model(path, tensors={"blk.0.ffn_up.weight": RawTensor(999, (96, 64), bytes(12288))}),
        ["999", "blk.0.ffn_up.weight"],
    ),
    "architecture": (with_keys(general__architecture="foo"), ["'foo'"]),
    "no architecture": (with_keys(general__architecture=None), ["general.architecture"]),
    "no tensors": (
        lambda path: write_gguf(path, {"general.architecture": "llama", **tiny_vocabulary()}, {}),
        ["vocabulary"],
    ),
    "no tokens": (
        lambda path: tiny_model(path, metadata={**tiny_vocabulary(), "tokenizer.ggml.model": None}),
        ["tokenizer.ggml.model"],
    ),
    "no merges": (
        lambda path: tiny_model(path, metadata={**tiny_vocabulary(), "tokenizer.ggml.merges": None}),
        ["tokenizer.ggml.merges"],
    ),
    "pre-tokenizer": (with_keys(tokenizer__ggml__pre="brand-new"), ["'brand-new'"]),  # B31
    "types": (
        lambda path: tiny_model(
            path, metadata={**tiny_vocabulary(), "tokenizer.ggml.token_type": np.ones(5, np.int32)}
        ),
        ["tokenizer.ggml.token_type"],
    ),
    "scores": (
        lambda path: tiny_model(
            path, metadata=spm_vocabulary({"a": -1.0}) | {"tokenizer.ggml.scores": np.zeros(7, np.float32)}
        ),
        ["tokenizer.ggml.scores"],
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_b54_a_foreign_file_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    make, words = FOREIGN[what]
    path = make(tmp_path / "foreign.gguf")
    error = refusal(capsys, *SERVE, path)
    for word in words:
        assert word in error
    assert refusal(capsys, "info", path) == error


def test_b54_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (SERVE, ("info",), ("run", "hi", "-m")):
        assert "nowhere.gguf" in refusal(capsys, *command, tmp_path / "nowhere.gguf")


# ---------------------------------------------------------------- B55, B62, B64: numbers


def logprobs(outcome: Any) -> NDArray[np.float64]:
    """[n, n_vocab] by id."""
    rows = np.zeros((len(outcome.probs), len(outcome.probs[0].top)))
    for row, choice in zip(rows, outcome.probs, strict=True):
        for entry in choice.top:
            row[entry.id] = entry.logprob
    return rows


async def first_logprobs(path: Path, n_prompt: int, **options: Any) -> NDArray[np.float64]:
    """What follows a prompt."""
    async with open_tiny(path, **{"n_ctx": 2048, **options}) as engine:
        found: NDArray[np.float64] = logprobs(await run(engine, prompt(n_prompt), 1, FULL))[0]
        return found


async def test_b55_the_embedding_is_the_head_unless_the_file_has_one(tmp_path: Path) -> None:
    tied = tiny_model(tmp_path / "tied.gguf")
    with open_gguf(tied) as file:
        embedding = file.data("token_embd.weight").view("<f2").reshape(-1, 64).astype(np.float16)
    copied = tiny_model(tmp_path / "copied.gguf", tensors={"output.weight": embedding})
    other = tiny_model(tmp_path / "other.gguf", tensors={"output.weight": embedding[::-1].copy()})
    results = [await first_logprobs(path, 20) for path in (tied, copied, other)]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_allclose(results[2], results[0][::-1], atol=1e-4)


async def test_b62_rope_factors_of_the_file_are_used(tmp_path: Path) -> None:
    paths = [
        tiny_model(tmp_path / f"{factor}.gguf", tensors={"rope_freqs.weight": np.full(16, factor, np.float32)})
        for factor in (1, 8)
    ]
    plain = tiny_model(tmp_path / "plain.gguf")
    for n_prompt in (1, 2, 40):
        ones, eights = [await first_logprobs(path, n_prompt) for path in paths]
        np.testing.assert_array_equal(ones, await first_logprobs(plain, n_prompt))
        assert (np.abs(ones - eights).max() > 1e-3) == (n_prompt > 1), "position 0 has no angle, all others have"


@pytest.mark.parametrize("head_dim", [32, 64])
async def test_b64_a_q8_0_cache_stays_close_past_1024_tokens(tmp_path: Path, head_dim: int) -> None:
    path = tiny_model(tmp_path / "heads.gguf", head_dim=head_dim, n_ctx=2048)
    for n_prompt in (100, 1200):
        truth = await first_logprobs(path, n_prompt)
        by_chunks = []
        for n_ubatch in (64, 256):
            found = await first_logprobs(path, n_prompt, type_k="q8_0", type_v="q8_0", n_ubatch=n_ubatch)
            assert np.isfinite(found).all()
            assert float((np.exp(truth) * (truth - found)).sum()) < 0.01
            by_chunks.append(found)
        np.testing.assert_array_equal(by_chunks[0], by_chunks[1])


def test_b64_a_head_without_whole_blocks_is_refused_for_q8_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_model(tmp_path / "heads.gguf", head_dim=80)
    assert "80" in refusal(capsys, *SERVE, path, "-ctk", "q8_0", "-ctv", "q8_0")


async def test_b64_a_head_without_whole_blocks_runs_with_f16(tmp_path: Path) -> None:
    found = await first_logprobs(tiny_model(tmp_path / "heads.gguf", head_dim=80), 30)
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_k=40, ignore_eos=True),
        SamplingParams(top_k=250, ignore_eos=True),
        SamplingParams(top_k=0, n_probs=256, ignore_eos=True),
        SamplingParams(0.0, n_probs=50, repeat_penalty=1.1, repeat_last_n=-1, ignore_eos=True),
    ],
)
async def test_a_vocabulary_smaller_than_what_is_asked_for(sampling: SamplingParams, tmp_path: Path) -> None:
    """A step asks for at most as many candidates as there are: more would end the engine."""
    keys = tiny_vocabulary()
    n_vocab = 30
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"][: n_vocab - 1], "<|im_end|>"]
    keys["tokenizer.ggml.token_type"] = np.array([1] * (n_vocab - 1) + [3], np.int32)
    keys |= {"tokenizer.ggml.merges": [], "tokenizer.ggml.bos_token_id": 29, "tokenizer.ggml.eos_token_id": 29}
    async with open_tiny(tiny_model(tmp_path / "few.gguf", metadata=keys), n_ctx=64) as engine:
        outcome = await run(engine, range(25), 5, sampling)
    assert outcome.finished.reason == "length"
    assert all(len(choice.top) == min(sampling.n_probs, n_vocab) for choice in outcome.probs)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(top_k=0), FULL])
async def test_a_model_that_makes_no_numbers_ends_requests_and_not_the_engine(
    sampling: SamplingParams, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "nan.gguf", tensors={"output_norm.weight": np.full(64, np.nan, np.float32)})
    async with open_tiny(model) as engine:
        for _ in range(2):
            outcome = await run(engine, prompt(5), 3, sampling)
            assert (outcome.finished.reason, outcome.ids) == ("error", [])
            assert "no token may follow" in outcome.finished.error
