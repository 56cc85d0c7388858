from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamatrio.errors import GGUFError, ModelError
from llamatrio.model.gguf import GGMLType, open_gguf
from llamatrio.model.model import open_model
from tests.helpers_gguf import RawTensor, tiny_model, write_gguf

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "models").glob("*.gguf"))

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.u8": np.uint8(200),
    "a.i8": np.int8(-5),
    "a.u16": np.uint16(60000),
    "a.i16": np.int16(-300),
    "a.u32": 7,
    "a.i64": -7,
    "a.u64": np.uint64(1 << 63),
    "a.f32": 0.5,
    "a.f64": np.float64(0.1),
    "a.yes": True,
    "a.no": False,
    "a.text": "naïve 🦙",
    "a.bytes": b"\xff\xfe".decode("utf-8", "surrogateescape"),
    "a.floats": np.array([1.5, -2], np.float32),
    "a.flags": np.array([True, False]),
    "a.texts": ["", "x", "日本"],
    "a.none": np.empty(0, np.int32),
}
TENSORS = {
    "first": np.arange(6, dtype=np.float32).reshape(2, 3),
    "second": RawTensor(int(GGMLType.Q8_0), (3, 2, 32), bytes(range(204))),
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", METADATA, TENSORS)


def error_of(path: Path) -> str:
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_come_back(tmp_path: Path, version: int) -> None:
    path = write_gguf(tmp_path / "a.gguf", METADATA, TENSORS, version=version)
    with open_gguf(path) as file:
        assert file.version == version
        assert list(file.metadata) == list(METADATA)
        for key, value in METADATA.items():
            np.testing.assert_array_equal(file.metadata[key], value)
        assert file.tensors["first"].shape == (2, 3)
        assert file.data("first").view("<f4").tolist() == [[0, 1, 2], [3, 4, 5]]
        second = file.tensors["second"]
        assert (second.shape, second.type, second.n_rows, second.row_bytes) == ((3, 2, 32), GGMLType.Q8_0, 6, 34)
        assert file.data("second").tobytes() == bytes(range(204))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_reads_what_gguf_py_reads(path: Path) -> None:
    reference = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            ours = file.tensors[tensor.name]
            assert ours.shape == tuple(int(n) for n in tensor.shape[::-1])
            assert (ours.type, ours.offset, ours.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        for key, field in reference.fields.items():
            if not key.startswith("GGUF."):
                np.testing.assert_array_equal(file.metadata[key], field.contents())


def test_views_outlive_the_file(tiny: Path) -> None:
    file = open_gguf(tiny)
    view = file.data("first")
    file.close()
    file.close()
    assert view.view("<f4")[1, 2] == 5
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="closed"):
        file.data("first")


def test_unknown_tensor_is_misuse(tiny: Path) -> None:
    with open_gguf(tiny) as file, pytest.raises(ValueError, match="'third'"):
        file.data("third")


def test_missing_padding_at_the_end_is_fine(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", METADATA, TENSORS, pads_the_end=False)
    with open_gguf(path) as file:
        assert file.data("second").tobytes() == bytes(range(204))


@pytest.mark.parametrize("size", [0, 3, 4, 8, 23, 24, 30, 60, 300])
def test_truncated_header(tiny: Path, size: int) -> None:  # B52
    tiny.write_bytes(tiny.read_bytes()[:size])
    message = error_of(tiny)
    assert str(size) in message, message


def test_truncated_tensor_names_both_ends(tmp_path: Path) -> None:  # B52
    path = write_gguf(tmp_path / "a.gguf", METADATA, TENSORS, pads_the_end=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    message = error_of(path)
    assert "'second'" in message
    assert f"{len(whole)} bytes" in message
    assert f"has {len(whole) - 1}" in message


@pytest.mark.parametrize(
    ("at", "replacement", "words"),
    [
        (0, b"GGML", "magic b'GGML'"),
        (0, b"FUGG", "magic b'FUGG'"),
        (4, bytes([0, 0, 0, 3]), "byte order is big endian"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack("<I", 99), "version 99"),
        (8, struct.pack("<Q", 1 << 60), "1152921504606846976 tensors"),
        (16, struct.pack("<Q", 1 << 60), "1152921504606846976 metadata keys"),
        (24, struct.pack("<Q", 1 << 62), "metadata key 1 of 18"),
    ],
)
def test_foreign_headers(tiny: Path, at: int, replacement: bytes, words: str) -> None:  # B54
    data = bytearray(tiny.read_bytes())
    data[at : at + len(replacement)] = replacement
    tiny.write_bytes(data)
    assert words in error_of(tiny)


def test_unknown_tensor_type_is_named(tmp_path: Path) -> None:  # B54
    path = write_gguf(tmp_path / "a.gguf", {}, {"odd": RawTensor(999, (4,), bytes(16))})
    message = error_of(path)
    assert "'odd'" in message
    assert "999" in message


def test_impossible_shapes_and_names(tmp_path: Path) -> None:
    ragged = write_gguf(tmp_path / "a.gguf", {}, {"odd": RawTensor(int(GGMLType.Q8_0), (33,), bytes(68))})
    assert "'odd' of type Q8_0 has the impossible shape [33]" in error_of(ragged)
    empty = write_gguf(tmp_path / "b.gguf", {}, {"odd": RawTensor(0, (0, 4), b"")})
    assert "impossible shape" in error_of(empty)
    deep = write_gguf(tmp_path / "c.gguf", {}, {"odd": RawTensor(0, (1,) * 5, bytes(4))})
    assert "5 dimensions" in error_of(deep)
    huge = write_gguf(tmp_path / "d.gguf", {}, {"odd": RawTensor(0, (1 << 62, 1 << 62), b"")})
    assert "truncated" in error_of(huge)


def test_damaged_metadata(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"key": True, "yek": 1}, {})
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"yek", b"key"))
    assert "'key' appears twice" in error_of(path)
    path.write_bytes(whole.replace(b"key" + struct.pack("<IB", 7, 1), b"key" + struct.pack("<IB", 7, 2)))
    assert "boolean with the value 2" in error_of(path)
    path.write_bytes(whole.replace(b"key" + struct.pack("<I", 7), b"key" + struct.pack("<I", 77)))
    assert "unknown type 77" in error_of(path)
    path = write_gguf(tmp_path / "b.gguf", {"general.alignment": 24}, {})
    assert "not a power of two" in error_of(path)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelError, match="cannot open"):
            open_gguf(path)


