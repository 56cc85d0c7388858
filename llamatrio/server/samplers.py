"""llama-server's `samplers`: which parts of the sampling chain are on, and in which order.

The chain here has one order, llama-server's usual one. So a list can switch parts off, and may name parts that are not
offered, since those do nothing unless a field of theirs, which is refused, says otherwise. What it cannot do is turn
the order round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llamatrio.errors import RequestError
from llamatrio.sched.types import SamplingParams

CHAIN = ("penalties", "top_k", "top_p", "min_p", "temperature")

_OFF: dict[str, dict[str, Any]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
_UNOFFERED = {"dry", "top_n_sigma", "typ_p", "xtc", "infill", "adaptive_p"}
_OTHER_NAMES = {
    "nucleus": "top_p", "temp": "temperature", "typical_p": "typ_p", "typical": "typ_p", "typ": "typ_p",
}  # fmt: skip
_LETTERS = {
    "e": "penalties", "k": "top_k", "p": "top_p", "m": "min_p", "t": "temperature", "d": "dry", "s": "top_n_sigma",
    "y": "typ_p", "x": "xtc", "i": "infill", "a": "adaptive_p",
}  # fmt: skip


def with_samplers(params: SamplingParams, wanted: Sequence[str]) -> SamplingParams:
    """The parameters with every part of the chain off that is not wanted. `wanted`: names, or a string of letters.

    Raises:
        RequestError: a name that does not exist, or an order that is not the chain's.
    """
    names = [_name(word) for word in wanted]
    chain = [name for name in names if name not in _UNOFFERED]
    if chain != [name for name in CHAIN if name in chain]:
        raise RequestError(f"samplers: expected the order {', '.join(CHAIN)}", field="samplers")
    off: dict[str, Any] = {}
    for name in CHAIN:
        off |= {} if name in chain else _OFF[name]
    return replace(params, **off)


def _name(word: str) -> str:
    plain = word.replace("-", "_")
    name = _OTHER_NAMES.get(plain, _LETTERS.get(plain, plain))
    if name not in CHAIN and name not in _UNOFFERED:
        raise RequestError(f"samplers: there is no {word!r}", field="samplers")
    return name
