"""What every benchmark needs beside its servers: prompts, the machine, tables and the closing line of JSON."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import random
import statistics
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llamatrio import config
from llamatrio.backends.cpu.levels import current_level
from llamatrio.model.model import open_model

Figures = dict[str, float]
"""Measured figures by name."""

# Plain words, so that a model answers in plain words: an answer of half characters would come in fewer events.
_WORDS = """
the a river stone morning letter window garden light road people water house story winter summer small old new
green city train paper music teacher doctor market bridge forest mountain village island ship captain farmer
bread table chair door night day hour year friend brother sister mother father child school book page line color
sound voice hand heart mind dream hope work plan reason question answer number problem country king walked
opened found carried wrote read built crossed followed waited remembered and but because while when before after
under over between against through of to in with from about very slowly quickly often never
"""


class Prompts:
    """Prompts as token ids: exact in length, the same in every run, and without a common prefix.

    Different salts give different prompts; at most the first token (BOS) is shared.
    """

    def __init__(self, model: Path) -> None:
        with open_model(model) as opened:
            self._tokenizer = opened.tokenizer

    def ids(self, n: int, *salt: object) -> list[int]:
        """A prompt of n tokens."""
        words = random.Random(repr(salt)).choices(_WORDS.split(), k=n)  # a word is one token or more
        ids = self._tokenizer.encode(" ".join(words), add_special=True, parse_special=False)
        assert len(ids) >= n
        return list(ids[:n])


def completion(prompt: Sequence[int], n_predict: int, **more: Any) -> dict[str, Any]:
    """A body for POST /completion that makes exactly n_predict tokens, greedily."""
    return {
        "prompt": list(prompt),
        "n_predict": n_predict,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "response_fields": ["timings", "tokens_predicted", "stop"],
        **more,
    }


def model_parser(description: str | None, *, n_rounds: int) -> argparse.ArgumentParser:
    """What every bench of a served model is told: the model, rounds, threads, and where the result goes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=n_rounds)
    parser.add_argument("--threads", type=int, default=config.n_usable_cores())
    parser.add_argument("--out", type=Path, help="write the JSON line here too")
    return parser


def machine(*more: str) -> str:
    """One line that says where and when, and with which versions."""
    names = ("llamatrio", "numba", "numpy", "hypercorn")
    parts = [
        _cpu_model(),
        f"{config.n_usable_cores()} cores",
        f"{current_level().name} kernels",
        datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        f"Python {platform.python_version()}",
        *(f"{name} {version(name)}" for name in names),
        f"load {os.getloadavg()[0]:.1f}",
        *more,
    ]
    return ", ".join(parts)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = dict(line.partition("\t: ")[::2] for line in lines if "\t: " in line)
    named = fields.get("model name", platform.processor())
    return named if "model" not in fields else f"{named} (model {fields['model']})"


def leave_no_garbage_to_collect() -> None:
    """A collection in this process would look like a gap of the server."""
    gc.collect()
    gc.freeze()
    gc.disable()


def medians(runs: Sequence[Figures]) -> Figures:
    """The median of each figure over rounds."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def ratio_of_pairs(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of figures that were measured next to each other."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need; floats with as many digits as they deserve."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        texts = [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(texts), flush=True)


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def finish(result: dict[str, Any], out: Path | None) -> None:
    """Prints the result as the last line, and writes it to a file where one is named."""
    line = json.dumps(_rounded(result), separators=(",", ":"))
    if out is not None:
        out.write_text(line + "\n")
    print(line, flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