def test_typed_look_ups_name_the_key(tiny: Path) -> None:
    with open_gguf(tiny) as file:
        keys = file.metadata
        assert keys.integer("a.u32") == 7
        assert keys.integer("absent", 3) == 3
        assert keys.number("a.u32") == 7.0
        assert keys.boolean("absent", True) is True
        for look_up in (keys.integer, keys.number, keys.boolean, keys.strings, keys.numbers):
            with pytest.raises(GGUFError, match=r"'a\.text' should be"):
                look_up("a.text")
        with pytest.raises(GGUFError, match=r"'a\.yes' should be an integer"):
            keys.integer("a.yes")
        with pytest.raises(GGUFError, match="no key 'absent'"):
            keys.string("absent")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return tiny_model(path, n_layer=1, n_embd=32, n_head=1, n_head_kv=1, n_ff=32, type=GGMLType.Q8_0)


def complaint_about(path: Path) -> str:
    """What opening the model says; "" when it opens. Any other exception goes on to the test."""
    try:
        with open_model(path):
            return ""
    except ModelError as error:
        return str(error)


def header_size(path: Path) -> int:
    with open_gguf(path) as file:
        return min(tensor.offset for tensor in file.tensors.values())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_truncation_is_refused(small_model: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = small_model.read_bytes()
    n_kept = data.draw(st.integers(0, len(whole) - 32))
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:n_kept])
    with pytest.raises(GGUFError):
        open_gguf(path)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_corrupted_byte_is_survived(small_model: Path, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(small_model.read_bytes())
    at = data.draw(st.integers(0, header_size(small_model) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    assert "\n" not in complaint_about(path)
