"""What an engine's configuration may be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llamatrio.config import EngineConfig

COUNTS = (
    "n_ctx", "n_parallel", "n_batch", "n_ubatch", "n_threads", "cache_ram_mib", "max_queued", "staging_mib", "n_staging"
)  # fmt: skip
TIMES = ("target_itl_ms", "stream_stall_timeout")
NEVER: tuple[Any, ...] = (-2, math.nan, math.inf, -math.inf, "5", True, [], -(10**400))


@pytest.mark.parametrize("field", [*COUNTS, *TIMES, "seed", "type_k", "type_v", "device", "cache_scope"])
@pytest.mark.parametrize("value", NEVER, ids=lambda value: repr(value)[:8])
def test_nonsense_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"expected {field} "):
        replace(EngineConfig(), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in COUNTS for value in (1.5, 1.0, None)),
        *((field, value) for field in TIMES for value in (0, None, 1e300, 10**400)),
        *((field, 0) for field in ("n_parallel", "n_batch", "n_ubatch", "max_queued", "staging_mib", "n_staging")),
        ("seed", 1.0),
        ("device", "gpu"),
        ("type_k", "f32"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"expected {field} "):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 2}, {"n_ctx": 8, "n_parallel": 4, "kv_unified": False}, {"cache_ram_mib": -1}, {"cache_ram_mib": 0},
        {"seed": 0}, {"seed": 2**64}, {"target_itl_ms": 1}, {"target_itl_ms": np.float32(2)}, {"n_ctx": np.int64(64)},
    ],
)  # fmt: skip
def test_what_makes_sense_is_taken(options: dict[str, Any]) -> None:
    config = EngineConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(
    "options", [{"n_ctx": 1}, *({"n_ctx": n, "n_parallel": 4, "kv_unified": False} for n in (1, 4, 7))]
)
def test_a_context_below_two_tokens_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected a context of 2 tokens"):
        EngineConfig(**options)
    with pytest.raises(ValueError, match="expected a context of 2 tokens"):
        EngineConfig(**(options | {"n_ctx": 0})).n_ctx_seq(options["n_ctx"])
