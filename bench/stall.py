"""Does saving idle sequences stall running streams? The scenario of the bug report, with saves on and off.

    python -m bench.stall -m MODEL [--rounds 3] [--out FILE]      LLAMA_SERVER=path also measures a llama-server

8 slots, one KV pool of 20,480 q8_0 cells. Seven streams with prompts of 1,800 tokens start together. Four end after
120 tokens each; three stream on. When the four have ended, three short requests come, 0.15 s apart. Servers with
saves on and with `--no-cache-idle-slots` are started afresh and alternate; every other round the order is turned round,
since whoever comes first finds the memory that others have left.

The gaps between the tokens of the three streams that run on are taken from one window, the same for every server:
from the first ending of the four (or from when all seven run, if that is later) until the last newcomer has
ended. So it holds every save, whether a server makes it when a sequence ends or when the next request comes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.client import Http1Client, Stream
from bench.common import (
    Figures,
    Prompts,
    completion,
    finish,
    leave_no_garbage_to_collect,
    machine,
    medians,
    model_parser,
    percentile,
    print_table,
    ratio_of_pairs,
)
from bench.servers import Server, llama_server_command, llamatrio_command, running, stop_on_sigterm
from bench.workloads import WrongAnswer, check

FLAGS = ("-ngl", "99", "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0", "-np", "8", "-kvu", "-c", "20480")
APART = 0.15
N_RUN_ON, N_END, N_NEWCOMERS = 3, 4, 3
GOAL = 1.05


@dataclass(frozen=True)
class Scenario:
    """Sizes in tokens."""

    prompt: int = 1800
    end_after: int = 120
    run_on: int = 640
    """Enough to outlast the newcomers; 7 prompts and all output fit into the pool."""
    new_prompt: int = 48
    new_tokens: int = 32


QUICK = Scenario(prompt=600, end_after=48, run_on=400)


@dataclass(frozen=True)
class Mode:
    """A server, with saves on or off."""

    name: str
    command: Sequence[str]
    is_ours: bool
    saves: bool


def modes(model: Path, threads: int, peer: Path | None) -> list[Mode]:
    """What is measured: our server in both modes, then the peer in both, where there is one."""
    flags = (*FLAGS, "-t", str(threads))
    commands = [("llamatrio", llamatrio_command(model, *flags))]
    if peer is not None:
        commands.append(("llama-server", llama_server_command(peer, model, *flags)))
    return [
        Mode(f"{name} {'saves' if saves else 'no saves'}", command + extra, name == "llamatrio", saves)
        for name, command in commands
        for saves, extra in ((True, []), (False, ["--no-cache-idle-slots"]))
    ]


def play(server: Server, prompts: Prompts, scenario: Scenario, salt: object) -> Figures:
    """Plays the scenario once on a fresh server."""
    with Http1Client(server.port) as client:
        warm_up = client.start(completion(prompts.ids(64, "warm-up"), 16))
        client.wait_until(lambda: warm_up.is_done)
        # Those that run on come first in the queue, so that the four end together and not while others still start.
        limits = [scenario.run_on] * N_RUN_ON + [scenario.end_after] * N_END
        bodies = [completion(prompts.ids(scenario.prompt, salt, i), limit) for i, limit in enumerate(limits)]
        streams = [client.start(body) for body in bodies]
        run_on, ending = streams[:N_RUN_ON], streams[N_RUN_ON:]
        client.wait_until(lambda: all(stream.is_done for stream in ending))
        newcomers = []
        for i in range(N_NEWCOMERS):
            client.wait(APART)
            body = completion(prompts.ids(scenario.new_prompt, salt, "new", i), scenario.new_tokens)
            newcomers.append(client.start(body))
        client.wait_until(lambda: all(stream.is_done for stream in newcomers))
        if any(stream.is_done for stream in run_on):
            raise WrongAnswer("the streams that run on ended before the newcomers")
        client.wait_until(lambda: all(stream.is_done for stream in run_on))
    for stream, limit in zip(streams + newcomers, limits + [scenario.new_tokens] * N_NEWCOMERS, strict=True):
        check(stream, limit)
    begin = max(min(s.ended for s in ending), max(s.times[0] for s in streams))
    return figures(run_on, newcomers, begin)


def figures(run_on: Sequence[Stream], newcomers: Sequence[Stream], begin: float) -> Figures:
    """Gaps of the streams that run on, from `begin` to the newcomers' end, and the newcomers' waits."""
    end = max(stream.ended for stream in newcomers)
    gaps = [after - before for s in run_on for before, after in pairwise(s.times) if begin < after <= end]
    return {
        "gap_p50_ms": percentile(gaps, 0.5) * 1e3,
        "gap_p99_ms": percentile(gaps, 0.99) * 1e3,
        "gap_max_ms": max(gaps) * 1e3,
        **{f"ttft_{i}_ms": stream.ttft * 1e3 for i, stream in enumerate(newcomers, 1)},
        "window_s": end - begin,
    }


def check_saves(server: Server, mode: Mode) -> float:
    """How many saves our server made. Raises WrongAnswer when they are not what the mode says."""
    saves = server.metric("llamatrio:cache_saves_total")
    if mode.saves and saves < N_END:
        raise WrongAnswer(f"only {saves:.0f} sequences were saved, so that nothing was measured")
    if not mode.saves and saves:
        raise WrongAnswer(f"{saves:.0f} sequences were saved although saves are off")
    return saves


def measure(
    model: Path, *, rounds: int, threads: int, peer: Path | None, scenario: Scenario, label: str = ""
) -> dict[str, Any]:
    """Rounds of all modes in turn: prints a line for each run, then the table; returns everything."""
    prompts = Prompts(model)
    leave_no_garbage_to_collect()
    runs: dict[str, list[Figures]] = {}
    in_order = modes(model, threads, peer)
    for number in range(rounds):
        for mode in in_order if number % 2 else reversed(in_order):
            with running(mode.name, mode.command) as server:
                found = play(server, prompts, scenario, number)
                if mode.is_ours:
                    found["saves"] = check_saves(server, mode)
            runs.setdefault(mode.name, []).append(found)
            print(f"{label}round {number + 1}: {mode.name:24} largest gap {found['gap_max_ms']:.1f} ms", flush=True)
    result: dict[str, Any] = {"servers": {mode.name: medians(runs[mode.name]) for mode in in_order}, "runs": runs}
    for name in ("llamatrio", "llama-server"):
        if f"{name} saves" in runs:
            with_saves, without = (
                [run["gap_max_ms"] for run in runs[f"{name} {mode}"]] for mode in ("saves", "no saves")
            )
            result[f"{name} gap ratio"] = ratio_of_pairs(with_saves, without)
    return result


def report(result: dict[str, Any]) -> None:
    """The table of medians, and the goal."""
    servers: dict[str, Figures] = result["servers"]
    columns = [name for name in next(iter(servers.values())) if name != "saves"]
    rows = [
        [name, *(found[column] for column in columns), int(found.get("saves", -1))] for name, found in servers.items()
    ]
    print_table(
        ["median of rounds", *columns, "saves"], [[("" if cell == -1 else cell) for cell in row] for row in rows]
    )
    for name in ("llamatrio", "llama-server"):
        if (ratio := result.get(f"{name} gap ratio")) is not None:
            goal = f" (goal {GOAL}: {'met' if ratio <= GOAL else 'missed'})" if name == "llamatrio" else ""
            print(f"{name}: largest gap with saves / without, median of pairs: {ratio:.2f}{goal}")


def main() -> None:
    parser = model_parser(__doc__, n_rounds=3)
    parser.add_argument("--quick", action="store_true", help="shorter prompts: shows that it works, not how well")
    args = parser.parse_args()
    stop_on_sigterm()
    peer = os.environ.get("LLAMA_SERVER")
    about = machine(args.model.name, f"{args.threads} threads")
    print(about, flush=True)
    result = measure(
        args.model,
        rounds=args.rounds,
        threads=args.threads,
        peer=Path(peer) if peer else None,
        scenario=QUICK if args.quick else Scenario(),
    )
    report(result)
    finish({"bench": "stall", "machine": about, "quick": args.quick, **result}, args.out)


if __name__ == "__main__":
    main()
