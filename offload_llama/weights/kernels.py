"""How a packed matrix multiplies: PyTorch's kernels for CPU and CUDA, and one in plain operations.

Each kernel lays codes out in its own way (`pack`) and multiplies by them (`multiply`). `Portable`
runs everywhere and is what the others are tested against. The fast ones read activations in
bfloat16 and sum in float32.

    n  rows of activations    N  rows of the matrix    K  columns    g  columns that share a scale
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from offload_llama.cost.packing import (
    PACKED,
    PORTABLE,
    TINYGEMM,
    TINYGEMM_ROWS,
    bits_of,
    block_rows,
    card_kernel,
    group_of,
    pair_group,
)
from offload_llama.weights.codes import SCALE_DTYPE, Codes

aten = torch.ops.aten

Tensors = Mapping[str, torch.Tensor]

# The CPU kernel for 8 bits reads whole vectors of a row, beyond its end if need be.
_CPU_INT8_COLUMNS = 16
# Rows are interleaved in blocks of 32 (AVX2) or 64 (AVX-512), and packed a whole number at a time.
_BLOCK_ROWS = 64
_CPU_ROWS = 16
_PACK_ELEMENTS = 1 << 19
# From this many rows of activations on, decoding the matrix for a dense product costs less.
_DENSE_FROM, _DENSE_FROM_4_BITS = 64, 192


class Kernel(Protocol):
    """One way to keep a packed matrix on a device and to multiply by it."""

    name: str

    def pack(self, codes: Codes, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the tensors to keep, on the device; they may be those of `codes`."""
        ...

    def multiply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """x: (n, K) -> (n, N), in x's dtype."""
        ...


class Portable:
    """Decodes a block of rows at a time and multiplies by it, in the dtype of the activations."""

    name = PORTABLE

    def pack(self, codes: Codes, device: torch.device) -> dict[str, torch.Tensor]:
        names = ("codes", "scales", "zeros")
        return dict(zip(names, (t.to(device) for t in codes.tensors()), strict=False))

    def multiply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        codes = Codes(tensors["codes"], tensors["scales"], tensors.get("zeros"))
        return multiply_by_blocks(x, codes)


def multiply_by_blocks(x: torch.Tensor, codes: Codes) -> torch.Tensor:
    """x: (n, K) -> (n, N); no more than `block_rows` rows are decoded at once."""
    n_rows, columns = codes.shape
    step = block_rows(columns)
    if n_rows <= step:
        return F.linear(x, codes.dequantize(x.dtype))
    out = x.new_empty(len(x), n_rows)
    for start in range(0, n_rows, step):
        block = slice(start, start + step)
        # Nothing here holds the decoded rows when the next ones are made.
        out[:, block] = F.linear(x, codes.rows(block).dequantize(x.dtype))
    return out


class CpuInt8:
    """`_weight_int8pack_mm`: reads the codes as they are."""

    name = "torch _weight_int8pack_mm"

    def pack(self, codes: Codes, device: torch.device) -> dict[str, torch.Tensor]:
        return {"codes": codes.codes, "scales": codes.scales}

    def multiply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        codes, scales = tensors["codes"], tensors["scales"]
        if len(x) >= _DENSE_FROM:
            return multiply_by_blocks(x, Codes(codes, scales, None))
        out = aten._weight_int8pack_mm(x.to(SCALE_DTYPE), codes, scales.view(-1))
        return out.to(x.dtype)  # type: ignore[no-any-return]  # untyped in torch


class CpuInt4:
    """`_weight_int4pack_mm_for_cpu`: reads codes that are interleaved in blocks of rows."""

    name = "torch _weight_int4pack_mm_for_cpu"

    def pack(self, codes: Codes, device: torch.device) -> dict[str, torch.Tensor]:
        packed = torch.empty_like(codes.codes)
        for start, stop in _pack_blocks(*codes.shape):
            numbers = codes.rows(slice(start, stop)).numbers().to(torch.int32).add_(8)
            packed[start:stop] = aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        return {"packed": packed, "scales": scales_and_zeros(codes)}

    def multiply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        packed, scales = tensors["packed"], tensors["scales"]
        if len(x) >= _DENSE_FROM_4_BITS and cpu_block_rows() is not None:
            return multiply_by_blocks(x, unpacked(packed, scales))
        group = x.shape[-1] // len(scales)
        out = aten._weight_int4pack_mm_for_cpu(x.to(SCALE_DTYPE), packed, group, scales)
        return out.to(x.dtype)  # type: ignore[no-any-return]  # untyped in torch


def _pack_blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield row ranges to be packed one after the other, so that little lies unpacked."""
    step = max(1, _PACK_ELEMENTS // columns // _BLOCK_ROWS) * _BLOCK_ROWS
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def scales_and_zeros(codes: Codes) -> torch.Tensor:
    """Return scales and zeros side by side, (G, N, 2) bfloat16, as PyTorch's 4-bit kernels ask."""
    assert codes.zeros is not None
    return torch.stack((codes.scales.t(), codes.zeros.t()), dim=-1)


