"""The table of cases in README.md is true: each file it names has a test of that case."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WANTED = {f"B{n:02}" for n in (2, 8, 10, 11, 14, 15, 16, 18, 20, 22, 24, 28, 29, 31, 33, 49, 52, 54, 55, 62, 64)}
ROWS = re.findall(r"^\| (B\d\d) \|.*\| ([^|]*) \|$", (TESTS / "README.md").read_text(), re.MULTILINE)


def cases_of(path: Path) -> set[str]:
    """Cases by the names of tests (test_b08_...) and by comments that are the case's id."""
    text = path.read_text()
    named = re.findall(r"^(?:async )?def test_(b\d\d)_", text, re.MULTILINE)
    return {name.upper() for name in named} | set(re.findall(r"# (B\d\d)\b", text))


def test_every_case_is_in_the_table() -> None:
    assert {case for case, _ in ROWS} >= WANTED


@pytest.mark.parametrize(("case", "files"), ROWS, ids=[case for case, _ in ROWS])
def test_the_files_have_the_case(case: str, files: str) -> None:
    for file in re.findall(r"`([^`]+)`", files):
        assert case in cases_of(TESTS / file), f"{file} has no test of {case}"


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: path.name)
def test_no_case_is_missing_from_the_table(path: Path) -> None:
    listed = {case for case, files in ROWS if str(path.relative_to(TESTS)) in files}
    assert cases_of(path) <= listed, "tests/README.md does not list them"
