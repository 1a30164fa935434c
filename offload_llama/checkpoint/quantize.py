"""Saves a model in 8 or 4 bits, about a MiB at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from tqdm import tqdm

from offload_llama.checkpoint.api import Checkpoint, TensorSource
from offload_llama.checkpoint.open import open_checkpoint
from offload_llama.checkpoint.packed import (
    FORMAT_VERSION,
    SETTINGS,
    WEIGHTS,
    part_names,
    part_shapes,
    saved_weights,
)
from offload_llama.checkpoint.sources import pieces
from offload_llama.checkpoint.targets import check_packable, codes_of
from offload_llama.checkpoint.vocabulary_files import copy_vocabulary
from offload_llama.cost.packing import PACKED, bits_of
from offload_llama.errors import CheckpointError, ConfigError
from offload_llama.weights.codes import SCALE_DTYPE

_DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int8: "I8"
}  # fmt: skip
_HEADER_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the file: where its bytes begin, counted from the first tensor's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def quantize_checkpoint(
    src: str | Path, dst: str | Path, *, weights: str = "int4", progress: bool = False
) -> Path:
    """Write a model's weights in few bits into a folder that `open_checkpoint` reads; return it.

    The vocabulary's files are copied beside them. Loading the folder gives the very codes that
    loading the model with `--weights` would have given.

    Args:
        src: a model, as `open_checkpoint` takes it.
        dst: a folder that does not exist yet, or is empty.
        weights: int8, int4 or int4-g32.
        progress: show a bar on stderr.

    Raises:
        CheckpointError: the model cannot be read, or the folder cannot be written.
        ConfigError: the weights have another name, or the model's rows are not of whole groups.
    """
    if weights not in PACKED:
        raise ConfigError(f"--weights {weights} cannot be saved; use {', '.join(PACKED)}")
    target = Path(dst)
    checkpoint = open_checkpoint(src)
    try:
        check_packable({n: s.shape for n, s in checkpoint.sources.items()}, weights)
        _make_folder(target)
        try:
            _write(checkpoint, target, weights, progress)
            copy_vocabulary(checkpoint.path, target)
        except OSError as error:
            raise CheckpointError(f"{target}: cannot be written ({error.strerror})") from error
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
    finally:
        checkpoint.close()
    return target


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        full = any(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from error
    if full:
        raise CheckpointError(f"{folder} is not empty; name a folder that does not exist yet")


def _saved(checkpoint: Checkpoint, weights: str) -> Iterator[tuple[str, TensorSource, str | None]]:
    """Yield (name, source, packed as) of what is saved; None for plain tensors."""
    for name, source in checkpoint.sources.items():
        yield name, source, None if len(source.shape) == 1 else saved_weights(name, weights)


def _write(checkpoint: Checkpoint, folder: Path, weights: str, progress: bool) -> None:
    saved = list(_saved(checkpoint, weights))
    entries: dict[str, _Entry] = {}
    offset = 0
    for name, source, packed in saved:
        for entry in _entries(name, source.shape, packed):
            entries[entry.name] = dataclasses.replace(entry, offset=offset)
            offset += entry.n_bytes
    bar = tqdm(
        total=offset, desc="quantising", unit="B", unit_scale=True, leave=False, file=sys.stderr,
        disable=not progress,
    )  # fmt: skip
    with (folder / WEIGHTS).open("wb") as file, bar:
        start = _write_header(file, entries)
        for name, source, packed in saved:
            for first, stop in pieces(source):
                for ending, rows in _tensors(source, packed, first, stop):
                    entry = entries[name + ending]
                    row_bytes = entry.n_bytes // entry.shape[0]
                    file.seek(start + entry.offset + first * row_bytes)
                    file.write(rows.contiguous().view(torch.uint8).numpy().data)
                    bar.update(row_bytes * (stop - first))
    settings = {
        "format": FORMAT_VERSION,
        "weights": weights,
        "stop_token_ids": list(checkpoint.stop_token_ids),
        "config": dataclasses.asdict(checkpoint.config),
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", "utf-8")


def _entries(name: str, shape: tuple[int, ...], packed: str | None) -> Iterator[_Entry]:
    if packed is None:
        yield _Entry(name, torch.float32, shape, 0)
        return
    code = torch.int8 if bits_of(packed) == 8 else torch.uint8
    dtypes = [code, SCALE_DTYPE, SCALE_DTYPE]
    shapes = part_shapes(packed, *shape)
    for ending, part, dtype in zip(part_names(packed), shapes, dtypes, strict=False):
        yield _Entry(f"{name}.{ending}", dtype, part, 0)


def _tensors(
    source: TensorSource, packed: str | None, start: int, stop: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (ending of the name, rows) of what rows [start, stop) are saved as."""
    if packed is None:
        yield "", source.rows(start, stop).float()
        return
    tensors = codes_of(source, packed, start, stop).tensors()
    for ending, tensor in zip(part_names(packed), tensors, strict=True):
        yield f".{ending}", tensor


def _write_header(file: BinaryIO, entries: dict[str, _Entry]) -> int:
    """Write the table of tensors and return where their bytes begin."""
    table = {
        name: {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [entry.offset, entry.offset + entry.n_bytes],
        }
        for name, entry in entries.items()
    }
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    return 8 + len(text)
