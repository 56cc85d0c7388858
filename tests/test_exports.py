"""`__all__` is honest: every name is there, is ours, and nothing public is missing from it."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import llamatrio

ROOT = Path(__file__).parents[1]


def modules_with_all() -> list[str]:
    paths = sorted((ROOT / "llamatrio").rglob("*.py"))
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in paths if "\n__all__ = [" in p.read_text()]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", modules_with_all())
def test_every_listed_name_exists_and_is_listed_once(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for entry in module.__all__:
        assert getattr(module, entry) is not None, f"{name}.{entry}"


def test_the_packages_names_are_what_they_say() -> None:
    for name in llamatrio.__all__:
        value = getattr(llamatrio, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__name__ == name
            assert value.__module__.startswith("llamatrio.")
            assert value.__doc__, f"{name} has no docstring"


def test_type_checkers_see_the_same_names() -> None:
    """What __getattr__ gives at run time is what the imports under TYPE_CHECKING promise."""
    tree = ast.parse(Path(llamatrio.__file__).read_text())
    promised = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {name for name in llamatrio.__all__ if name not in promised} <= {"__version__"}
    for name in llamatrio.__all__:
        value = getattr(llamatrio, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert getattr(importlib.import_module(promised[name]), name) is value


def test_dir_and_star_give_exactly_the_public_names() -> None:
    found: dict[str, object] = {}
    exec("from llamatrio import *", found)
    assert set(found) - {"__builtins__"} == set(llamatrio.__all__) == set(dir(llamatrio))
    assert {"open_engine", "Engine", "EngineConfig", "SamplingParams", "logits", "generate"} <= set(llamatrio.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'no_such_name'"):
        _ = llamatrio.no_such_name


def test_every_error_can_be_caught_by_its_base() -> None:
    errors = [value for value in vars(llamatrio.errors).values() if inspect.isclass(value)]
    assert len(errors) > 8
    for error in errors:
        assert issubclass(error, llamatrio.LlamatrioError)
        assert 400 <= error.status < 600
        assert error.kind.endswith("_error")
