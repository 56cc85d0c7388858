"""Reader of GGUF files, memory-mapped: versions 2 and 3, little endian.

Layout of a file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); all integers little endian:

    magic "GGUF" | version u32 | n_tensors u64 | n_kv u64
    n_kv times:      key string | value type u32 | value
    n_tensors times: name string | n_dims u32 | dims u64[n_dims], fastest first | type u32 | offset u64
    padding to `general.alignment` (32 unless the file says otherwise)
    tensor data: each tensor at its offset from here

A string is a u64 length and that many bytes. An array is an element type u32, a u64 length, and the elements.

Rule 1: no count from the file is believed before the bytes that it implies are known to be there, so a hostile
file can make us neither allocate nor loop beyond its own size.
Rule 2: everything is checked on opening. Whoever holds a GGUFFile can take any tensor's data without a check.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatrio.errors import GGUFError, ModelError
from llamatrio.model.ggml_type import GGMLType, block_shape
from llamatrio.model.metadata import Metadata, MetaValue

__all__ = ["GGMLType", "GGUFFile", "Metadata", "TensorInfo", "open_gguf"]

UInt8Array = NDArray[np.uint8]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32

# Value types of metadata. The scalars have a struct code that is also their NumPy type.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# The fewest bytes that one entry can take: what a count is checked against.
_MIN_KV_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what it is."""

    name: str
    shape: tuple[int, ...]
    """NumPy order: rows first, the fastest dimension last."""
    type: GGMLType
    offset: int
    """Bytes from the start of the file."""
    nbytes: int

    @property
    def n_rows(self) -> int:
        """Rows of `row_bytes` bytes: the product of all dimensions but the last."""
        n_rows = 1
        for n in self.shape[:-1]:
            n_rows *= n
        return n_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of shape[-1] weights."""
        return self.nbytes // self.n_rows


class GGUFFile:
    """An open GGUF file. Made by `open_gguf`; a context manager that unmaps on exit.

    Arrays from `data` stay valid after `close`: the mapping then lasts as long as they do.
    """

    def __init__(
        self, path: Path, mapping: mmap.mmap, version: int, metadata: Metadata, tensors: Mapping[str, TensorInfo]
    ) -> None:
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = MappingProxyType(dict(tensors))
        self._mapping: mmap.mmap | None = mapping

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def data(self, name: str) -> UInt8Array:
        """The blocks of tensor `name` as the file has them: a read-only uint8 view [n_rows, row_bytes].

        Raises:
            ValueError: the file has no such tensor, or is closed.
        """
        if self._mapping is None:
            raise ValueError(f"expected an open file, but {self.path} is closed")
        if name not in self.tensors:
            raise ValueError(f"expected the name of a tensor, not {name!r}")
        tensor = self.tensors[name]
        flat = np.frombuffer(self._mapping, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(tensor.n_rows, tensor.row_bytes)

    def close(self) -> None:
        """Unmaps the file, now or when the last view of it is gone. Idempotent."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(BufferError):
                mapping.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_gguf(path: str | Path) -> GGUFFile:
    """Maps the file at `path` and checks it whole, except for the numbers in the tensors.

    Raises:
        GGUFError: damaged, truncated, of another byte order, version or format; names what is wrong.
        ModelError: the file cannot be opened.
    """
    path = Path(path)
    mapping = _map(path)
    try:
        return _Reader(path, mapping).read()
    except BaseException:
        with suppress(BufferError):
            mapping.close()
        raise


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < len(_MAGIC):
                raise GGUFError(f"{path}: {file.tell()} bytes are too few for a GGUF file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot open the model file {path}: {error}") from error


