"""Models saved in 8 or 4 bits: `offload_llama.json`, and `weights.safetensors` with the codes.

Names and row order are Meta's. A packed matrix NAME is the tensors NAME.codes, NAME.scales and, in
4 bits, NAME.zeros, as `weights.Codes` has them; norms are plain tensors. Embedding and output are
in 8 bits whatever the rest is in.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload_llama.checkpoint.api import TensorSource
from offload_llama.checkpoint.damage import read_json
from offload_llama.checkpoint.safetensors_file import read_safetensors
from offload_llama.checkpoint.settings import model_config, rope_scaling
from offload_llama.checkpoint.sources import FileCheckpoint, PlainRows
from offload_llama.config import ModelConfig
from offload_llama.cost.packing import OUTPUT_WEIGHTS, PACKED, bits_of, can_pack, group_of
from offload_llama.errors import CheckpointError
from offload_llama.weights import Codes

SETTINGS, WEIGHTS = "offload_llama.json", "weights.safetensors"
FORMAT_VERSION = 1
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A matrix that lies in a file as codes; `rows` decodes them, `codes` gives them as they are.

    `parts` are codes, scales and, in 4 bits, zeros.
    """

    weights: str
    shape: tuple[int, ...]
    parts: tuple[PlainRows, ...]
    row_step: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoded rows."""
        return torch.float32

    @property
    def n_bytes(self) -> int:
        """Bytes on disk."""
        return sum(part.n_bytes for part in self.parts)

    def codes(self, start: int, stop: int) -> Codes:
        """Return the codes of rows [start, stop), in new memory."""
        codes, scales, *zeros = (part.rows(start, stop) for part in self.parts)
        return Codes(codes, scales, zeros[0] if zeros else None)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return what rows [start, stop) stand for, in new memory."""
        return self.codes(start, stop).dequantize(torch.float32)


def part_names(weights: str) -> tuple[str, ...]:
    """Return the endings of the tensors that a packed matrix is saved as."""
    return ("codes", "scales") if bits_of(weights) == 8 else ("codes", "scales", "zeros")


def part_shapes(weights: str, rows: int, columns: int) -> list[tuple[int, int]]:
    """Return the shapes of the tensors that a packed matrix is saved as."""
    width = columns * bits_of(weights) // 8
    groups = columns // group_of(weights, columns)
    return [(rows, width), *[(rows, groups)] * (len(part_names(weights)) - 1)]


def saved_weights(name: str, weights: str) -> str:
    """Return what a matrix is kept in, in a model whose layers are kept as `weights`."""
    return OUTPUT_WEIGHTS if name in (EMBEDDING, OUTPUT) else weights


def packed_config(folder: Path) -> ModelConfig:
    """Return the shape of a model that was saved packed; no tensor is looked at.

    Raises:
        CheckpointError: its settings are damaged, or of a later version.
    """
    return _read_settings(folder)[0]


def _read_settings(folder: Path) -> tuple[ModelConfig, str, tuple[int, ...]]:
    path = folder / SETTINGS
    data = read_json(path)
    if data.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format {data.get('format')!r}, but this version reads format "
            f"{FORMAT_VERSION}; save the model again with offload-llama quantize"
        )
    fields, weights, stops = data.get("config"), data.get("weights"), data.get("stop_token_ids")
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    if (
        isinstance(fields, dict)
        and set(fields) <= names
        and isinstance(stops, list)
        and weights in PACKED
    ):
        with contextlib.suppress(TypeError, ValueError):
            return _config(path, dict(fields)), weights, tuple(int(i) for i in stops)
    raise CheckpointError(f"{path}: damaged; save the model again with offload-llama quantize")


def _config(path: Path, fields: dict[str, Any]) -> ModelConfig:
    if fields.get("rope_scaling"):
        fields["rope_scaling"] = rope_scaling(path, **fields["rope_scaling"])
    if fields.get("rope_freq_factors"):
        fields["rope_freq_factors"] = tuple(map(float, fields["rope_freq_factors"]))
    return model_config(path, **fields)


def open_packed(folder: Path) -> FileCheckpoint:
    """Open a model that was saved packed; no tensor is read yet.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    config, weights, stops = _read_settings(folder)
    file, tensors = read_safetensors(
        folder / WEIGHTS, {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8,
                           "I8": torch.int8}
    )  # fmt: skip
    try:
        sources: dict[str, TensorSource] = {}
        for name, source in tensors.items():
            matrix, _, ending = name.rpartition(".")
            if ending == "codes":
                sources[matrix] = _packed(folder, matrix, saved_weights(matrix, weights), tensors)
            elif ending not in part_names("int4"):
                sources[name] = source
    except BaseException:
        file.close()
        raise
    return FileCheckpoint(folder, "packed", config, stops, sources, [file.close], weights)


def _packed(folder: Path, name: str, weights: str, tensors: dict[str, PlainRows]) -> PackedRows:
    """Return the reader of one matrix, its tensors checked against each other."""
    found = [tensors.get(f"{name}.{ending}") for ending in part_names(weights)]
    parts = tuple(part for part in found if part is not None)
    rows, width = parts[0].shape if len(parts[0].shape) == 2 else (0, 0)
    columns = width * 8 // bits_of(weights)
    sound = len(parts) == len(found) and rows and can_pack(weights, columns)
    if not sound or [part.shape for part in parts] != part_shapes(weights, rows, columns):
        raise CheckpointError(
            f"{folder / WEIGHTS}: tensor {name} is not complete; save the model again with "
            "offload-llama quantize"
        )
    return PackedRows(weights, (rows, columns), parts)
