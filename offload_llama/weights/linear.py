"""Weight matrices and how they multiply: plain ones, packed ones, and several over one input.

A module that multiplies has `product`, which gives the rows of every matrix that lies in the same
memory, and `sizes`, how many rows each of those has (None where it is alone).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from offload_llama.weights.codes import Codes
from offload_llama.weights.kernels import Kernel


class Linear(nn.Module):
    """y = x Wᵀ, without bias. `weight` is a buffer, (out_features, in_features).

    Built on the meta device: it costs nothing until the loader puts the real matrix in place.
    """

    weight: torch.Tensor
    sizes: list[int] | None = None

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.shape = (out_features, in_features)
        self.register_buffer("weight", torch.empty(out_features, in_features, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        return F.linear(x, self.weight)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with the whole matrix that `weight` is the first rows of."""
        [whole] = self._whole
        return F.linear(x, whole)

    def lie_in(self, whole: torch.Tensor, first_row: int) -> None:
        """Let `weight` be some rows of a larger matrix."""
        self.weight = whole[first_row : first_row + self.shape[0]]
        # In a tuple, so that it is no second buffer of the module.
        self._whole = (whole,)


class QuantLinear(nn.Module):
    """y = x Wᵀ with W in 8 or 4 bits, (out_features, in_features).

    Its buffers are what `Kernel.pack` returned. `sizes` are the rows of each matrix that lies in
    this one, None if it is alone.
    """

    def __init__(
        self,
        kernel: Kernel,
        tensors: Mapping[str, torch.Tensor],
        shape: tuple[int, int],
        sizes: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.kernel, self.sizes = kernel, sizes
        self.shape = shape if sizes is None else (sizes[0], shape[1])
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (n, in_features) -> (n, out_features)."""
        out = self.product(x)
        return out if self.sizes is None else out[:, : self.shape[0]]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with all rows, also those of the matrices below this one."""
        return self.kernel.multiply(x, cast("dict[str, torch.Tensor]", self._buffers))


class Rows(nn.Module):
    """A matrix that lies below others in one `QuantLinear`."""

    sizes: list[int] | None = None

    def __init__(self, first: QuantLinear, index: int) -> None:
        super().__init__()
        # In a tuple: `first` holds the buffers, and is their only owner.
        self._first = (first,)
        assert first.sizes is not None
        start = sum(first.sizes[:index])
        self._slice = slice(start, start + first.sizes[index])
        self.shape = (first.sizes[index], first.shape[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (n, in_features) -> (n, out_features)."""
        [first] = self._first
        return first.product(x)[:, self._slice]


class Multiplies(Protocol):
    """A module that multiplies by a matrix."""

    @property
    def sizes(self) -> list[int] | None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def product(self, x: torch.Tensor) -> torch.Tensor: ...


def together(x: torch.Tensor, *linears: nn.Module) -> Sequence[torch.Tensor]:
    """Return x's product with each matrix; those that lie in one are multiplied at once."""
    first = cast(Multiplies, linears[0])
    if first.sizes is None:
        return [linear(x) for linear in linears]
    return torch.split(first.product(x), first.sizes, dim=-1)


def stacked(modules: Sequence[nn.Module], whole: torch.Tensor | nn.Module) -> list[nn.Module]:
    """Return the modules for matrices that lie below each other in one.

    Args:
        modules: the `Linear`s that the model was built with, in order.
        whole: (rows of all, in_features), or a module to take the place of the first: that matrix
            packed, with `sizes` if there are others.
    """
    if isinstance(whole, nn.Module):
        first = cast(QuantLinear, whole)
        return [whole, *(Rows(first, index) for index in range(1, len(modules)))]
    linears = [cast(Linear, module) for module in modules]
    row = 0
    for linear in linears:
        linear.lie_in(whole, row)
        row += linear.shape[0]
    linears[0].sizes = [linear.shape[0] for linear in linears]
    return list(linears)


class Embedding(nn.Module):
    """Rows of a (vocab_size, dim) matrix by token id."""

    weight: torch.Tensor

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(vocab_size, dim, device="meta"))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (N,) int64 -> (N, dim)."""
        return F.embedding(tokens, self.weight)


class QuantEmbedding(nn.Module):
    """Rows of a matrix in 8 bits, decoded as they are looked up."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (N,) int64 -> (N, dim)."""
        return Codes(self.codes, self.scales, None).rows(tokens).dequantize(self.dtype)