class _Reader:
    """Reads the header from front to back. `_at` is the next byte, `_what` names what is being read."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self._path = path
        self._bytes = mapping
        self._size = len(mapping)
        self._at = 0
        self._what = "the header"

    def read(self) -> GGUFFile:
        version = self._read_version()
        n_tensors, n_kv = self._scalar("Q"), self._scalar("Q")
        self._check_count("metadata keys", n_kv, _MIN_KV_BYTES)
        metadata = Metadata(self._read_metadata(n_kv))
        self._check_count("tensors", n_tensors, _MIN_TENSOR_BYTES)
        declared = [self._read_tensor_info(i) for i in range(n_tensors)]
        alignment = self._alignment(metadata)
        data_start = -(-self._at // alignment) * alignment
        return GGUFFile(
            self._path, self._bytes, version, metadata, self._place_tensors(declared, data_start, alignment)
        )

    def _read_version(self) -> int:
        magic = self._take(len(_MAGIC))
        if magic != _MAGIC:
            raise self._error(f"not a GGUF file: it starts with the magic {magic!r}, not {_MAGIC!r}")
        version: int = self._scalar("I")
        if version not in _VERSIONS:
            if version and version & 0xFFFF == 0:
                raise self._error("the byte order is big endian; only little-endian files can be read")
            raise self._error(f"GGUF version {version} cannot be read; versions 2 and 3 can")
        return version

    def _read_metadata(self, n_kv: int) -> dict[str, MetaValue]:
        values: dict[str, MetaValue] = {}
        for i in range(n_kv):
            self._what = f"metadata key {i + 1} of {n_kv}"
            key = self._string()
            self._what = f"the value of {key!r}"
            if key in values:
                raise self._error(f"the key {key!r} appears twice")
            values[key] = self._value(self._scalar("I"))
        return values

    def _value(self, kind: int) -> MetaValue:
        if kind in _SCALARS:
            value: int | float = self._scalar(_SCALARS[kind])
            return value
        if kind == _BOOL:
            return self._bool(self._scalar("B"))
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        raise self._error(f"{self._what} has the unknown type {kind}")

    def _array(self, kind: int, length: int) -> MetaValue:
        if kind == _STRING:
            self._check_count(f"strings in {self._what}", length, 8)
            return [self._string() for _ in range(length)]
        if kind != _BOOL and kind not in _SCALARS:
            raise self._error(f"{self._what} is an array of the unknown type {kind}")
        dtype = np.dtype(np.uint8 if kind == _BOOL else "<" + _SCALARS[kind].replace("I", "u4").replace("i", "i4"))
        start = self._advance(length * dtype.itemsize)
        array: NDArray[Any] = np.frombuffer(self._bytes, dtype, length, start).copy() if length else np.empty(0, dtype)
        return array.astype(np.bool_) if kind == _BOOL else array

    def _bool(self, byte: int) -> bool:
        if byte > 1:
            raise self._error(f"{self._what} is a boolean with the value {byte}")
        return byte == 1

    def _read_tensor_info(self, index: int) -> TensorInfo:
        """As the file has it: the offset is still relative to the tensor data."""
        self._what = f"tensor info {index + 1}"
        name = self._string()
        self._what = f"the info of tensor {name!r}"
        n_dims = self._scalar("I")
        if n_dims > _MAX_DIMS:
            raise self._error(f"tensor {name!r} has {n_dims} dimensions; at most {_MAX_DIMS} are possible")
        shape = tuple(self._scalar("Q") for _ in range(n_dims))[::-1] or (1,)
        type_id = self._scalar("I")
        offset = self._scalar("Q")
        if type_id not in GGMLType.__members__.values():
            raise self._error(f"tensor {name!r} has the unknown type {type_id}")
        kind = GGMLType(type_id)
        return TensorInfo(name, shape, kind, offset, self._n_bytes(name, shape, kind))

    def _n_bytes(self, name: str, shape: tuple[int, ...], kind: GGMLType) -> int:
        n_weights, n_bytes = block_shape(kind)
        if min(shape) < 1 or shape[-1] % n_weights:
            raise self._error(f"tensor {name!r} of type {kind.name} has the impossible shape {list(shape)}")
        total = n_bytes * (shape[-1] // n_weights)
        for n in shape[:-1]:
            total *= n
        return total

    def _alignment(self, metadata: Metadata) -> int:
        alignment = metadata.integer("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment}, which is not a power of two")
        return alignment

    def _place_tensors(self, declared: list[TensorInfo], data_start: int, alignment: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for info in declared:
            if info.name in tensors:
                raise self._error(f"tensor {info.name!r} appears twice")
            if info.offset % alignment:
                raise self._error(f"tensor {info.name!r} is not aligned to {alignment} bytes")
            offset = data_start + info.offset
            if offset + info.nbytes > self._size:
                raise self._truncated(f"tensor {info.name!r}", offset + info.nbytes)
            tensors[info.name] = TensorInfo(info.name, info.shape, info.type, offset, info.nbytes)
        return tensors

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", "surrogateescape")

    def _scalar(self, code: str) -> Any:
        start = self._advance(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self._bytes, start)[0]

    def _take(self, n: int) -> bytes:
        start = self._advance(n)
        return self._bytes[start : start + n]

    def _advance(self, n: int) -> int:
        """Moves past the next `n` bytes, which must be there, and returns where they start."""
        start = self._at
        if start + n > self._size:
            raise self._truncated(self._what, start + n)
        self._at = start + n
        return start

    def _check_count(self, what: str, count: int, min_bytes: int) -> None:
        end = self._at + count * min_bytes
        if end > self._size:
            raise self._truncated(f"the declared {count} {what}", end)

    def _truncated(self, what: str, end: int) -> GGUFError:
        return self._error(f"truncated: {what} needs at least {end} bytes, but the file has {self._size}")

    def _error(self, message: str) -> GGUFError:
        return GGUFError(f"{self._path}: {message}")
