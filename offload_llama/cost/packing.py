"""How weights in 8 and 4 bits lie in memory, and which kernel multiplies by them. No torch here.

    N  rows of a matrix (its outputs)    K  columns (its inputs)    g  columns that share a scale

Planner and engine both ask here, so they cannot disagree on a byte.
"""

from __future__ import annotations

INT4_GROUPS = {"int4": 64, "int4-g32": 32}
"""Columns that share a scale, by the name of the weights."""
PACKED = ("int8", *INT4_GROUPS)
OUTPUT_WEIGHTS = "int8"
"""What embedding and output are in beside packed matrices: in 4 bits they would cost the most."""
LEAST_GROUP = 32
PAIR_GROUP = 256
"""Largest group that the card's 4-bit kernel takes; 8-bit rows are cut into such."""
SCRATCH_ELEMENTS = 1 << 22
"""Weights that the portable kernel decodes at a time."""

TINYGEMM, PORTABLE = "tinygemm", "portable"
TINYGEMM_CAPABILITY = (8, 0)
TINYGEMM_ROWS = 8
"""The kernel works on whole tiles of this many rows.

Source: PyTorch, aten/src/ATen/native/cuda/int4mm.cu, kNTileSize.
"""


def bits_of(weights: str) -> int:
    """Return the bits of one code."""
    return 8 if weights == "int8" else 4


def group_of(weights: str, columns: int) -> int:
    """Return how many columns share a scale: the whole row with int8, else as the name says.

    Rows that are no multiple of the named group have the smallest group there is.
    """
    if weights == "int8":
        return columns
    named = INT4_GROUPS[weights]
    return named if columns % named == 0 else LEAST_GROUP


def can_pack(weights: str, columns: int) -> bool:
    """Whether rows of this length can be kept so: 4-bit ones come in whole groups."""
    return weights == "int8" or columns % LEAST_GROUP == 0


def pair_group(columns: int) -> int | None:
    """Return the group that 8-bit rows are cut into for the 4-bit kernel, None if none fits."""
    group = PAIR_GROUP
    while group >= LEAST_GROUP:
        if columns % group == 0:
            return group
        group //= 2
    return None


def card_kernel(weights: str, capability: tuple[int, int], rows: int, columns: int) -> str:
    """Return the kernel that a CUDA card of this capability multiplies such a matrix with."""
    fits = rows % TINYGEMM_ROWS == 0 and columns % LEAST_GROUP == 0
    return TINYGEMM if capability >= TINYGEMM_CAPABILITY and fits else PORTABLE


def tensor_sizes(weights: str, kernel: str, rows: int, columns: int) -> tuple[int, ...]:
    """Return the bytes of each tensor that a packed matrix consists of."""
    if kernel == TINYGEMM:
        group = group_of(weights, columns) if weights != "int8" else pair_group(columns)
        assert group is not None
        half = rows * columns // 2, columns // group * rows * 4
        return half * (1 if weights != "int8" else 2)
    scales = rows * (columns // group_of(weights, columns)) * 2
    if weights == "int8":
        return rows * columns, scales
    return rows * columns // 2, scales, scales


def embedding_sizes(kernel: str, rows: int, columns: int, *, tied: bool) -> tuple[int, ...]:
    """Return the bytes of each tensor of embedding and output beside packed matrices.

    The embedding is looked up row by row. A tied output multiplies by the same tensors, unless
    `kernel`, the output's, keeps them in an order of its own.
    """
    looked_up = tensor_sizes(OUTPUT_WEIGHTS, PORTABLE, rows, columns)
    if tied and kernel == PORTABLE:
        return looked_up
    return looked_up + tensor_sizes(OUTPUT_WEIGHTS, kernel, rows, columns)


def block_rows(columns: int) -> int:
    """Return the rows that the portable kernel decodes at a time."""
    return max(1, SCRATCH_ELEMENTS // columns)
