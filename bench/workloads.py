"""What servers are given to do, and what is read off the answers. The same for every server.

A figure whose name ends in `_ms` or `_s` is a time; the others are tokens per second. Every workload checks that all
tokens asked for were made, and that no prompt came from a cache unless reuse is its point.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.client import Client, Stream
from bench.common import Figures, Prompts, completion

SHARED_AT_MOST = 4
"""Tokens that prompts of different salts may have in common: BOS, and a first word by chance."""
PROMPT = 64
N_NEWCOMERS = 5
NEWCOMER_TOKENS = 4


class WrongAnswer(Exception):
    """A server did other work than it was asked for, so that its time says nothing."""


@dataclass(frozen=True)
class Sizes:
    """How much work there is, in tokens."""

    n_predict: int = 128
    long_prefill: int = 4096
    context: int = 2000
    neighbours: int = 384
    """Tokens of the streams beside which newcomers are measured; they have to outlast these."""
    turns: int = 10
    system: int = 1024
    """Tokens with which all prompts of a burst begin."""


QUICK = Sizes(n_predict=32, long_prefill=1024, context=400, neighbours=192, turns=3, system=256)


@dataclass(frozen=True)
class Job:
    """One workload on one server."""

    client: Client
    prompts: Prompts
    salt: tuple[object, ...]
    """Different in each round, so that no round finds what an earlier one left in a cache."""
    sizes: Sizes

    def prompt(self, n: int, *salt: object) -> list[int]:
        """A prompt of n tokens that no other round has."""
        return self.prompts.ids(n, *self.salt, *salt)

    def run(self, bodies: Sequence[dict[str, Any]], *, may_reuse: bool = False) -> list[Stream]:
        """Starts all at once, and returns when all have ended."""
        streams = [self.client.start(body) for body in bodies]
        self.client.wait_until(lambda: all(stream.is_done for stream in streams))
        for stream, body in zip(streams, bodies, strict=True):
            check(stream, body["n_predict"], may_reuse=may_reuse)
        return streams


Workload = Callable[[Job], Figures]


def check(stream: Stream, n_predict: int, *, may_reuse: bool = False) -> None:
    """Raises WrongAnswer unless all tokens were made, from a prompt that was evaluated."""
    final = stream.final
    timings = final.get("timings")
    if timings is None or timings["predicted_n"] != n_predict:
        raise WrongAnswer(f"expected {n_predict} tokens, but the stream ended with {final}")
    if not may_reuse and timings["cache_n"] > SHARED_AT_MOST:
        raise WrongAnswer(f"{timings['cache_n']} prompt tokens came from a cache")


def decode(n_streams: int) -> Workload:
    """Streams that start together."""

    def measure(job: Job) -> Figures:
        n = job.sizes.n_predict
        return rates(job.run([completion(job.prompt(PROMPT, i), n) for i in range(n_streams)]))

    return measure


def time_together(streams: Sequence[Stream]) -> tuple[float, float]:
    """When all streams ran: from the last one's first token to the first one's last."""
    begin = max(stream.times[0] for stream in streams)
    end = min(stream.ended for stream in streams)
    if end <= begin:
        raise WrongAnswer("the streams did not run at the same time")
    return begin, end


def rates(streams: Sequence[Stream]) -> Figures:
    """Tokens/s while all streams ran (from the last one's first token to the first one's last), and over all."""
    begin, end = time_together(streams)
    n = sum(_tokens_per_event(s) * sum(begin < t <= end for t in s.times[:-1]) for s in streams)
    n_all = sum(_n_tokens(stream) for stream in streams)
    whole = max(stream.ended for stream in streams) - min(stream.sent for stream in streams)
    return {"decode": n / (end - begin), "overall": n_all / whole}


def _n_tokens(stream: Stream) -> int:
    n: int = stream.final["timings"]["predicted_n"]
    return n


def _tokens_per_event(stream: Stream) -> float:
    """Usually 1: a token that ends within a character waits for the next one's event."""
    return _n_tokens(stream) / (len(stream.times) - 1)


