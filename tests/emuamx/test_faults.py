"""What would fault on a processor with AMX faults here, and other illegal instructions are none of the emulator's."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import emuamx

from .assembly import Array, config, run

pytestmark = pytest.mark.skipif(emuamx.missing() is not None, reason=str(emuamx.missing()))

ROOT = Path(__file__).parents[2]
_CHILD = """
import sys
from tests.emuamx.test_faults import CASES, {what}
{what}(*CASES[sys.argv[1]])
print("went on")
"""

FULL, NONE = (16, 64), (0, 0)
START = "ldtilecfg (%rdi)\n"


def changed(at: int, value: int, *shapes: tuple[int, int]) -> Array:
    """A configuration with one byte that is different."""
    content = config(*shapes)
    content[at] = value
    return content


CASES: dict[str, tuple[str, Array]] = {
    # configurations
    "another palette": (START, changed(0, 2, FULL)),
    "start_row": (START, changed(1, 1, FULL)),
    "reserved bytes in front": (START, changed(15, 1, FULL)),
    "reserved columns": (START, changed(32, 1, FULL)),
    "reserved rows": (START, changed(63, 1, FULL)),
    "too many rows": (START, config((17, 64))),
    "too long rows": (START, config((16, 65))),
    "rows without columns": (START, config((16, 0))),
    "columns without rows": (START, config((0, 64))),
    # tiles
    "a load without a configuration": ("tileloadd (%rsi,%rdx), %tmm0", config(FULL)),
    "a load after the release": (START + "tilerelease\ntileloadd (%rsi,%rdx), %tmm0", config(FULL)),
    "a load after palette 0": (START + "ldtilecfg (%rsi)\ntileloadd (%rsi,%rdx), %tmm0", config(FULL)),
    "a load of a tile that is not there": (START + "tileloadd (%rsi,%rdx), %tmm1", config(FULL)),
    "a store of one": (START + "tilestored %tmm1, (%rsi,%rdx)", config(FULL)),
    "a clear of one": (START + "tilezero %tmm1", config(FULL)),
    "an address without SIB": (START + ".byte 0xc4, 0xe2, 0x7b, 0x4b, 0x06", config(FULL)),  # tileloadd (%rsi), %tmm0
    "a load of tile 8": (START + ".byte 0xc4, 0x62, 0x7b, 0x4b, 0x04, 0x16", config(*[FULL] * 8)),
    "a VEX.vvvv that is in use": (START + ".byte 0xc4, 0xe2, 0x73, 0x49, 0xc0", config(FULL, FULL)),  # tilezero
    "the same in a load": (START + ".byte 0xc4, 0xe2, 0x73, 0x4b, 0x04, 0x16", config(FULL, FULL)),
    "a VEX.W that is set": (START + ".byte 0xc4, 0xe2, 0xfb, 0x49, 0xc0", config(FULL)),  # tilezero
    # products, in bytes where the assembler knows better
    "a product of a tile with itself": (START + ".byte 0xc4, 0xe2, 0x73, 0x5e, 0xc1", config(FULL, FULL)),
    "a product into a factor": (START + ".byte 0xc4, 0xe2, 0x7a, 0x5c, 0xc1", config(FULL, FULL)),
    "a factor that is tile 9": (START + ".byte 0xc4, 0xc2, 0x6b, 0x5e, 0xc1", config(FULL, FULL, FULL)),
    "a factor that is tile 10": (START + ".byte 0xc4, 0xe2, 0x2b, 0x5e, 0xc1", config(FULL, FULL, FULL)),
    "a product of a tile that is not there": (START + "tdpbuud %tmm2, %tmm1, %tmm0", config(FULL, FULL)),
    "rows that do not match": (START + "tdpbssd %tmm2, %tmm1, %tmm0", config((8, 64), FULL, FULL)),
    "columns that do not match": (START + "tdpbssd %tmm2, %tmm1, %tmm0", config((16, 32), FULL, FULL)),
    "factors that do not match": (START + "tdpbf16ps %tmm2, %tmm1, %tmm0", config(FULL, (16, 32), FULL)),
    "columns that are not whole": (START + "tdpbf16ps %tmm2, %tmm1, %tmm0", config((16, 6), FULL, (16, 6))),
    # not ours
    "ud2": ("ud2", config(FULL)),
    "ud2 behind a tile instruction": (START + "ud2", config(FULL)),
    "TDPFP16PS": (START + ".byte 0xc4, 0xe2, 0x6b, 0x5c, 0xc1", config(FULL, FULL, FULL)),
}
"""By name: instructions, the last of which faults, and the configuration at rdi. At rsi there are zeros; rdx is 64."""


def fault(text: str, configuration: Array) -> None:
    """In a child: the emulator alone."""
    emuamx.install()
    run(text, configuration, np.zeros(1024, np.uint8), 64)


class _Action(ctypes.Structure):
    """struct sigaction of glibc."""

    _fields_ = (
        ("handler", ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p)),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def fault_with_a_handler(text: str, configuration: Array) -> None:
    """In a child: a handler stood there before, which prints the instruction and ends the child."""

    def report(number: int, info: Any, context: int) -> None:
        print(number, ctypes.string_at(info[2], 4).hex(), flush=True)
        os._exit(0)

    sa_siginfo = 4
    action = _Action(_Action._fields_[0][1](report), flags=sa_siginfo)
    assert ctypes.CDLL(None).sigaction(signal.SIGILL, ctypes.byref(action), None) == 0
    fault(text, configuration)


def child(what: str, case: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", _CHILD.format(what=what), case]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_what_leads_up_to_the_faults_does_not() -> None:
    """Else anything would pass below."""
    emuamx.install()
    for text, configuration in CASES.values():
        *before, _ = text.splitlines()
        run("\n".join([*before, "tilerelease"]), configuration, np.zeros(1024, np.uint8), 64)


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_sigill(case: str) -> None:
    done = child("fault", case)
    assert (done.returncode, done.stdout) == (-signal.SIGILL, ""), done.stderr


@pytest.mark.parametrize(
    ("case", "instruction"),
    [("ud2 behind a tile instruction", "0f0b"), ("a load of a tile that is not there", "c4e27b4b")],
)
def test_the_handler_of_before_sees_the_fault(case: str, instruction: str) -> None:
    done = child("fault_with_a_handler", case)
    assert done.returncode == 0, done.stderr
    number, code = done.stdout.split()
    assert int(number) == signal.SIGILL
    assert code.startswith(instruction)


def test_pythons_fault_handler_still_reports() -> None:
    done = child("fault", "ud2 behind a tile instruction", "-X", "faulthandler")
    assert (done.returncode, done.stdout) == (-signal.SIGILL, "")
    assert "Illegal instruction" in done.stderr
