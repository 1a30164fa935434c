"""The 4-bit matrix products of the CUDA path, with their limits.

The card's own order of the codes is no business of the engine: here they are in the order of the
CPU's kernel, which computes the values, in a tensor of the shape and size that the card would make.
Rows beyond whole blocks of that kernel stay as they came.

Source: PyTorch, aten/src/ATen/native/cuda/int4mm.cu, for shapes, limits and meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload_llama.device.sim.dispatch import CardMode, aten
from offload_llama.device.sim.errors import PlacementError
from offload_llama.device.sim.schemas import handles
from offload_llama.device.sim.site import caller
from offload_llama.device.sim.tensor import SimTensor

_TILE_ROWS, _TILE_COLUMNS, _LANES = 8, 16, 32
_TILES = (2, 4, 8)
_GROUPS = (32, 64, 128, 256)
_CPU_ROWS = 16


def _check(name: str, *operands: Any) -> None:
    if not all(isinstance(x, SimTensor) for x in operands):
        raise PlacementError(f"{name} mixes the card with a host tensor ({caller()})")
    if torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError(f"{name} is only supported on devices with compute capability >= 8.0")


def _converted(codes: torch.Tensor, tiles: int) -> torch.Tensor:
    rows, width = codes.shape
    whole = rows // _CPU_ROWS * _CPU_ROWS
    ordered = codes
    if whole:
        pairs = torch.stack((codes[:whole] >> 4, codes[:whole] & 15), dim=-1)
        numbers = pairs.view(whole, 2 * width).to(torch.int32)
        head = aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        ordered = torch.cat((head, codes[whole:]))
    steps = 2 * width // (tiles * _TILE_COLUMNS)
    shape = rows // _TILE_ROWS, steps, _LANES, tiles // 2
    return ordered.reshape(-1).view(torch.int32).view(shape).clone()


@handles(aten._convert_weight_to_int4pack.default)
def convert(mode: CardMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """(N, K/2) uint8, even columns in the high halves -> (N/8, K/(16 tiles), 32, tiles/2) int32."""
    codes, tiles = args
    _check("_convert_weight_to_int4pack", codes)
    rows, width = codes.shape
    if codes.dtype != torch.uint8 or tiles not in _TILES:
        raise RuntimeError("_convert_weight_to_int4pack takes uint8 and 2, 4 or 8 inner tiles")
    if rows % _TILE_ROWS or 2 * width % (tiles * _TILE_COLUMNS):
        raise RuntimeError(
            "_convert_weight_to_int4pack: rows must be a multiple of 8, columns one of 16 per tile"
        )
    return mode.compute(_converted, "_convert_weight_to_int4pack", [codes.raw, tiles], {}, [codes])


def _product(
    x: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor
) -> torch.Tensor:
    rows, columns = packed.shape[0] * _TILE_ROWS, x.shape[1]
    codes = packed.reshape(-1).view(torch.uint8).view(rows, columns // 2)
    whole = rows // _CPU_ROWS * _CPU_ROWS
    parts = []
    if whole:
        head = scales[:, :whole].contiguous()
        parts.append(aten._weight_int4pack_mm_for_cpu(x, codes[:whole], group, head))
    if whole < rows:
        pairs = torch.stack((codes[whole:] >> 4, codes[whole:] & 15), dim=-1)
        numbers = pairs.view(rows - whole, -1, group).float().sub_(8)
        scale, zero = scales[:, whole:].float().transpose(0, 1).unsqueeze(-2).unbind(-1)
        weight = torch.addcmul(zero, numbers, scale).reshape(rows - whole, columns)
        parts.append((x.float() @ weight.t()).to(x.dtype))
    return torch.cat(parts, dim=-1)


@handles(aten._weight_int4pack_mm.default)
def product(mode: CardMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """x (n, K), packed codes, the group, scales and zeros (K/group, N, 2) -> (n, N)."""
    x, packed, group, scales = args
    name = "_weight_int4pack_mm"
    _check(name, x, packed, scales)
    if x.dtype != torch.bfloat16 or scales.dtype != torch.bfloat16:
        raise RuntimeError(f"{name} takes bfloat16 activations, scales and zeros")
    if packed.dtype != torch.int32 or packed.dim() != 4 or group not in _GROUPS:
        raise RuntimeError(f"{name} takes converted codes in groups of 32, 64, 128 or 256")
    shape = (x.shape[1] // group, packed.shape[0] * _TILE_ROWS, 2)
    if scales.shape != shape or not scales.is_contiguous() or not x.is_contiguous():
        raise RuntimeError(f"{name} takes contiguous activations, and scales and zeros {shape}")
    operands = [x, packed, scales]
    return mode.compute(_product, name, [x.raw, packed.raw, group, scales.raw], {}, operands)
