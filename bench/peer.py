"""Beside a llama-server: both as processes, on the same files, threads, context, prompts and client, in turns.

    python -m bench.peer LLAMA_SERVER -m MODEL [-m MODEL ...] [--only NAME ...] [--rounds 3] [--quick] [--out FILE]

Four servers run per model: llama-server and llamatrio, each with f16 and with q8_0 KV. In each round each workload
goes to all four, one after the other. A ratio is ours / theirs of one round, against the better of llama-server's two;
the table has the medians. Rates should be above the goal, times (`_ms`, `_s`) below.

Our server runs as it is by default, with saves of idle sequences. The llama-server runs without its prompt cache
(`--cache-ram 0`), whose saves block it and whose leftovers slow its attention, and its slots are emptied after each
workload: it is measured at its best. What saves do to it is the stall scenario's business, run here last.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench import stall
from bench.client import Http1Client
from bench.common import Figures, Prompts, finish, leave_no_garbage_to_collect, machine, print_table
from bench.servers import Server, llama_server_command, llamatrio_command, running, stop_on_sigterm
from bench.workloads import QUICK, WORKLOADS, Job, Sizes
from llamatrio.backends.cpu.levels import current_level

N_SLOTS = 8
FLAGS = ("-np", str(N_SLOTS), "-kvu", "-c", "20480", "-fa", "on")
KV_TYPES = ("f16", "q8_0")
OURS, THEIRS = "llamatrio", "llama-server"
GOALS = {
    "streams_1.decode": 2.0,
    "streams_2.decode": 2.5,
    "streams_4.decode": 2.5,
    "streams_8.decode": 2.5,
    "context.decode": 2.5,
    "prefill_512.prefill": 3.0,
    "prefill_long.prefill": 3.0,
    "first_token.beside_ms": 0.5,
}
"""Meant for a processor with AMX, and held up to every one with AVX-512. With AVX2 alone: not slower than theirs."""
STALL = "stall"


class Contender(NamedTuple):
    """A server and its KV type."""

    server: Server
    kv_type: str

    @property
    def is_ours(self) -> bool:
        return self.server.name == OURS

    @property
    def label(self) -> str:
        return f"{self.server.name} {self.kv_type}"


@contextmanager
def contenders(binary: Path, model: Path, threads: int) -> Iterator[list[Contender]]:
    """All four servers; one that waits for work costs nothing."""
    with ExitStack() as stack:
        started = []
        for kv_type in KV_TYPES:
            flags = (*FLAGS, "-t", str(threads), "-ctk", kv_type, "-ctv", kv_type)
            theirs = llama_server_command(binary, model, *flags, "--cache-ram", "0")
            for name, command in ((THEIRS, theirs), (OURS, llamatrio_command(model, *flags))):
                started.append(Contender(stack.enter_context(running(name, command)), kv_type))
        yield started


Runs = dict[str, dict[str, list[float]]]
"""Figure ("workload.name") -> server's label -> its value in each round."""


def measure(model: Path, binary: Path, names: Sequence[str], rounds: int, threads: int, sizes: Sizes) -> Runs:
    """Rounds of all workloads on all servers, after a first one that is thrown away."""
    prompts = Prompts(model)
    leave_no_garbage_to_collect()
    runs: Runs = {}
    with contenders(binary, model, threads) as all_contenders:
        for contender in all_contenders:
            _play("streams_8", contender, prompts, ("warm-up",), QUICK)
        for number in range(rounds):
            for name in names:
                for contender in all_contenders:
                    found = _play(name, contender, prompts, (name, number), sizes)
                    print(f"{model.stem} round {number + 1} {name:13} {contender.label:18} {_brief(found)}", flush=True)
                    for figure, value in found.items():
                        runs.setdefault(f"{name}.{figure}", {}).setdefault(contender.label, []).append(value)
    return runs


