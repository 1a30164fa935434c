"""Matrices in 8 or 4 bits, row by row: how they are made, and what they stand for.

    N  rows    K  columns    g  columns that share a scale    G = K / g

An 8-bit code c stands for c * scale, with one scale a row. A 4-bit code c of 0 to 15 stands for
(c - 8) * scale + zero. Scales and zeros are bfloat16, the dtype of the kernels that read them, and
codes are chosen for the rounded ones, so the rounding of a scale costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload_llama.cost.packing import bits_of, group_of

SCALE_DTYPE = torch.bfloat16
_MIDDLE = 8
# Mean square error in groups of 64 after 0, 1, 2 and 4 fits, of the default model's weights that
# were 4-bit in groups of 32: 0.65 %, 0.57 %, 0.54 % and 0.52 % of theirs. A fit takes about 8 ns a
# weight.
_REFITS = 3


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix (N, K) in few bits.

    `codes` are (N, K) int8, or (N, K/2) uint8 with even columns in the low halves. `scales` and
    `zeros` are (N, G); there are no zeros with 8 bits.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    @classmethod
    def empty(
        cls, weights: str, rows: int, columns: int, device: torch.device | None = None
    ) -> Codes:
        """Return uninitialised codes for weights of this name, in host memory unless told."""
        groups = columns // group_of(weights, columns)
        scales = torch.empty(rows, groups, dtype=SCALE_DTYPE, device=device)
        if bits_of(weights) == 8:
            return cls(torch.empty(rows, columns, dtype=torch.int8, device=device), scales, None)
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
        return cls(codes, scales, torch.empty_like(scales))

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 8 if self.zeros is None else 4

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, width = self.codes.shape
        return rows, width * 8 // self.bits

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that there are: codes, scales and, with 4 bits, zeros."""
        found = (self.codes, self.scales, self.zeros)
        return [tensor for tensor in found if tensor is not None]

    def rows(self, index: slice | torch.Tensor) -> Codes:
        """Return some rows: views of a slice, copies of rows by number."""
        zeros = None if self.zeros is None else self.zeros[index]
        return Codes(self.codes[index], self.scales[index], zeros)

    def copy_(self, source: Codes) -> None:
        """Overwrite these codes with others of the same shape."""
        for mine, other in zip(self.tensors(), source.tensors(), strict=True):
            mine.copy_(other)

    def numbers(self) -> torch.Tensor:
        """Return the codes as signed integers, (N, K) int8: 4-bit ones less 8."""
        if self.zeros is None:
            return self.codes
        halves = torch.stack((self.codes & 15, self.codes >> 4), dim=-1)
        return halves.view(torch.int8).sub_(_MIDDLE).view(self.shape)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what the codes stand for, (N, K) in this dtype: each product rounded once."""
        grouped = self.numbers().view(len(self.codes), -1, self.group).to(dtype)
        scales = self.scales.to(dtype)[..., None]
        if self.zeros is None:
            return grouped.mul_(scales).view(self.shape)
        zeros = self.zeros.to(dtype)[..., None]
        return torch.addcmul(zeros, grouped, scales).view(self.shape)


def quantize(rows: torch.Tensor, weights: str) -> Codes:
    """Return the codes of a matrix (N, K), on its device.

    int8 takes each row's largest magnitude as 127. int4 begins by spanning each group from its
    smallest to its largest value, and then fits scale and zero to the weights by least squares,
    anew for the codes that each fit gives. A matrix that was 4-bit in the same groups before gets
    the same codes again.
    """
    n_rows, columns = rows.shape
    grouped = rows.float().view(n_rows, -1, group_of(weights, columns))
    if bits_of(weights) == 8:
        scales = (grouped.abs().amax(-1) / 127).to(SCALE_DTYPE)
        codes = (grouped / _divisor(scales)).round_().clamp_(-127, 127)
        return Codes(codes.to(torch.int8).view(n_rows, columns), scales, None)
    low, high = grouped.aminmax(dim=-1)
    scales = ((high - low) / 15).to(SCALE_DTYPE)
    zeros = (low + _MIDDLE * scales.float()).to(SCALE_DTYPE)
    codes = _nearest(grouped, scales, zeros)
    mean = grouped.mean(-1)
    for _ in range(_REFITS):
        code_mean = codes.mean(-1)
        variance = (codes * codes).mean(-1) - code_mean * code_mean
        slope = ((codes * grouped).mean(-1) - code_mean * mean) / variance
        scales = torch.where(variance > 0, slope, scales.float()).to(SCALE_DTYPE)
        zeros = (mean - scales.float() * code_mean).to(SCALE_DTYPE)
        codes = _nearest(grouped, scales, zeros)
    pairs = codes.add_(_MIDDLE).to(torch.uint8).view(n_rows, -1, 2)
    return Codes(pairs[..., 0] | pairs[..., 1] << 4, scales, zeros)


def _nearest(grouped: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return the nearest 4-bit code of each weight, less 8, as float32 (N, G, g)."""
    steps = (grouped - zeros.float()[..., None]).div_(_divisor(scales))
    return steps.round_().clamp_(-_MIDDLE, _MIDDLE - 1)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """Return (N, G, 1) float32 to divide by; a group of equal values has a scale of zero."""
    return torch.where(scales == 0, 1.0, scales.float())[..., None]
