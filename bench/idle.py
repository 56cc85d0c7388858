"""What the server costs while nobody asks anything, and how long it takes to start.

    python -m bench.idle -m MODEL [--seconds 10] [--rounds 3] [--out FILE]

The first start fills the caches on disk and is not counted; then each round starts the server, has it answer four
streams, leaves one connection open, and reads its CPU time over idle seconds.
"""

from __future__ import annotations

import socket
import time

from bench.client import Http1Client
from bench.common import Figures, Prompts, completion, finish, machine, medians, model_parser, print_table
from bench.servers import Server, llamatrio_command, running, stop_on_sigterm

SETTLE = 3.0
"""Seconds after the last answer, in which saves, and the asking for pages ahead, may still be under way."""
IDLE_GOAL_MS, START_GOAL_S = 50.0, 3.0


def idle_cpu_ms(server: Server, prompts: Prompts, seconds: float) -> float:
    """Milliseconds of CPU time in idle seconds after some work."""
    with Http1Client(server.port) as client:
        streams = [client.start(completion(prompts.ids(64, i), 32)) for i in range(4)]
        client.wait_until(lambda: all(stream.is_done for stream in streams))
    with socket.create_connection(("127.0.0.1", server.port)):
        time.sleep(SETTLE)
        before = server.cpu_seconds()
        time.sleep(seconds)
        return (server.cpu_seconds() - before) * 1e3


def main() -> None:
    parser = model_parser(__doc__, n_rounds=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    stop_on_sigterm()
    about = machine(args.model.name, f"{args.threads} threads")
    print(about, flush=True)
    prompts = Prompts(args.model)
    command = llamatrio_command(args.model, "-np", "8", "-t", str(args.threads))
    with running("llamatrio", command) as server:
        first_start = server.start_seconds
    runs: list[Figures] = []
    for _ in range(args.rounds):
        with running("llamatrio", command) as server:
            runs.append({"start_s": server.start_seconds, "idle_ms": idle_cpu_ms(server, prompts, args.seconds)})
    found = medians(runs)
    print_table(
        ["median of rounds", "measured", "goal"],
        [
            ["start until /health is 200, s", found["start_s"], f"< {START_GOAL_S}"],
            [f"CPU time in {args.seconds:g} idle seconds, ms", found["idle_ms"], f"< {IDLE_GOAL_MS}"],
        ],
    )
    finish({"bench": "idle", "machine": about, "first_start_s": first_start, **found, "runs": runs}, args.out)


if __name__ == "__main__":
    main()
