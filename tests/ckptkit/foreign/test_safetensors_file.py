"""Headers of safetensors files: what the library writes is read, what it would not write is refused."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from ckptkit.foreign.safetensors_file import read_file
from threefold.errors import CheckFailed, UserError
from threefold.storage import open_storage


def write(folder: Path, header: dict[str, Any] | bytes, data: bytes = bytes(16)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def row(start: int, stop: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_tensors_are_where_the_header_says(tmp_path: Path) -> None:
    rows = {"b": row(8, 16, [2]), "a": row(0, 8, [1, 2]), "e": row(8, 8, [0])}
    write(tmp_path, {"__metadata__": {"format": "pt"}, **rows})
    tensors, size, _ = read_file(open_storage(tmp_path), "a.safetensors")
    assert {name: (each.dtype, each.shape, each.size_bytes) for name, each in tensors.items()} == {
        "a": ("F32", (1, 2), 8), "b": ("F32", (2,), 8), "e": ("F32", (0,), 0)}  # fmt: skip
    assert tensors["b"].offset == size - 8


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": row(0, 8, [2]), "b": row(4, 12, [2])}, 12, "tensor b overlaps the one before"),
        ({"a": row(0, 8, [2]), "b": row(12, 16, [1])}, 16, "tensor b leaves a gap before it"),
        ({"a": row(4, 8, [1])}, 8, "tensor a leaves a gap before it"),
        ({"a": row(0, 16, [4])}, 15, "its header says"),
        ({"a": row(0, 16, [4])}, 17, "its header says"),
        ({"a": row(0, 12, [4])}, 12, "12 bytes for F32"),
        ({"a": row(0, 16, [-4])}, 16, "-4 in its shape or offsets"),
        ({"a": row(0, 16, [True])}, 16, "True in its shape or offsets"),
        ({"a": row(0, 16, [4.0])}, 16, "4.0 in its shape or offsets"),
        ({"a": row(16, 0, [4])}, 16, "-16 bytes for F32"),
        ({"a": row(0, 0, [1] * 9)}, 0, "shape"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "data_offsets"),
        ({"a": 3}, 0, "no sound safetensors header"),
        (b'{"a": 1, "a": 2}', 0, "a key is there twice"),
        (b"[1, 2]", 0, "no sound safetensors header"),
        (b"{" * 5000, 0, "no sound safetensors header"),
        (b"\xff\xfe", 0, "no sound safetensors header"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, data: int, message: str) -> None:
    write(tmp_path, header, bytes(data))
    with pytest.raises(CheckFailed, match=message):
        read_file(open_storage(tmp_path), "a.safetensors")


@pytest.mark.parametrize("size", [0, 7, 8, 9])
def test_a_file_that_ends_in_its_header_is_refused(tmp_path: Path, size: int) -> None:
    write(tmp_path, {"a": row(0, 16, [4])})
    path = tmp_path / "a.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckFailed, match=f"was cut short \\({size} bytes\\)"):
        read_file(open_storage(tmp_path), "a.safetensors")


def test_a_header_larger_than_any_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(CheckFailed, match="is not a safetensors file"):
        read_file(open_storage(tmp_path), "a.safetensors")


def test_a_dtype_that_no_checkpoint_has_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"a": row(0, 16, [4], "F4_E2M1")})
    with pytest.raises(UserError, match="tensor a has dtype 'F4_E2M1', known are F64"):
        read_file(open_storage(tmp_path), "a.safetensors")
