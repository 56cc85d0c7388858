"""Metadata of a GGUF file, with typed look-ups whose errors name the key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatrio.errors import GGUFError

MetaValue = bool | int | float | str | list[str] | NDArray[Any]
"""A scalar, a string, an array of strings, or a one-dimensional array of numbers or booleans."""


class Metadata(Mapping[str, MetaValue]):
    """Keys and values in the file's order.

    The typed look-ups raise GGUFError, naming the key, when the value has another type or when the key is
    absent and no default is given.
    """

    def __init__(self, values: Mapping[str, MetaValue]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> MetaValue:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def require(self, key: str) -> MetaValue:
        """The value of `key`, which the file must have."""
        if key not in self._values:
            raise GGUFError(f"the file has no key {key!r}")
        return self._values[key]

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of any width."""
        value = self._find(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong_type(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._find(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _wrong_type(key, "a finite number", value)
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """A boolean."""
        value = self._find(key, default)
        if not isinstance(value, bool):
            raise _wrong_type(key, "a boolean", value)
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """A string; bytes that are not UTF-8 are kept as surrogate escapes."""
        value = self._find(key, default)
        if not isinstance(value, str):
            raise _wrong_type(key, "a string", value)
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings."""
        value = self.require(key)
        if not isinstance(value, list):
            raise _wrong_type(key, "an array of strings", value)
        return value

    def numbers(self, key: str) -> NDArray[Any]:
        """An array of numbers or booleans."""
        value = self.require(key)
        if not isinstance(value, np.ndarray):
            raise _wrong_type(key, "an array of numbers", value)
        return value

    def _find(self, key: str, default: MetaValue | None) -> MetaValue:
        if default is None:
            return self.require(key)
        return self._values.get(key, default)


def _wrong_type(key: str, expected: str, value: MetaValue) -> GGUFError:
    found = f"an array of {len(value)}" if isinstance(value, list | np.ndarray) else repr(value)[:60]
    return GGUFError(f"key {key!r} should be {expected}, not {found}")
