"""Weight matrices in 32 to 4 bits: how they are packed, and how they multiply."""

from __future__ import annotations

from offload_llama.weights.codes import Codes, quantize
from offload_llama.weights.kernels import Kernel, backends, choose_kernel, empty_like_packed
from offload_llama.weights.linear import (
    Embedding,
    Linear,
    QuantEmbedding,
    QuantLinear,
    stacked,
    together,
)

__all__ = [
    "Codes",
    "Embedding",
    "Kernel",
    "Linear",
    "QuantEmbedding",
    "QuantLinear",
    "backends",
    "choose_kernel",
    "empty_like_packed",
    "quantize",
    "stacked",
    "together",
]
