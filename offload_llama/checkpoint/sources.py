"""Tensors that still lie on disk, and a model made of them.

Rows are read with plain reads into memory of their own, not mapped: mapped pages would count as
ours until the file is closed, and a model larger than the memory left must still load.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload_llama.checkpoint.api import TensorSource
from offload_llama.checkpoint.damage import cut_short
from offload_llama.config import ModelConfig

# 1 MiB of float32: stays in a CPU's cache between read, decode and convert, and the few pieces
# under way at a time take little memory; larger ones load no faster.
PIECE_ELEMENTS = 1 << 18


class DataFile:
    """One open file of tensor data; any thread may read it."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path, self.size_bytes = path, size_bytes
        self._file = path.open("rb", buffering=0)
        self._lock = threading.Lock()

    def read(self, offset: int, n_bytes: int) -> torch.Tensor:
        """Return these bytes as a new uint8 tensor, (n_bytes,).

        Raises:
            CheckpointError: the file ends before that (it shrank since it was checked).
        """
        data = torch.empty(n_bytes, dtype=torch.uint8)
        view = memoryview(data.numpy().data)
        done = 0
        with self._lock:
            self._file.seek(offset)
            while done < n_bytes:
                count = self._file.readinto(view[done:])
                if not count:
                    raise cut_short(self.path, offset + done, offset + n_bytes)
                done += count
        return data

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class PlainRows:
    """A tensor stored row by row in a floating dtype."""

    file: DataFile
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    row_step: int = 1

    @property
    def n_bytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) in new memory."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        data = self.file.read(self.offset + start * row_bytes, (stop - start) * row_bytes)
        return data.view(self.dtype).view(stop - start, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class InterleavedRows:
    """A q or k matrix whose rows are brought from half-split to Meta's order.

    Hugging Face stores the rows of each head as all first members of the rotary pairs, then all
    second ones; Meta has each pair side by side.
    """

    inner: TensorSource
    head_dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, (heads * D, dim)."""
        return self.inner.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self.inner.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes on disk."""
        return self.inner.n_bytes

    @property
    def row_step(self) -> int:
        """Whole heads only."""
        return self.head_dim

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return whole heads' rows in Meta's order, in new memory."""
        halves = self.inner.rows(start, stop).view(-1, 2, self.head_dim // 2, *self.shape[1:])
        return halves.transpose(1, 2).flatten(0, 2)


def pieces(source: TensorSource) -> Iterator[tuple[int, int]]:
    """Yield the row ranges, each about a MiB, that a tensor is read by."""
    n_rows = source.shape[0]
    row_elements = math.prod(source.shape[1:])
    step = max(1, PIECE_ELEMENTS // max(1, row_elements * source.row_step)) * source.row_step
    for start in range(0, n_rows, step):
        yield start, min(start + step, n_rows)


def same_values(a: TensorSource, b: TensorSource) -> bool:
    """Whether two tensors are equal bit for bit; stops reading at the first difference."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return all(torch.equal(a.rows(*piece), b.rows(*piece)) for piece in pieces(a))


@dataclass(slots=True)
class FileCheckpoint:
    """A model whose tensors are read from files; what every reader returns.

    `weights` is what its matrices are packed in ("int4"), None where they are plain numbers or
    are decoded to such.
    """

    path: Path
    format: str
    config: ModelConfig
    stop_token_ids: tuple[int, ...]
    sources: Mapping[str, TensorSource]
    closers: list[Callable[[], None]] = field(default_factory=list)
    weights: str | None = None

    def names(self) -> list[str]:
        """Return the names of all tensors, in file order."""
        return list(self.sources)

    def n_bytes(self) -> int:
        """Return the bytes of all tensors as they lie on disk."""
        return sum(source.n_bytes for source in self.sources.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Yield (name, tensor, bytes on disk), each tensor whole and in its own memory."""
        for name, source in self.sources.items():
            tensor = torch.empty(source.shape, dtype=source.dtype)
            for start, stop in pieces(source):
                tensor[start:stop] = source.rows(start, stop)
            yield name, tensor, source.n_bytes

    def close(self) -> None:
        """Release the files, mapped ones included, and forget the tensors."""
        self.sources = {}
        while self.closers:
            self.closers.pop()()
