"""The safetensors container: a length, a JSON table of tensors, then their bytes.

Source: the format's description, "safetensors" README, section "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload_llama.checkpoint.damage import bad_file, check_is_data, cut_short
from offload_llama.checkpoint.sources import DataFile, PlainRows

# The reference implementation refuses longer headers too.
MAX_HEADER_BYTES = 100_000_000

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_safetensors(
    path: Path, dtypes: Mapping[str, torch.dtype] = _DTYPES
) -> tuple[DataFile, dict[str, PlainRows]]:
    """Open a safetensors file and return it with its tensors, none of them read yet.

    Args:
        dtypes: the dtypes that may be in it, by the format's names for them.

    Raises:
        CheckpointError: the file is no safetensors file, is damaged, cut short, or holds a
            tensor of another dtype.
    """
    size_bytes = check_is_data(path)
    table, data_start = _read_table(path, size_bytes)
    spans: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        spans[name] = _read_entry(path, size_bytes, name, entry, dtypes)
    end = data_start + max((stop for *_, stop in spans.values()), default=0)
    if end > size_bytes:
        raise cut_short(path, size_bytes, end)
    file = DataFile(path, size_bytes)
    tensors = {
        name: PlainRows(file, data_start + start, shape, dtype)
        for name, (dtype, shape, start, _) in sorted(spans.items(), key=lambda item: item[1][2])
    }
    return file, tensors


def _read_table(path: Path, size_bytes: int) -> tuple[dict[str, Any], int]:
    """Return the JSON table and the offset of the first data byte."""
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8:
            raise bad_file(path, size_bytes, "too short for a safetensors file; fetch it again")
        if header_bytes > MAX_HEADER_BYTES:
            raise bad_file(
                path,
                size_bytes,
                f"not a safetensors file, its first 8 bytes ask for a header of "
                f"{header_bytes:,} bytes",
            )
        if 8 + header_bytes > size_bytes:
            raise cut_short(path, size_bytes, 8 + header_bytes)
        header = file.read(header_bytes)
    try:
        table = json.loads(header)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise bad_file(path, size_bytes, f"its safetensors header is no JSON ({error})") from error
    if not isinstance(table, dict):
        raise bad_file(path, size_bytes, "its safetensors header is no JSON object")
    return table, 8 + header_bytes


def _read_entry(
    path: Path, size_bytes: int, name: str, entry: Any, dtypes: Mapping[str, torch.dtype]
) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Return dtype, shape, start and stop of one tensor, checked against each other."""
    try:
        dtype_name, shape = entry["dtype"], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        sound = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound or not shape:
        raise bad_file(path, size_bytes, f"the header entry of tensor {name} is damaged")
    if dtype_name not in dtypes:
        raise bad_file(
            path,
            size_bytes,
            f"tensor {name} is of dtype {dtype_name}; supported: {', '.join(dtypes)}",
        )
    dtype = dtypes[dtype_name]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise bad_file(
            path,
            size_bytes,
            f"tensor {name} of shape {list(shape)} and dtype {dtype_name} cannot be "
            f"{stop - start:,} bytes",
        )
    return dtype, shape, start, stop
