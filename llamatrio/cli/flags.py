"""llama-server's flags, and the configuration they stand for.

Those that need no effect here are in `accepted`; flags for features that are not there are refused by argparse, by
name.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from llamatrio.config import EngineConfig
from llamatrio.sched.types import SamplingParams
from llamatrio.server.samplers import with_samplers
from llamatrio.server.settings import CorsConfig, ServerConfig

_DEVICES = {"auto": "auto", "cpu": "cpu", "none": "cpu", "cuda": "cuda", "cuda0": "cuda"}
"""Our names by ours and llama-server's."""
_ALL_LAYERS = 1 << 20


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Where the model comes from, and its chat template."""
    add = parser.add_argument
    add("-m", "--model", metavar="FILE", help="GGUF file (default: fetch SmolLM2-135M-Instruct)")
    add("-hf", "-hfr", "--hf-repo", metavar="USER/MODEL[:QUANT]", help="fetch from Hugging Face (default: Q4_K_M)")
    add("-hff", "--hf-file", metavar="FILE", help="this file of the repository")
    add("-hft", "--hf-token", metavar="TOKEN", help="Hugging Face access token")
    add("--offline", action="store_true", help="take what was fetched before; no network")
    add("--chat-template", metavar="JINJA", help="Jinja template, or chatml (default: the model's own)")
    add("--chat-template-file", metavar="FILE", help="file of a Jinja template")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the model, the KV cells and the prompt cache."""
    add = parser.add_argument
    add("-c", "--ctx-size", type=int, default=0, metavar="N", help="tokens of context for all slots (0: the model's)")
    add("-np", "--parallel", type=int, default=-1, metavar="N", help="slots: sequences that run at once (default 4)")
    add("-kvu", "--kv-unified", action=argparse.BooleanOptionalAction, default=None, help="slots share the context")
    add("-no-kvu", dest="kv_unified", action="store_false", help=argparse.SUPPRESS)
    add("-ctk", "--cache-type-k", choices=("f16", "q8_0"), default="f16", help="type of cached keys")
    add("-ctv", "--cache-type-v", choices=("f16", "q8_0"), default="f16", help="type of cached values")
    add("-b", "--batch-size", type=int, default=2048, metavar="N", help="most rows in a step")
    add("-ub", "--ubatch-size", type=int, default=512, metavar="N", help="most prompt rows in a step")
    add("-t", "--threads", type=int, default=0, metavar="N", help="CPU threads (default: all usable cores)")
    add("-ngl", "--gpu-layers", "--n-gpu-layers", type=_layers, default=99, metavar="N", help="layers on the GPU")
    add("-dev", "--device", type=_device, default="auto", metavar="NAME", help="what runs the model: auto, cpu, cuda")
    add("-cram", "--cache-ram", type=int, default=8192, metavar="MIB", help="prompt cache; 0: off, -1: no limit")
    add("--cache-idle-slots", action=argparse.BooleanOptionalAction, default=True, help="save slots that turn idle")
    add("--cache-scope", choices=("key", "all"), default="key", help="who shares cached prompts")
    add(
        "--target-itl", type=float, default=50.0, metavar="MS", help="step time that prompts are cut to, beside streams"
    )
    add("--stream-stall-timeout", type=float, default=60.0, metavar="S", help="when a reader that stalls is given up")
    add("-s", "--seed", type=int, default=-1, metavar="N", help="default seed (-1: a fresh one for each request)")


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
    cors = CorsConfig()
    add("--cors-origins", default="*", metavar="LIST", help="origins browsers may call from")
    add("--cors-methods", default=", ".join(cors.methods), metavar="LIST", help="methods they may use")
    add("--cors-headers", default="*", metavar="LIST", help="headers they may send")
    add("--cors-credentials", action=argparse.BooleanOptionalAction, default=cors.credentials, help="with credentials")


