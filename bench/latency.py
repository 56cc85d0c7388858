"""What HTTP adds to a token: from the moment the engine hands out a step's tokens until it is in the client's socket.

    python -m bench.latency -m MODEL [--streams 8] [--rounds 5] [--out FILE]

The server runs as a process, with one addition: it notes when each token is handed out, on the clock that all processes
of a machine share. When a token arrived is what the kernel says. The client is on the same cores. A step hands its
tokens out one stream after the other, so the figure of the last stream has the writing of all others in it. The goal:
below 1 ms at p99 with 8 streams.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from bench.client import CLIENTS, Client, Stream
from bench.common import Figures, Prompts, completion, finish, machine, medians, model_parser, percentile, print_table
from bench.servers import running, stop_on_sigterm
from bench.workloads import time_together

GOAL_MS = 1.0
N_PROMPT, N_PREDICT = 64, 256


def serve_and_note(file: Path, command: list[str]) -> None:
    """The server: runs the command line, and at the end writes when each sequence's tokens were handed out."""
    from llamatrio.cli import main as cli
    from llamatrio.engine.decode import Decoder
    from llamatrio.engine.generation import Generation

    handed_out: dict[int, list[float]] = defaultdict(list)
    now = 0.0
    publish, put = Decoder._publish, Generation.put

    def noting_publish(decoder: Decoder) -> None:
        nonlocal now
        now = time.perf_counter()
        publish(decoder)

    def noting_put(generation: Generation, *args: object) -> str | None:
        handed_out[generation.seq.id].append(now)
        return put(generation, *args)  # type: ignore[arg-type]

    Decoder._publish = noting_publish  # type: ignore[method-assign, assignment]
    Generation.put = noting_put  # type: ignore[method-assign, assignment]
    try:
        cli.main(command)
    finally:
        file.write_text(json.dumps([handed_out[id] for id in sorted(handed_out)]))


def stream_all(client: Client, prompts: Prompts, n_streams: int, salt: object) -> list[Stream]:
    """Starts streams one after the other, so that the server numbers them in this order, and reads them to the end."""
    streams: list[Stream] = []
    for i in range(n_streams):
        # return_tokens: a token without text has an event too
        streams.append(client.start(completion(prompts.ids(N_PROMPT, salt, i), N_PREDICT, return_tokens=True)))
        client.wait_until(lambda: streams[-1].first is not None)
    client.wait_until(lambda: all(stream.is_done for stream in streams))
    return streams


def added_ms(streams: list[Stream], handed_out: list[list[float]]) -> Figures:
    """Over all tokens that came while all streams ran."""
    begin, end = time_together(streams)
    found = []
    for stream, noted in zip(streams, handed_out, strict=True):
        times = stream.times[:-1]  # the last event brings no token
        assert len(times) == len(noted) == N_PREDICT
        found += [(came - out) * 1e3 for came, out in zip(times, noted, strict=True) if begin < came <= end]
    return {"p50": statistics.median(found), "p99": percentile(found, 0.99), "largest": max(found)}


def measure(args: argparse.Namespace) -> dict[str, list[Figures]]:
    """For each protocol, the figures of each round."""
    prompts = Prompts(args.model)
    flags = ["-c", "8192", "-np", str(args.streams), "-kvu", "-t", str(args.threads)]
    served = ["serve", "-m", str(args.model), *flags]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "handed_out.json"
        answers: list[tuple[str, list[Stream]]] = []
        with running("llamatrio", [sys.executable, "-m", "bench.latency", "--note", str(file), *served]) as server:
            for number in range(args.rounds + 1):  # the first warms up
                for name, kind in CLIENTS.items():
                    time.sleep(0.3)
                    with kind(server.port) as client:
                        answers.append((name, stream_all(client, prompts, args.streams, (number, name))))
        noted = json.loads(file.read_text())
    found: dict[str, list[Figures]] = defaultdict(list)
    for i, (name, streams) in enumerate(answers):
        if i >= len(CLIENTS):
            found[name].append(added_ms(streams, noted[i * args.streams : (i + 1) * args.streams]))
    return found


def main() -> None:
    if sys.argv[1:2] == ["--note"]:
        serve_and_note(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = model_parser(__doc__, n_rounds=5)
    parser.add_argument("--streams", type=int, default=8)
    args = parser.parse_args()
    stop_on_sigterm()
    about = machine(args.model.name, f"{args.threads} threads", f"{args.streams} streams")
    print(about, flush=True)
    found = {name: medians(rounds) for name, rounds in measure(args).items()}
    print_table(["added ms per token", "p50", "p99", "largest"], [[name, *of.values()] for name, of in found.items()])
    for name, figures in found.items():
        verdict = "met" if figures["p99"] < GOAL_MS else "missed"
        print(f"{name}: p99 {figures['p99']:.2f} ms (goal {GOAL_MS} ms: {verdict})")
    finish({"bench": "latency", "machine": about, "added_ms": found}, args.out)


if __name__ == "__main__":
    main()
