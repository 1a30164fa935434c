"""Models in GGUF files, architecture `llama`.

A converter to GGUF brings wq and wk into Meta's row order (rotary pairs side by side), so rows
are taken as they lie; rotary scaling comes as a tensor of divisors, `rope_freqs.weight`.

Source: the ggml project's GGUF specification, and the tensor names of its llama architecture.
"""

from __future__ import annotations

import math
from pathlib import Path

from offload_llama.checkpoint.api import TensorSource
from offload_llama.checkpoint.damage import cut_short
from offload_llama.checkpoint.dequant import TENSOR_TYPES, QuantRows
from offload_llama.checkpoint.gguf_config import check_kind, gguf_config, meta_name
from offload_llama.checkpoint.gguf_header import (
    GGUFHeader,
    TensorEntry,
    read_header,
    read_metadata,
)
from offload_llama.checkpoint.sources import DataFile, FileCheckpoint, PlainRows
from offload_llama.errors import CheckpointError

__all__ = ["gguf_config", "meta_name", "open_gguf", "read_metadata"]

ROPE_FACTORS = "rope_freqs.weight"

_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def type_name(type_id: int) -> str:
    """Return the name of a tensor type, supported or not."""
    if type_id in TENSOR_TYPES:
        return TENSOR_TYPES[type_id].name
    import gguf

    try:
        return f"{gguf.GGMLQuantizationType(type_id).name} (id {type_id})"
    except ValueError:
        return f"unknown id {type_id}"


def open_gguf(path: Path) -> FileCheckpoint:
    """Open a GGUF model; no tensor is read yet.

    Raises:
        CheckpointError: the file is damaged, of another architecture than llama, one of several
            parts, or holds a tensor of a type that is not supported.
    """
    header = read_header(path)
    check_kind(path, header)
    file = DataFile(path, header.size_bytes)
    try:
        raw = {entry.name: _source(path, header, file, entry) for entry in header.tensors}
        if len(raw) < len(header.tensors):
            raise CheckpointError(f"{path}: a tensor's name stands in the table twice")
        factors = raw.pop(ROPE_FACTORS, None)
        values = tuple(factors.rows(0, factors.shape[0]).tolist()) if factors else None
        sources = {meta_name(name): source for name, source in raw.items()}
        shapes = {name: source.shape for name, source in sources.items()}
        config = gguf_config(path, header.metadata, shapes, values)
    except Exception:
        file.close()
        raise
    stops = [header.metadata.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS]
    ids = tuple(dict.fromkeys(i for i in stops if isinstance(i, int)))
    return FileCheckpoint(path, "gguf", config, ids, sources, [file.close])


def _source(path: Path, header: GGUFHeader, file: DataFile, entry: TensorEntry) -> TensorSource:
    """Return the reader of one tensor, checked to lie wholly within the file."""
    kind = TENSOR_TYPES.get(entry.type_id)
    if kind is None:
        supported = ", ".join(t.name for t in TENSOR_TYPES.values())
        raise CheckpointError(
            f"{path}: tensor {entry.name} has type {type_name(entry.type_id)}, which is not "
            f"supported; supported: {supported}"
        )
    if entry.shape[-1] % kind.block_elements or not math.prod(entry.shape):
        raise CheckpointError(
            f"{path}: tensor {entry.name} of type {kind.name} has rows of {entry.shape[-1]} "
            f"values, not a multiple of the block of {kind.block_elements}; damaged file"
        )
    offset = header.data_start + entry.offset
    stop = offset + math.prod(entry.shape) // kind.block_elements * kind.block_bytes
    if stop > header.size_bytes:
        raise cut_short(path, header.size_bytes, stop)
    if kind.dtype is not None:
        return PlainRows(file, offset, entry.shape, kind.dtype)
    return QuantRows(file, offset, entry.shape, kind)