def prefill(n_tokens: int) -> Workload:
    """One prompt, to its first token."""

    def measure(job: Job) -> Figures:
        (stream,) = job.run([completion(job.prompt(n_tokens), 1)])
        return {"prefill": n_tokens / stream.ttft}

    return measure


def long_prefill(job: Job) -> Figures:
    """One long prompt, to its first token."""
    return prefill(job.sizes.long_prefill)(job)


def decode_in_context(job: Job) -> Figures:
    """8 streams with long contexts. A first pass makes the contexts, so that all streams then start together."""
    prompts = [job.prompt(job.sizes.context, i) for i in range(8)]
    for prompt in prompts:
        job.run([completion(prompt, 1)])
    return rates(job.run([completion(prompt, job.sizes.n_predict) for prompt in prompts], may_reuse=True))


def first_token(job: Job) -> Figures:
    """Time to first token of short prompts, alone and beside 7 running streams."""
    alone = _newcomers(job, "alone")
    bodies = [completion(job.prompt(PROMPT, "neighbour", i), job.sizes.neighbours) for i in range(7)]
    neighbours = [job.client.start(body) for body in bodies]
    job.client.wait_until(lambda: all(stream.times for stream in neighbours))
    beside = _newcomers(job, "beside")
    if any(stream.is_done for stream in neighbours):
        raise WrongAnswer("a neighbour ended before the newcomers were served")
    job.client.wait_until(lambda: all(stream.is_done for stream in neighbours))
    for stream in neighbours:
        check(stream, job.sizes.neighbours)
    return {"alone_ms": _median_ttft_ms(alone), "beside_ms": _median_ttft_ms(beside)}


def _newcomers(job: Job, salt: str) -> list[Stream]:
    bodies = [completion(job.prompt(PROMPT, salt, i), NEWCOMER_TOKENS) for i in range(N_NEWCOMERS)]
    return [stream for body in bodies for stream in job.run([body])]


def _median_ttft_ms(streams: Sequence[Stream]) -> float:
    return statistics.median(stream.ttft for stream in streams) * 1e3


def burst(job: Job) -> Figures:
    """8 prompts that arrive together: one system prompt, 32 tokens of their own each. Until the last first token."""
    system = job.prompt(job.sizes.system, "system")
    prompts = [system + job.prompt(32, "own", i) for i in range(8)]
    streams = job.run([completion(prompt, NEWCOMER_TOKENS) for prompt in prompts], may_reuse=True)
    return {"last_ms": max(stream.ttft for stream in streams) * 1e3}


def chat(job: Job) -> Figures:
    """Turns of 64 tokens and answers of 48; each prompt is the whole conversation so far."""
    conversation: list[int] = []
    started, ttfts = None, []
    for turn in range(job.sizes.turns):
        known = len(conversation)
        conversation += job.prompt(64, turn)
        stream = job.client.start(completion(conversation, 48, return_tokens=True), keep_body=True)
        job.client.wait_until(lambda stream=stream: stream.is_done)  # type: ignore[misc]  # a bound default
        check(stream, 48, may_reuse=True)
        if stream.final["timings"]["cache_n"] < known - 64:
            raise WrongAnswer(f"turn {turn}: only {stream.final['timings']['cache_n']} of {known} tokens were reused")
        started = started or stream.sent
        ttfts.append(stream.ttft)
        conversation += stream.token_ids()
    assert started is not None
    return {"whole_s": stream.times[-1] - started, "ttft_ms": statistics.median(ttfts[1:]) * 1e3}


WORKLOADS: dict[str, Workload] = {
    "streams_1": decode(1),
    "streams_2": decode(2),
    "streams_4": decode(4),
    "streams_8": decode(8),
    "prefill_512": prefill(512),
    "prefill_long": long_prefill,
    "context": decode_in_context,
    "first_token": first_token,
    "burst": burst,
    "chat": chat,
}
