"""The command line: `llamatrio serve | run | info`, with llama-server's flags and meanings.

llamatrio serve -m model.gguf -c 20480 -np 8 -kvu -ctk q8_0 -ctv q8_0
llamatrio run "Why is the sky blue?"
llamatrio info model.gguf
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from llamatrio import config
from llamatrio.cli.accepted import add_accepted_flags
from llamatrio.cli.environment import take_defaults
from llamatrio.cli.flags import (
    add_default_flags,
    add_engine_flags,
    add_model_flags,
    add_server_flags,
    engine_config,
    server_config,
)
from llamatrio.cli.log import add_log_flags, start_log
from llamatrio.errors import LlamatrioError
from llamatrio.version import __version__

if TYPE_CHECKING:
    from llamatrio.engine.engine import Engine

SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread that wants the GIL gets it. Python's 5 ms are as long as a whole step of a small model,
and the device's thread needs the GIL for moments between steps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    try:
        args = _parser(config.environment()).parse_args(argv)
        start_log(args)
        command: Callable[[argparse.Namespace], None] = args.command
        command(args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report(error)
    return 0


def _report(error: Exception) -> int:
    """One line for what a user can mend; anything else is a bug and shows its traceback."""
    if not isinstance(error, LlamatrioError | OSError | ValueError):
        raise error
    print(f"llamatrio: error: {error}", file=sys.stderr)
    return 1


def _parser(environment: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llamatrio", description="An LLM server for GGUF models.")
    parser.add_argument("--version", action="version", version=f"llamatrio {__version__}")
    commands = parser.add_subparsers(required=True, metavar="serve | run | info")
    serve = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    for add_flags in (add_model_flags, add_engine_flags, add_server_flags, add_default_flags, add_log_flags):
        add_flags(serve)
    add_accepted_flags(serve)
    serve.add_argument("--version", action="version", version=f"llamatrio {__version__}")
    take_defaults(serve, environment or {})
    serve.set_defaults(command=_serve)
    run = commands.add_parser("run", help="stream one answer to the terminal", allow_abbrev=False)
    run.add_argument("prompt", help="the user's message")
    run.add_argument("--system", help="the system message")
    run.add_argument("-n", "--predict", type=int, default=-1, metavar="N", help="most tokens to make")
    run.add_argument("--temp", type=float, default=None, metavar="T", help="temperature; 0 is greedy")
    for add_flags in (add_model_flags, add_engine_flags, add_log_flags, add_accepted_flags):
        add_flags(run)
    run.set_defaults(command=_run)
    info = commands.add_parser("info", help="print what a file holds and the memory it needs", allow_abbrev=False)
    info.add_argument("file", help="a GGUF file")
    info.add_argument("-c", "--ctx-size", type=int, default=0, metavar="N", help="context in tokens")
    add_log_flags(info)
    info.set_defaults(command=_info)
    return parser


def _model_path(args: argparse.Namespace) -> Path:
    from llamatrio.model.hub import resolve_model
    from llamatrio.model.hugging_face import fetch_from_hugging_face

    if args.model is None and args.hf_repo is not None:
        return fetch_from_hugging_face(args.hf_repo, args.hf_file, token=args.hf_token, offline=args.offline)
    return resolve_model(args.model)


def _serve(args: argparse.Namespace) -> None:
    from llamatrio.engine.engine import open_engine
    from llamatrio.server.loading import serve_while_loading
    from llamatrio.server.serve import until_signalled

    engine, settings = engine_config(args), server_config(args)
    path = _model_path(args)

    async def serve(shutdown: trio.Event) -> None:
        await serve_while_loading(_settled(open_engine(path, engine)), settings, shutdown)

    sys.setswitchinterval(SWITCH_INTERVAL)
    trio.run(until_signalled, serve)


@asynccontextmanager
async def _settled(opening: AbstractAsyncContextManager[Engine]) -> AsyncIterator[Engine]:
    """What is there once the engine is open stays: the garbage collector need not look through all of it, the compiler
    included, ever again. That took it 50 ms a time, and nothing was sent meanwhile."""
    async with opening as engine:
        gc.collect()
        gc.freeze()
        yield engine


def _run(args: argparse.Namespace) -> None:
    from llamatrio.engine.engine import open_engine
    from llamatrio.model.chat import encode_chat

    if not args.verbose:
        logging.getLogger("llamatrio").setLevel(logging.WARNING)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": args.prompt})

    async def run() -> None:
        async with open_engine(_model_path(args), engine_config(args)) as engine:
            prompt = encode_chat(engine.model.chat_template, engine.model.tokenizer, messages)
            options = {} if args.temp is None else {"temperature": args.temp}
            async for piece in engine.generate(prompt, max_tokens=args.predict, **options):
                print(piece, end="", flush=True)
        print()

    trio.run(run)


def _info(args: argparse.Namespace) -> None:
    from llamatrio.info import describe
    from llamatrio.model.model import open_model

    with open_model(Path(args.file)) as model:
        print(describe(model, n_ctx=args.ctx_size, list_tensors=args.verbose))
