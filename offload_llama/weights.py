"""Weight matrices and how they multiply."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """y = x Wᵀ, without bias. `weight` is a buffer, (out_features, in_features).

    Built on the meta device: it costs nothing until the loader puts the real matrix in place.
    """

    weight: torch.Tensor

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(out_features, in_features, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """Rows of a (vocab_size, dim) matrix by token id."""

    weight: torch.Tensor

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(vocab_size, dim, device="meta"))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (N,) int64 -> (N, dim)."""
        return F.embedding(tokens, self.weight)