def _play(name: str, contender: Contender, prompts: Prompts, salt: tuple[object, ...], sizes: Sizes) -> Figures:
    with Http1Client(contender.server.port) as client:
        found = WORKLOADS[name](Job(client, prompts, salt, sizes))
    if not contender.is_ours:
        contender.server.forget_prompts(N_SLOTS)
    return found


def _brief(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in figures.items())


def is_time(figure: str) -> bool:
    """Whether less is better."""
    return figure.endswith(("_ms", "_s"))


def ratios(runs: Runs) -> dict[str, dict[str, float]]:
    """Figure -> our KV type -> median over rounds of ours / the better of theirs."""
    found: dict[str, dict[str, float]] = {}
    for figure, by_server in runs.items():
        better = min if is_time(figure) else max
        theirs = [better(pair) for pair in zip(*(by_server[f"{THEIRS} {kv}"] for kv in KV_TYPES), strict=True)]
        found[figure] = {
            kv: statistics.median(a / b for a, b in zip(by_server[f"{OURS} {kv}"], theirs, strict=True))
            for kv in KV_TYPES
        }
    return found


def report(runs: Runs) -> None:
    """Medians of all servers, and the ratios beside the goals."""
    labels = [f"{name} {kv}" for name in (THEIRS, OURS) for kv in KV_TYPES]
    rows = []
    goals = GOALS if current_level().name.startswith(("avx512", "amx")) else dict.fromkeys(GOALS, 1.0)
    for figure, by_type in ratios(runs).items():
        goal = goals.get(figure)
        verdict = (
            "" if goal is None else f"{'<=' if is_time(figure) else '>='} {goal}: {_verdict(figure, by_type, goal)}"
        )
        medians = [statistics.median(runs[figure][label]) for label in labels]
        rows.append([figure, *medians, *by_type.values(), verdict])
    print_table(["tokens/s, or time", *labels, *(f"ratio {kv}" for kv in KV_TYPES), "goal"], rows)


def _verdict(figure: str, by_type: dict[str, float], goal: float) -> str:
    met = [kv for kv, ratio in by_type.items() if (ratio <= goal if is_time(figure) else ratio >= goal)]
    return {0: "missed", len(KV_TYPES): "met"}.get(len(met), f"met by {', '.join(met)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_server", type=Path, metavar="LLAMA_SERVER", help="path of a llama-server")
    parser.add_argument("-m", "--model", type=Path, action="append", required=True)
    parser.add_argument("--only", choices=[*WORKLOADS, STALL], action="append", help="run this workload (repeatable)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="less work each: shows that it works, not how well")
    parser.add_argument("--out", type=Path, help="write the JSON line here too")
    args = parser.parse_args()
    stop_on_sigterm()
    about = machine(f"{args.threads} threads", _version(args.llama_server))
    print(about, flush=True)
    models = {model.stem: _measure_model(args, model) for model in args.model}
    finish({"bench": "peer", "machine": about, "quick": args.quick, "rounds": args.rounds, "models": models}, args.out)


def _measure_model(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    names = args.only or [*WORKLOADS, STALL]
    found: dict[str, Any] = {}
    if workloads := [name for name in names if name != STALL]:
        sizes = QUICK if args.quick else Sizes()
        runs = measure(model, args.llama_server, workloads, args.rounds, args.threads, sizes)
        report(runs)
        found |= {"ratios": ratios(runs), "runs": runs}
    if STALL in names:
        found[STALL] = stall.measure(
            model,
            rounds=args.rounds,
            threads=args.threads,
            peer=args.llama_server,
            scenario=stall.QUICK if args.quick else stall.Scenario(),
            label=f"{model.stem} stall ",
        )
        stall.report(found[STALL])
    return found


def _version(binary: Path) -> str:
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return "llama-server " + " ".join((done.stderr + done.stdout).split("\n")[0].split()[1:])


if __name__ == "__main__":
    main()