@functools.cache
def cpu_block_rows() -> int | None:
    """Return how many rows this CPU's 4-bit layout interleaves, None if it is another layout.

    The layout depends on the CPU, so it is asked for.
    """
    rows, columns = 2 * _BLOCK_ROWS + _CPU_ROWS, 2
    numbers = (torch.arange(rows * columns, dtype=torch.int32) * 7 % 16).view(rows, columns)
    packed = aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    for block in (_BLOCK_ROWS, _BLOCK_ROWS // 2):
        if torch.equal(_deinterleaved(packed, block), numbers.to(torch.uint8)):
            return block
    return None


def _deinterleaved(packed: torch.Tensor, block: int) -> torch.Tensor:
    """Return the codes (N, K) uint8 of a packed matrix (N, K/2).

    In a block of b rows each column's b codes lie in b/2 bytes. A whole block has the first half
    of its rows in the low halves of the bytes; in what is left two neighbours share a byte.
    """
    rows, width = packed.shape
    whole = rows // block * block
    pieces = []
    if whole:
        lanes = packed[:whole].view(whole // block, 2 * width, block // 2)
        codes = torch.stack((lanes & 15, lanes >> 4), dim=1)  # (blocks, 2, K, b / 2)
        pieces.append(codes.transpose(2, 3).reshape(whole, 2 * width))
    if whole < rows:
        lanes = packed[whole:].view(2 * width, (rows - whole) // 2)
        codes = torch.stack((lanes & 15, lanes >> 4), dim=-1)  # (K, rows / 2, 2)
        pieces.append(codes.view(2 * width, rows - whole).t())
    return torch.cat(pieces)


def unpacked(packed: torch.Tensor, scales: torch.Tensor) -> Codes:
    """Return the codes of a matrix that `CpuInt4` packed."""
    block = cpu_block_rows()
    assert block is not None
    low, high = _deinterleaved(packed, block).view(len(packed), -1, 2).unbind(-1)
    by_row = (part.t().contiguous() for part in scales.unbind(-1))
    return Codes(low | high << 4, *by_row)


def empty_like_packed(
    weights: str, device: torch.device, rows: int, columns: int
) -> dict[str, torch.Tensor]:
    """Return uninitialised tensors as the device's kernel keeps them, for cards of shapes only."""
    if choose_kernel(weights, device, rows, columns).name != TINYGEMM:
        codes = Codes.empty(weights, rows, columns, device)
        return dict(zip(("codes", "scales", "zeros"), codes.tensors(), strict=False))
    whole = bits_of(weights) == 4
    group = group_of(weights, columns) if whole else pair_group(columns)
    assert group is not None
    return {
        f"{part}{name}": torch.empty(shape, dtype=dtype, device=device)
        for part in ("", "low_")[: 1 if whole else 2]
        for name, shape, dtype in (
            ("packed", _tinygemm_shape(rows, columns), torch.int32),
            ("scales", (columns // group, rows, 2), SCALE_DTYPE),
        )
    }


def _tinygemm_shape(rows: int, columns: int) -> tuple[int, int, int, int]:
    """Return the shape of the codes in the card's layout: the more tiles at once, the better."""
    tiles = next(n for n in (8, 4, 2) if columns % (16 * n) == 0)
    return rows // TINYGEMM_ROWS, columns // (16 * tiles), 32, tiles // 2


class Tinygemm:
    """`_weight_int4pack_mm` of CUDA cards from 8.0 on.

    8-bit codes are two 4-bit ones: c = 16 (high - 8) + (low - 8) + 8, each half with its own
    scales, so the same kernel reads both.
    """

    name = TINYGEMM

    def pack(self, codes: Codes, device: torch.device) -> dict[str, torch.Tensor]:
        if codes.bits == 4:
            return {
                "packed": self._converted(codes.codes, codes.shape[1], device),
                "scales": scales_and_zeros(codes).to(device),
            }
        rows, columns = codes.shape
        group = pair_group(columns)
        assert group is not None
        unsigned = codes.codes.view(torch.uint8) ^ 128
        scales = codes.scales.expand(rows, columns // group)
        high = Codes(_pairs(unsigned >> 4), scales * 16, torch.zeros_like(scales))
        low = Codes(_pairs(unsigned & 15), scales, scales * 8)
        return {
            f"{part}{name}": tensor
            for part, half in (("", high), ("low_", low))
            for name, tensor in self.pack(half, device).items()
        }

    def _converted(self, codes: torch.Tensor, columns: int, device: torch.device) -> torch.Tensor:
        """Return (N, K/2) codes in the card's layout; there the even column is in the high half."""
        shape = _tinygemm_shape(len(codes), columns)
        converted = torch.empty(shape, dtype=torch.int32, device=device)
        for start, stop in _pack_blocks(len(codes), columns):
            swapped = (codes[start:stop] >> 4 | codes[start:stop] << 4).to(device)
            tile = slice(start // TINYGEMM_ROWS, stop // TINYGEMM_ROWS)
            converted[tile] = aten._convert_weight_to_int4pack(swapped, 2 * shape[-1])
        return converted

    def multiply(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        narrow = x.to(SCALE_DTYPE)
        out = self._product(narrow, tensors["packed"], tensors["scales"])
        if "low_packed" in tensors:
            out += self._product(narrow, tensors["low_packed"], tensors["low_scales"])
        return out.to(x.dtype)

    def _product(self, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = aten._weight_int4pack_mm(x, packed, x.shape[-1] // len(scales), scales)
        return out


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """(N, K) codes of 4 bits -> (N, K/2), even columns in the low halves."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def choose_kernel(weights: str, device: torch.device, rows: int, columns: int) -> Kernel:
    """Return the kernel that this device has for a matrix (rows, columns) of packed weights."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        # AMD's layout of the codes is another one, and no test of ours has seen it.
        if (
            torch.version.hip is None
            and card_kernel(weights, capability, rows, columns) == TINYGEMM
        ):
            return Tinygemm()
    elif device.type == "cpu" and bits_of(weights) == 8:
        if columns % _CPU_INT8_COLUMNS == 0:
            return CpuInt8()
    elif device.type == "cpu" and rows % _CPU_ROWS == 0:
        return CpuInt4()
    return Portable()


def backends(device: torch.device) -> dict[str, str]:
    """Return the kernel for usual matrices by name of the weights, as `doctor` shows it."""
    return {weights: choose_kernel(weights, device, 4096, 4096).name for weights in PACKED}
