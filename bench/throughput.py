"""Tokens/s through the engine in this process, and through HTTP: over HTTP/1.1, and over one HTTP/2 connection.

    python -m bench.throughput -m MODEL [--rounds 3] [--quick] [--out FILE]

1, 2, 4 and 8 streams of 128 tokens after prompts of 64, and a prompt of 512. The ways alternate within each round. A
rate is that of the time in which all streams run. The goal: HTTP at 8 streams within 5 % of the engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import trio

from bench.client import CLIENTS, Stream
from bench.common import (
    Figures,
    Prompts,
    completion,
    finish,
    machine,
    medians,
    model_parser,
    print_table,
    ratio_of_pairs,
)
from bench.servers import llamatrio_command, running, stop_on_sigterm
from bench.workloads import PROMPT, check, rates
from llamatrio.cli.main import SWITCH_INTERVAL
from llamatrio.config import EngineConfig
from llamatrio.engine.engine import Engine, open_engine
from llamatrio.engine.events import Finished
from llamatrio.server.results import timings

N_SLOTS, N_CTX = 8, 8192
GOAL = 0.95
ENGINE, PROTOCOLS = "engine", tuple(CLIENTS)
WAYS = (ENGINE, *PROTOCOLS)

Body = dict[str, Any]


class Work(NamedTuple):
    """Streams that start together."""

    n_streams: int
    n_prompt: int
    n_predict: int

    @property
    def name(self) -> str:
        return f"streams_{self.n_streams}" if self.n_predict > 1 else f"prefill_{self.n_prompt}"

    def bodies(self, prompts: Prompts, salt: object) -> list[Body]:
        """Requests; their prompts share nothing with those of another salt."""
        ids = (prompts.ids(self.n_prompt, salt, self.name, i) for i in range(self.n_streams))
        return [completion(prompt, self.n_predict) for prompt in ids]

    def figure(self, streams: Sequence[Stream]) -> float:
        """Tokens per second."""
        for stream in streams:
            check(stream, self.n_predict)
        return rates(streams)["decode"] if self.n_predict > 1 else self.n_prompt / streams[0].ttft


class EngineStream(Stream):
    """What a reader of the engine sees, as if it were an answer of the server."""

    def __init__(self) -> None:
        super().__init__(keep_body=False)
        self._final: Body = {}

    @property
    def final(self) -> Body:
        return self._final

    async def read(self, engine: Engine, body: Body) -> None:
        """Runs a request to its end."""
        options = {name: body[name] for name in ("temperature", "ignore_eos")}
        request = engine.request(body["prompt"], max_tokens=body["n_predict"], **options)
        with engine.start(request) as generation:
            async for event in generation:
                self.times.append(time.perf_counter())
                if isinstance(event, Finished):
                    self._final = {"timings": timings(event)}


async def through_engine(engine: Engine, bodies: Sequence[Body]) -> list[Stream]:
    """Runs all requests at once in this process."""
    streams = [EngineStream() for _ in bodies]
    async with trio.open_nursery() as nursery:
        for stream, body in zip(streams, bodies, strict=True):
            nursery.start_soon(stream.read, engine, body)
    return list(streams)


def through_http(protocol: str, port: int, bodies: Sequence[Body]) -> list[Stream]:
    """Runs all requests at once on the server. Blocks: the engine of this process has nothing to do meanwhile."""
    with CLIENTS[protocol](port) as client:
        streams = [client.start(body) for body in bodies]
        client.wait_until(lambda: all(stream.is_done for stream in streams))
    return streams


SETTLE_S = 0.3
"""Before each run: both servers save what ended in the run before, and that is not what is measured here."""


async def measure(args: argparse.Namespace, works: Sequence[Work]) -> list[dict[str, Figures]]:
    """For each round, for each way, tokens/s of each work."""
    config = EngineConfig(n_ctx=N_CTX, n_parallel=N_SLOTS, n_threads=args.threads)
    flags = ("-c", str(N_CTX), "-np", str(N_SLOTS), "-kvu", "-t", str(args.threads))
    prompts = Prompts(args.model)
    rounds: list[dict[str, Figures]] = []
    with running("llamatrio", llamatrio_command(args.model, *flags)) as server:
        async with open_engine(args.model, config) as engine:

            async def run(way: str, bodies: Sequence[Body]) -> list[Stream]:
                if way == ENGINE:
                    return await through_engine(engine, bodies)
                return through_http(way, server.port, bodies)

            for way in WAYS:
                await run(way, Work(N_SLOTS, PROMPT, 16).bodies(prompts, ("warm-up", way)))
            for number in range(args.rounds):
                found: dict[str, Figures] = {way: {} for way in WAYS}
                for work in works:
                    for way in WAYS:
                        await trio.sleep(SETTLE_S)
                        streams = await run(way, work.bodies(prompts, (number, way)))
                        found[way][work.name] = work.figure(streams)
                rounds.append(found)
                print(f"round {number + 1} of {args.rounds} done", flush=True)
    return rounds


def main() -> None:
    parser = model_parser(__doc__, n_rounds=5)
    parser.add_argument("--quick", action="store_true", help="fewer tokens: shows that it works, not how well")
    args = parser.parse_args()
    stop_on_sigterm()
    about = machine(args.model.name, f"{args.threads} threads")
    print(about, flush=True)
    works = [Work(n, PROMPT, 32 if args.quick else 128) for n in (1, 2, 4, 8)] + [Work(1, 512, 1)]
    sys.setswitchinterval(SWITCH_INTERVAL)  # as the server does
    rounds = trio.run(measure, args, works)
    found = {way: medians([one[way] for one in rounds]) for way in WAYS}
    shares = {
        way: {w.name: ratio_of_pairs(*([one[x][w.name] for one in rounds] for x in (way, ENGINE))) for w in works}
        for way in PROTOCOLS
    }
    rows = [[w.name, *(found[way][w.name] for way in WAYS), *(shares[way][w.name] for way in PROTOCOLS)] for w in works]
    print_table(["tokens/s", *WAYS, *(f"{way} / engine" for way in PROTOCOLS)], rows)
    for way in PROTOCOLS:
        share = shares[way]["streams_8"]
        print(
            f"{way} at 8 streams: {share:.1%} of the engine (goal {GOAL:.0%}: {'met' if share >= GOAL else 'missed'})"
        )
    finish({"bench": "throughput", "machine": about, "quick": args.quick, **found, "shares": shares}, args.out)


if __name__ == "__main__":
    main()
