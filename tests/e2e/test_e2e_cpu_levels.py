"""Greedy ids on lesser processors: kernels that are forced by the environment choose as the default ones do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_tools import GREEDY, n_before_a_close_choice, open_tiny, prompt, run

from llamatrio.backends.cpu.levels import host_levels

CLEAR = ((3, 35), (40, 49), (130, 40))
"""Prompts, as length and seed, after which every choice is clear."""
_CHILD = """
import json
import trio
from e2e_tools import open_tiny, prompt, run
from test_e2e_cpu_levels import CLEAR

async def main() -> None:
    async with open_tiny(n_ctx=256) as engine:
        outcomes = [await run(engine, prompt(*p), 24) for p in CLEAR]
        print(json.dumps([engine.device, [outcome.ids for outcome in outcomes]]))

trio.run(main)
"""


def forced(level: str) -> tuple[str, list[list[int]]]:
    """The device and the ids of a process whose kernels are forced."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)])
    environment = os.environ | {"LLAMATRIO_CPU_LEVEL": level, "PYTHONPATH": path}
    command = [sys.executable, "-c", _CHILD]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=250).stdout
    device, ids = json.loads(output)
    return device, ids


@pytest.mark.parametrize("level", ["plain", "avx2"])
async def test_a_forced_level_chooses_the_same_tokens(level: str) -> None:
    if level not in [found.name for found in host_levels()]:
        pytest.skip(f"this processor has no {level}")
    device, found = forced(level)
    assert f"{level} kernels" in device
    n_clear = 0
    async with open_tiny(n_ctx=256) as engine:
        for (n, seed), ids in zip(CLEAR, found, strict=True):
            outcome = await run(engine, prompt(n, seed), 24, replace(GREEDY, n_probs=2))
            clear = n_before_a_close_choice(outcome)
            assert ids[:clear] == outcome.ids[:clear]
            n_clear += clear
    assert n_clear > 36, "too few choices were clear for this to mean anything"