def add_default_flags(parser: argparse.ArgumentParser) -> None:
    """What a request gets that does not say."""
    add = parser.add_argument
    add("-n", "--predict", "--n-predict", type=int, default=-1, metavar="N", help="default n_predict (-1: no limit)")
    add("-r", "--reverse-prompt", action="append", default=[], metavar="TEXT", help="default stop string (repeatable)")
    add("--cache-prompt", action=argparse.BooleanOptionalAction, default=True, help="default cache_prompt")
    add("--chat-template-kwargs", type=_object, default={}, metavar="JSON", help="default variables of the template")
    add("--prefill-assistant", action=argparse.BooleanOptionalAction, default=True, help="continue a last answer")
    add("-rea", "--reasoning", choices=("on", "off", "auto"), default="auto", help="default enable_thinking")
    add("-l", "--logit-bias", type=_bias, action="append", default=[], metavar="ID+X", help="default bias (repeatable)")
    sampling = SamplingParams()
    add("--temp", "--temperature", type=float, default=sampling.temperature, metavar="T", help="default temperature")
    add("--top-k", type=int, default=sampling.top_k, metavar="N", help="default top_k")
    add("--top-p", type=float, default=sampling.top_p, metavar="P", help="default top_p")
    add("--min-p", type=float, default=sampling.min_p, metavar="P", help="default min_p")
    add("--repeat-penalty", type=float, default=sampling.repeat_penalty, metavar="X", help="default repeat_penalty")
    add("--repeat-last-n", type=int, default=sampling.repeat_last_n, metavar="N", help="default repeat_last_n")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="default presence_penalty")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help="default frequency_penalty")
    add("--samplers", metavar="A;B", help="parts of the sampling chain that are on by default")
    add("--sampler-seq", "--sampling-seq", metavar="AB", help="the same by letters, as kpmt")
    add("--ignore-eos", action="store_true", help="default ignore_eos")


def _layers(text: str) -> int:
    return _ALL_LAYERS if text in ("all", "auto") else int(text)


def _device(text: str) -> str:
    if text.lower() not in _DEVICES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_DEVICES)}")
    return _DEVICES[text.lower()]


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _bias(text: str) -> tuple[int, float]:
    """`15043+1` or `15043-1`, as llama-server writes it."""
    found = re.fullmatch(r"(\d+)([+-].+)", text)
    if found is None:
        raise ValueError
    return int(found[1]), float(found[2])


def chat_template(args: argparse.Namespace) -> str | None:
    """The template that was given. Raises OSError when its file cannot be read."""
    given: str | None = args.chat_template
    return given if args.chat_template_file is None else Path(args.chat_template_file).read_text()


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
        chat_template=chat_template(args),
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
        logit_bias=tuple(args.logit_bias),
        ignore_eos=args.ignore_eos,
    )
    if args.samplers is not None or args.sampler_seq is not None:
        sampling = with_samplers(sampling, args.sampler_seq or [name for name in args.samplers.split(";") if name])
    thinking = {} if args.reasoning == "auto" else {"enable_thinking": args.reasoning == "on"}
    return ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=_keys(args.api_key, args.api_key_file),
        ssl_cert_file=args.ssl_cert_file,
        ssl_key_file=args.ssl_key_file,
        alias=args.alias,
        api_prefix=args.api_prefix,
        sampling=sampling,
        max_tokens=args.predict,
        stop=tuple(word for word in args.reverse_prompt if word),
        cache_prompt=args.cache_prompt,
        prefill_assistant=args.prefill_assistant,
        template_variables={**thinking, **args.chat_template_kwargs},
        metrics=args.metrics,
        slots=args.slots,
        sse_ping_interval=args.sse_ping_interval,
        timeout=args.timeout,
        grace=args.grace,
        write_timeout=args.stream_stall_timeout,
        cors=CorsConfig(
            origins=_names(args.cors_origins),
            methods=_names(args.cors_methods),
            headers=() if args.cors_headers == "*" else _names(args.cors_headers),
            credentials=args.cors_credentials,
        ),
    )


def _keys(given: list[str], file: str | None) -> tuple[str, ...]:
    keys = [key for text in given for key in _names(text)]
    if file is not None:
        lines = (line.strip() for line in Path(file).read_text().splitlines())
        keys += [line for line in lines if line and not line.startswith("#")]
    return tuple(keys)


def _names(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
