"""The head of a GGUF file: its metadata and its table of tensors, read in milliseconds.

The `gguf` package's reader makes several arrays of every string, which takes seconds for a
vocabulary; this one walks the bytes once.

Source: "GGUF" format specification of the ggml project, versions 2 and 3 (little-endian).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_llama.checkpoint.damage import bad_file, check_is_data, cut_short
from offload_llama.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One line of the tensor table. `shape` is (rows, columns), the reverse of the file's order.

    `offset` counts from the start of the tensor data.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata by key, the tensor table in file order, and where the tensor data begins.

    `metadata_end` is the offset behind the last key's value, where the table begins.
    """

    size_bytes: int
    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    data_start: int
    metadata_end: int


class _Cursor:
    """A position in the mapped file. Reading beyond the end raises IndexError or struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, layout: struct.Struct) -> Any:
        [value] = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def string(self) -> str:
        n_bytes = self.number(_U64)
        text = self.data[self.at : self.at + n_bytes]
        if len(text) != n_bytes:
            raise IndexError
        self.at += n_bytes
        return text.decode("utf-8", "replace")

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self.array()
        return self.number(struct.Struct("<" + _SCALARS[type_id]))

    def array(self) -> list[Any]:
        type_id, count = self.number(_U32), self.number(_U64)
        if type_id == _STRING:
            return self.strings(count)
        if type_id == _ARRAY:
            return [self.array() for _ in range(count)]
        layout = _SCALARS[type_id]
        n_bytes = struct.calcsize("<" + layout) * count
        if self.at + n_bytes > len(self.data):
            raise IndexError
        values = list(struct.unpack_from(f"<{count}{layout}", self.data, self.at))
        self.at += n_bytes
        return values

    def strings(self, count: int) -> list[str]:
        """Like `string`, `count` times; the loop that start-up time hangs on."""
        data, at, length = self.data, self.at, _U64.unpack_from
        end = len(data)
        out: list[str] = []
        for _ in range(count):
            [n_bytes] = length(data, at)
            at += 8
            stop = at + n_bytes
            if stop > end:
                raise IndexError
            out.append(data[at:stop].decode("utf-8", "replace"))
            at = stop
        self.at = at
        return out


def read_header(path: Path) -> GGUFHeader:
    """Return the head of a GGUF file.

    Raises:
        CheckpointError: no GGUF file, another version or byte order, or damaged.
    """
    size_bytes = check_is_data(path)
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] != MAGIC:
            raise bad_file(path, size_bytes, f"not a GGUF file, it begins with {start[:4]!r}")
        if len(start) < 8:
            raise cut_short(path, size_bytes, 24)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_mapped(path, _Cursor(data))


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file by key: numbers, booleans, strings and lists of them.

    The vocabulary stands under `tokenizer.ggml.*` and the chat template under
    `tokenizer.chat_template`. Bytes that are no UTF-8 become U+FFFD.

    Raises:
        CheckpointError: no GGUF file, another version or byte order, or damaged.
    """
    return read_header(path).metadata


def _read_mapped(path: Path, cursor: _Cursor) -> GGUFHeader:
    size_bytes = len(cursor.data)
    cursor.at = len(MAGIC)
    version = cursor.number(_U32)
    if version not in VERSIONS:
        problem = (
            "a big-endian GGUF file; convert it to little-endian"
            if version in (v << 24 for v in VERSIONS)
            else f"GGUF version {version}, but versions 2 and 3 are supported; convert it again"
        )
        raise bad_file(path, size_bytes, problem)
    try:
        n_tensors, n_keys = cursor.number(_U64), cursor.number(_U64)
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.number(_U32))
        metadata_end = cursor.at
        tensors = tuple(_read_entry(cursor) for _ in range(n_tensors))
    except (IndexError, struct.error, OverflowError, RecursionError) as error:
        raise bad_file(
            path,
            size_bytes,
            f"its GGUF header is cut short or damaged near byte {cursor.at:,}; fetch it again",
        ) from error
    except KeyError as error:
        raise bad_file(
            path, size_bytes, f"unknown metadata type {error} near byte {cursor.at:,}; damaged file"
        ) from error
    data_start = _data_start(path, cursor, metadata)
    return GGUFHeader(size_bytes, metadata, tensors, data_start, metadata_end)


def _read_entry(cursor: _Cursor) -> TensorEntry:
    name = cursor.string()
    n_dims = cursor.number(_U32)
    if not 1 <= n_dims <= MAX_DIMS:
        raise IndexError
    dims = [cursor.number(_U64) for _ in range(n_dims)]
    type_id, offset = cursor.number(_U32), cursor.number(_U64)
    return TensorEntry(name, tuple(reversed(dims)), type_id, offset)


def _data_start(path: Path, cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise CheckpointError(f"{path}: general.alignment must be a multiple of 8, not {alignment}")
    return (cursor.at + alignment - 1) // alignment * alignment
