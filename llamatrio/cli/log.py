"""Where log lines go, how they look, and which are shown."""

from __future__ import annotations

import argparse
import logging
import sys

LEVELS = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
"""By llama-server's verbosity, 0 to 4; above it is as 4."""


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the log."""
    add = parser.add_argument
    add("-v", "--verbose", "--log-verbose", action="store_true", help="log more")
    add(
        "-lv", "--verbosity", "--log-verbosity", type=int, default=3, metavar="N",
        help="0: hardly anything, 1: errors, 2: warnings, 3: as usual, 4: more",
    )  # fmt: skip
    add("--log-file", metavar="FILE", help="log to this file instead")
    add("--log-disable", action="store_true", help="no log")
    add("--log-timestamps", action=argparse.BooleanOptionalAction, default=False, help="lines begin with their time")


def start_log(args: argparse.Namespace) -> None:
    """Sets the log up. Raises OSError where the file cannot be written."""
    line = "%(levelname).1s %(message)s"
    handler = logging.FileHandler(args.log_file) if args.log_file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {line}" if args.log_timestamps else line))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    level = logging.DEBUG if args.verbose else LEVELS[min(max(args.verbosity, 0), 4)]
    logging.getLogger("llamatrio").setLevel(level)
    logging.disable(logging.CRITICAL if args.log_disable else logging.NOTSET)
