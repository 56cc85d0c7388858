"""What a generation made, as the fields of an answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from llamatrio.engine.events import Finished, Progress
from llamatrio.errors import BackendError, LlamatrioError, OverloadedError
from llamatrio.model.tokenizer import Tokenizer
from llamatrio.sched.sampler import Choice
from llamatrio.sched.types import Request
from llamatrio.server.ports import Generation
from llamatrio.server.samplers import CHAIN

LOWEST = -3.4028234663852886e38
"""JSON has no infinity; llama-server writes the lowest float instead."""

_FINISH_REASONS = {"stop": "stop", "word": "stop", "length": "length"}
_STOP_TYPES = {"stop": "eos", "word": "word", "length": "limit"}


@dataclass
class Completed:
    """A generation that was read to its end."""

    finished: Finished
    text: str = ""
    ids: list[int] = field(default_factory=list)
    probs: list[Choice] = field(default_factory=list)


async def collect(generation: Generation) -> Completed:
    """Reads a generation to its end. Raises what `check_finished` raises."""
    texts: list[str] = []
    ids: list[int] = []
    probs: list[Choice] = []
    last: Finished | None = None
    async for event in generation:
        if isinstance(event, Finished):
            last = event
        else:
            texts.append(event.text)
            ids.extend(event.ids)
            probs.extend(event.probs)
    assert last is not None, "a generation ends with Finished"
    if (failure := failure_of(last)) is not None:
        raise failure
    return Completed(last, "".join(texts), ids, probs)


async def collect_all(generations: Sequence[Generation]) -> list[Completed]:
    """Reads all generations to their ends, side by side. Raises the first failure, as it is."""
    results: dict[int, Completed] = {}
    failures: list[LlamatrioError] = []

    async def read(i: int, scope: trio.CancelScope) -> None:
        try:
            results[i] = await collect(generations[i])
        except LlamatrioError as error:
            failures.append(error)
            scope.cancel()

    async with trio.open_nursery() as nursery:
        for i in range(len(generations)):
            nursery.start_soon(read, i, nursery.cancel_scope)
    if failures:
        raise failures[0]
    return [results[i] for i in range(len(generations))]


def failure_of(finished: Finished) -> LlamatrioError | None:
    """The error that a generation ended with, if it did."""
    if finished.reason == "error":
        return BackendError(finished.error or "the generation failed")
    if finished.reason == "cancelled":
        return OverloadedError(finished.error or "the generation was cancelled by the server")
    return None


def finish_reason(finished: Finished) -> str:
    """OpenAI's name for why it ended."""
    return _FINISH_REASONS[finished.reason]


def stop_type(finished: Finished) -> str:
    """llama-server's name for why it ended."""
    return _STOP_TYPES[finished.reason]


def usage(results: Sequence[Progress]) -> dict[str, Any]:
    """Token counts; prompt tokens that came from the cache count as prompt tokens too."""
    prompt = sum(result.n_prompt for result in results)
    predicted = sum(result.n_predicted for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": predicted,
        "total_tokens": prompt + predicted,
        "prompt_tokens_details": {"cached_tokens": sum(result.n_cached for result in results)},
    }


def timings(result: Progress) -> dict[str, Any]:
    """llama-server's timings; its `prompt_n` leaves out what came from the cache."""
    return {
        "cache_n": result.n_cached,
        **_pace("prompt", result.n_prompt - result.n_cached, result.prompt_seconds),
        **_pace("predicted", result.n_predicted, result.predicted_seconds),
    }


def _pace(name: str, n: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": n,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / n if n else 0.0,
        f"{name}_per_second": n / seconds if seconds > 0 else 0.0,
    }


class TokenJson:
    """Reports of probabilities as JSON: log probabilities, or probabilities after sampling."""

    def __init__(self, tokenizer: Tokenizer, *, n_top: int, post_sampling: bool = False) -> None:
        self._tokenizer = tokenizer
        self._n_top = n_top
        self._key = "prob" if post_sampling else "logprob"
        self._top_key = "top_probs" if post_sampling else "top_logprobs"

    def reports(self, reports: Iterable[Choice]) -> list[dict[str, Any]]:
        """One entry for each token made."""
        return [
            {
                **self._token(report.id, report.logprob),
                self._top_key: [self._token(other.id, other.logprob) for other in report.top[: self._n_top]],
            }
            for report in reports
        ]

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.piece(id, special=True)
        value = math.exp(logprob) if self._key == "prob" else max(logprob, LOWEST)
        # A piece may be part of a character: `token` has what is whole, `bytes` has all.
        return {"id": id, "token": piece.decode("utf-8", "ignore"), "bytes": list(piece), self._key: value}


RANDOM_SEED = 0xFFFF_FFFF
"""What llama-server writes for a seed that is drawn anew for each request."""

_UNOFFERED: dict[str, Any] = {
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1,
    "typical_p": 1.0, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", ":", '"', "*"], "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
    "adaptive_target": -1.0, "adaptive_decay": 0.9, "n_keep": 0, "n_discard": 0, "min_keep": 0, "grammar": "",
    "grammar_lazy": False, "grammar_triggers": [], "preserved_tokens": [], "lora": [], "speculative.types": "none",
    "backend_sampling": False, "chat_format": "Content-only", "generation_prompt": "", "reasoning_format": "none",
    "reasoning_in_content": False,
}  # fmt: skip
"""Settings that are not offered, at the values that turn them off: user interfaces read them."""


def generation_settings(
    request: Request, *, stream: bool = False, timings_per_token: bool = False, seed: int | None = None
) -> dict[str, Any]:
    """A request's settings, by llama-server's names."""
    sampling = request.sampling
    return {
        "seed": next((s for s in (seed, sampling.seed) if s is not None), RANDOM_SEED),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(request.stop),
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "min_tokens": sampling.min_tokens,
        "stream": stream,
        "logit_bias": [{"token": id, "bias": max(bias, LOWEST)} for id, bias in sampling.logit_bias],
        "n_probs": sampling.n_probs,
        "post_sampling_probs": sampling.post_sampling_probs,
        "timings_per_token": timings_per_token,
        "samplers": list(CHAIN),
        **_UNOFFERED,
    }
