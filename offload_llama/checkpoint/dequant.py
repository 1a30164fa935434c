"""GGUF's quantised blocks as float32 rows, equal bit for bit to the `gguf` package's.

The legacy types (the default model is made of them) are decoded here with a handful of torch
operations per piece, some ten times faster; the K types are left to the package, in whose numpy
code they are fast enough.

Source: ggml's block layouts (`ggml-common.h`) and the `gguf` package's `quants.py`, the reference
that the tests compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload_llama.checkpoint.sources import DataFile


@dataclass(frozen=True, slots=True)
class TensorType:
    """How a GGUF tensor type lays out its values: `block_elements` in `block_bytes`.

    `dtype` is set for plain floats; other types are decoded to float32.
    """

    name: str
    block_elements: int
    block_bytes: int
    dtype: torch.dtype | None = None


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4, torch.float32),
    1: TensorType("F16", 1, 2, torch.float16),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2, torch.bfloat16),
}


def _halves(blocks: torch.Tensor, index: int) -> torch.Tensor:
    """Return the index-th float16 of each block as float32, (blocks, 1)."""
    return blocks.view(torch.float16)[:, index : index + 1].float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """(blocks, 16) bytes -> (blocks, 32): all low halves, then all high ones."""
    out = torch.empty(len(packed), 2, 16, dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=out[:, 0])
    torch.bitwise_right_shift(packed, 4, out=out[:, 1])
    return out.view(-1, 32)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """(blocks, 4) bytes -> (blocks, 32) values 0 or 16, one per bit, lowest bit first."""
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits.bitwise_and_(1) << 4).view(-1, 32)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 2:]).view(torch.int8) - 8) * _halves(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 4:]) * _halves(blocks, 0)).add_(_halves(blocks, 1))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return (values.view(torch.int8) - 16) * _halves(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return (values * _halves(blocks, 0)).add_(_halves(blocks, 1))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8) * _halves(blocks, 0)


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}


def _package_decode(blocks: torch.Tensor, name: str) -> torch.Tensor:
    import gguf
    import numpy as np

    # The package works on 16 rows at a time: one row per call keeps its arrays long.
    with np.errstate(all="ignore"):
        flat = gguf.dequantize(blocks.view(1, -1).numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(flat)


def dequantize(blocks: torch.Tensor, kind: TensorType) -> torch.Tensor:
    """Return the float32 values of uint8 blocks, (n, block_bytes) -> (n * block_elements,)."""
    decode = _DECODERS.get(kind.name)
    values = decode(blocks) if decode else _package_decode(blocks, kind.name)
    return values.view(-1)


@dataclass(frozen=True, slots=True)
class QuantRows:
    """A matrix stored in quantised blocks, which never cross a row; rows come as float32."""

    file: DataFile
    offset: int
    shape: tuple[int, ...]
    kind: TensorType

    @property
    def row_step(self) -> int:
        """Whole blocks only: any rows of a matrix, a block's values of a vector."""
        return self.kind.block_elements if len(self.shape) == 1 else 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoded rows."""
        return torch.float32

    @property
    def n_bytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) // self.kind.block_elements * self.kind.block_bytes

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return decoded rows [start, stop) in new memory."""
        first, last = (
            row * math.prod(self.shape[1:]) // self.kind.block_elements * self.kind.block_bytes
            for row in (start, stop)
        )
        data = self.file.read(self.offset + first, last - first)
        values = dequantize(data.view(-1, self.kind.block_bytes), self.kind)
        return values.view(stop - start, *self.shape[1:])
