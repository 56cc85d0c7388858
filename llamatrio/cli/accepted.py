"""llama-server's flags that name what llamatrio does by itself, or has no use for: accepted, without effect.

So a command line works as it is. A flag belongs here only where leaving it out changes nothing that its user would
miss; what would change answers, and is not offered, is refused by name. Where only some values ask for nothing, only
those are accepted.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple


class Accepted(NamedTuple):
    """Flags of one meaning. `values`: "" takes none, "X" one, "[X]" one or none, a tuple one of these."""

    flags: str
    values: str | tuple[str, ...]
    why: str


ACCEPTED = (
    Accepted("-fa --flash-attn", "[X]", "attention never builds the whole score matrix"),
    Accepted("-cb --cont-batching", "", "batching is always continuous"),
    Accepted("-nocb --no-cont-batching", "", "batching is always continuous"),
    Accepted("-tb --threads-batch", "X", "prompts use the same threads"),
    Accepted("--threads-http", "X", "one event loop serves all connections"),
    Accepted("--poll --poll-batch", "X", "threads sleep when nothing runs"),
    Accepted("--prio --prio-batch", "X", "the process keeps the priority it was given"),
    Accepted("--cpu-strict --cpu-strict-batch", "X", "threads are pinned to the cores of the process"),
    Accepted("--numa", "X", "weights lie where the threads that read them run"),
    Accepted("--mlock --mmap --no-mmap -dio --direct-io", "", "weights are copied into memory of their own"),
    Accepted("-lm --load-mode", "X", "weights are copied into memory of their own"),
    Accepted("--repack -nr --no-repack --no-host", "", "weights are always repacked for the device"),
    Accepted("-kvo --kv-offload -nkvo --no-kv-offload", "", "cells lie where the model runs"),
    Accepted("--op-offload --no-op-offload", "", "one device runs the model"),
    Accepted("-sm --split-mode", "X", "one device runs the model"),
    Accepted("-mg --main-gpu", ("0",), "the first GPU is the one used"),
    Accepted("-fit --fit", "[X]", "the context is what -c says"),
    Accepted("-fitt --fit-target", "X", "the context is what -c says"),
    Accepted("-fitc --fit-ctx", "X", "the context is what -c says"),
    Accepted("--swa-full", "", "layers with a window keep all cells"),
    Accepted("-dt --defrag-thold", "X", "cells need no defragmentation"),
    Accepted("--keep", "X", "the context is never shifted"),
    Accepted("--no-context-shift", "", "the context is never shifted"),
    Accepted("--cache-reuse", "X", "the longest cached prefix is always used"),
    Accepted("-sps --slot-prompt-similarity", "X", "the longest cached prefix is always used"),
    Accepted("-ctxcp --ctx-checkpoints --swa-checkpoints", "X", "a prefix can be cut at any token"),
    Accepted("-cms --checkpoint-min-step", "X", "a prefix can be cut at any token"),
    Accepted("--warmup --no-warmup", "", "kernels are compiled before the first request"),
    Accepted("--perf --no-perf", "", "timings are always taken"),
    Accepted("-e --escape --no-escape", "", "prompts come as they are"),
    Accepted("--jinja --no-jinja", "", "templates are always rendered by Jinja"),
    Accepted("--skip-chat-parsing", "", "what the model writes is the content"),
    Accepted("--reasoning-format", ("none",), "what the model writes is the content"),
    Accepted("--no-mmproj --mmproj-auto --no-mmproj-auto --mmproj-offload --no-mmproj-offload", "", "no images"),
    Accepted("--spec-type", ("none",), "there is no speculative decoding"),
    Accepted("--sleep-idle-seconds", ("-1",), "the server never sleeps"),
    Accepted("--props", "", "nothing in /props can be changed"),
    Accepted("--tags", "X", "they are for information"),
    Accepted("--webui --no-webui --ui --no-ui", "", "there is no page yet"),
    Accepted("--log-colors", "[X]", "the log has no colours"),
    Accepted("--log-prefix --no-log-prefix", "", "lines begin with their level"),
)

ACCEPTED_VARIABLES = frozenset(
    "LLAMA_ARG_" + name
    for name in (
        "FLASH_ATTN", "CONT_BATCHING", "THREADS_HTTP", "NUMA", "LOAD_MODE", "REPACK", "NO_HOST", "KV_OFFLOAD",
        "SPLIT_MODE", "FIT", "FIT_TARGET", "FIT_CTX", "SWA_FULL", "DEFRAG_THOLD", "CACHE_REUSE", "CTX_CHECKPOINTS",
        "CHECKPOINT_MIN_SPACING_NT", "PERF", "JINJA", "SKIP_CHAT_PARSING", "MMPROJ_AUTO", "MMPROJ_OFFLOAD",
        "ENDPOINT_PROPS", "TAGS", "UI", "LOG_COLORS", "LOG_PREFIX",
    )
)  # fmt: skip
"""The environment variables of these flags."""


def add_accepted_flags(parser: argparse.ArgumentParser) -> None:
    """All of them; none leaves a trace in what is parsed."""
    group = parser.add_argument_group("accepted, without effect")
    for flags, values, why in ACCEPTED:
        add, names = group.add_argument, flags.split()
        if values == "":
            add(*names, action="store_true", dest=argparse.SUPPRESS, help=why)
        elif isinstance(values, tuple):
            add(*names, choices=values, dest=argparse.SUPPRESS, help=why)
        else:
            add(*names, nargs="?" if values == "[X]" else None, metavar="X", dest=argparse.SUPPRESS, help=why)
