"""llama-server's flags, and the configuration they stand for.

Flags of llama-server that name something llamatrio does by itself (or does not need) are accepted, so that a command
line works as it is; flags for features that are not there are refused by argparse, by name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llamatrio.config import EngineConfig
from llamatrio.sched.types import SamplingParams
from llamatrio.server.settings import CorsConfig, ServerConfig

_NO_EFFECT = {
    "-fa --flash-attn": "attention never builds the whole score matrix",
    "-cb --cont-batching": "batching is always continuous",
    "-nocb --no-cont-batching": "batching is always continuous",
    "--jinja": "templates are always rendered by Jinja",
    "--mlock": "weights are copied into memory of their own",
    "--no-mmap": "weights are copied into memory of their own",
    "--mmap": "weights are copied into memory of their own",
    "--no-webui": "there is no page yet",
    "--threads-http": "one event loop serves all connections",
    "-tb --threads-batch": "prompts use the same threads",
    "-sps --slot-prompt-similarity": "the longest cached prefix is always used",
    "--cache-prompt": "prompts are cached unless a request says otherwise",
    "--log-colors": "the log has no colours",
}
"""Flags that are accepted and change nothing, with the reason."""
_WITH_VALUE = {"--flash-attn", "--threads-http", "--threads-batch", "--slot-prompt-similarity", "--log-colors"}


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    """-m and -v, which every command has."""
    parser.add_argument("-m", "--model", metavar="FILE", help="GGUF file (default: fetch SmolLM2-135M-Instruct)")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the model, the KV cells and the prompt cache."""
    add = parser.add_argument
    add("-c", "--ctx-size", type=int, default=0, metavar="N", help="tokens of context for all slots (0: the model's)")
    add("-np", "--parallel", type=int, default=-1, metavar="N", help="slots: sequences that run at once (default 4)")
    add("-kvu", "--kv-unified", action=argparse.BooleanOptionalAction, default=None, help="slots share the context")
    add("-ctk", "--cache-type-k", choices=("f16", "q8_0"), default="f16", help="type of cached keys")
    add("-ctv", "--cache-type-v", choices=("f16", "q8_0"), default="f16", help="type of cached values")
    add("-b", "--batch-size", type=int, default=2048, metavar="N", help="most rows in a step")
    add("-ub", "--ubatch-size", type=int, default=512, metavar="N", help="most prompt rows in a step")
    add("-t", "--threads", type=int, default=0, metavar="N", help="CPU threads (default: all usable cores)")
    add("-ngl", "--gpu-layers", "--n-gpu-layers", type=int, default=99, metavar="N", help="layers on the GPU")
    add("-dev", "--device", choices=("auto", "cpu", "cuda"), default="auto", help="what runs the model")
    add("-cram", "--cache-ram", type=int, default=8192, metavar="MIB", help="prompt cache; 0: off, -1: no limit")
    add("--cache-idle-slots", action=argparse.BooleanOptionalAction, default=True, help="save slots that turn idle")
    add("--cache-scope", choices=("key", "all"), default="key", help="who shares cached prompts")
    add(
        "--target-itl", type=float, default=50.0, metavar="MS", help="step time that prompts are cut to, beside streams"
    )
    add("--stream-stall-timeout", type=float, default=60.0, metavar="S", help="when a reader that stalls is given up")
    add("-s", "--seed", type=int, default=-1, metavar="N", help="default seed (-1: a fresh one for each request)")
    for names, why in _NO_EFFECT.items():
        flags = names.split()
        if flags[-1] in _WITH_VALUE:
            add(*flags, nargs="?", metavar="X", help=f"accepted: {why}")
        else:
            add(*flags, action="store_true", help=f"accepted: {why}")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the HTTP side."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8080, help="port to listen on; 0: any free one")
    add("-a", "--alias", metavar="NAME", help="the model's name in answers")
    add("--api-key", action="append", default=[], metavar="KEY", help="a key that clients need (also: KEY,KEY)")
    add("--api-key-file", metavar="FILE", help="keys, one a line")
    add("--api-prefix", default="", metavar="PATH", help="path before all routes")
    add("--ssl-key-file", metavar="FILE", help="TLS key (PEM)")
    add("--ssl-cert-file", metavar="FILE", help="TLS certificate (PEM)")
    add("--metrics", action="store_true", help="offer /metrics")
    add("--slots", action=argparse.BooleanOptionalAction, default=True, help="offer /slots")
    add("--sse-ping-interval", type=float, default=30.0, metavar="S", help="comment on silent streams; 0: none")
    add("-to", "--timeout", type=float, default=3600.0, metavar="S", help="time for a request's body to arrive")
    add("--grace", type=float, default=30.0, metavar="S", help="time for streams to end after SIGTERM")
    add("--cors-origins", default="*", metavar="LIST", help="origins browsers may call from")
    sampling = SamplingParams()
    add("--temp", type=float, default=sampling.temperature, metavar="T", help="default temperature")
    add("--top-k", type=int, default=sampling.top_k, metavar="N", help="default top_k")
    add("--top-p", type=float, default=sampling.top_p, metavar="P", help="default top_p")
    add("--min-p", type=float, default=sampling.min_p, metavar="P", help="default min_p")
    add("--repeat-penalty", type=float, default=sampling.repeat_penalty, metavar="X", help="default repeat_penalty")
    add("--repeat-last-n", type=int, default=sampling.repeat_last_n, metavar="N", help="default repeat_last_n")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="default presence_penalty")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help="default frequency_penalty")
    add("--ignore-eos", action="store_true", help="default ignore_eos")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's configuration. As in llama-server, slots share the context unless their number is given."""
    is_auto = args.parallel < 1
    return EngineConfig(
        n_ctx=args.ctx_size,
        n_parallel=4 if is_auto else args.parallel,
        kv_unified=is_auto if args.kv_unified is None else args.kv_unified,
        type_k=args.cache_type_k,
        type_v=args.cache_type_v,
        n_batch=args.batch_size,
        n_ubatch=args.ubatch_size,
        n_threads=max(args.threads, 0),
        device=args.device,
        n_gpu_layers=args.gpu_layers,
        cache_ram_mib=args.cache_ram,
        cache_idle_slots=args.cache_idle_slots,
        cache_scope=args.cache_scope,
        target_itl_ms=args.target_itl,
        stream_stall_timeout=args.stream_stall_timeout,
        seed=None if args.seed < 0 else args.seed,
    )


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The HTTP side's configuration. Raises OSError when the key file cannot be read."""
    sampling = SamplingParams(
        temperature=args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repeat_penalty=args.repeat_penalty,
        repeat_last_n=args.repeat_last_n,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        ignore_eos=args.ignore_eos,
    )
    return ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=_keys(args.api_key, args.api_key_file),
        ssl_cert_file=args.ssl_cert_file,
        ssl_key_file=args.ssl_key_file,
        alias=args.alias,
        api_prefix=args.api_prefix,
        sampling=sampling,
        metrics=args.metrics,
        slots=args.slots,
        sse_ping_interval=args.sse_ping_interval,
        timeout=args.timeout,
        grace=args.grace,
        write_timeout=args.stream_stall_timeout,
        cors=CorsConfig(origins=tuple(args.cors_origins.split(","))),
    )


def _keys(given: list[str], file: str | None) -> tuple[str, ...]:
    keys = [key.strip() for text in given for key in text.split(",")]
    if file is not None:
        keys += [line.strip() for line in Path(file).read_text().splitlines()]
    return tuple(key for key in keys if key)
