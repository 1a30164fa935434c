"""Where a tensor's rows go as they are read: a plain tensor, or codes to be packed.

A target takes the rows of one or more tensors of a checkpoint in order, converted by `convert` on
a reader's thread, and puts the finished weight into the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from offload_llama.checkpoint.api import Checkpoint, TensorSource
from offload_llama.checkpoint.packed import EMBEDDING, OUTPUT, PackedRows, saved_weights
from offload_llama.cost.packing import (
    LEAST_GROUP,
    OUTPUT_WEIGHTS,
    PORTABLE,
    TINYGEMM,
    can_pack,
    embedding_sizes,
    tensor_sizes,
)
from offload_llama.device.api import Device
from offload_llama.errors import ConfigError
from offload_llama.weights import Codes, QuantEmbedding, QuantLinear, choose_kernel, quantize


class Model(Protocol):
    """What the loader asks of a model, see `Transformer`."""

    def expected_tensors(self) -> dict[str, tuple[int, ...]]: ...

    def stacks(self) -> list[tuple[str, ...]]: ...

    def set_tensor(self, name: str, tensor: torch.Tensor) -> None: ...

    def set_matrices(self, names: Sequence[str], whole: Any) -> None: ...

    def tie_output(self) -> None: ...


class Target(Protocol):
    """One weight on its way into the model; `names` are the tensors it is made of, in order."""

    names: tuple[str, ...]

    def convert(self, source: TensorSource, start: int, stop: int) -> Any:
        """Return rows [start, stop) of a source in host memory, as `take` wants them."""
        ...

    def take(self, name: str, start: int, rows: Any) -> None:
        """Put rows in place, `start` counted within the tensor they belong to."""
        ...

    def finish(self, model: Model) -> None:
        """Put the weight into the model; all its rows have been taken."""
        ...


class _Rows:
    """Which rows of a whole each of several tensors is."""

    def __init__(self, names: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.names = names
        self.sizes = [shapes[name][0] for name in names]
        self.shape = (sum(self.sizes), *shapes[names[0]][1:])
        self._first = {name: sum(self.sizes[:i]) for i, name in enumerate(names)}

    def at(self, name: str, start: int, n: int) -> slice:
        first = self._first[name] + start
        return slice(first, first + n)


class PlainTarget(_Rows):
    """A tensor in the dtype that is computed with, on the device."""

    def __init__(
        self,
        names: tuple[str, ...],
        shapes: Mapping[str, tuple[int, ...]],
        device: Device,
        dtype: torch.dtype,
        staging: torch.Tensor | None,
    ) -> None:
        super().__init__(names, shapes)
        self._device, self._dtype, self._staging = device, dtype, staging
        self._whole: torch.Tensor | None = None

    def convert(self, source: TensorSource, start: int, stop: int) -> torch.Tensor:
        return source.rows(start, stop)

    def take(self, name: str, start: int, rows: torch.Tensor) -> None:
        if self._whole is None:
            with self._device.scope():
                place = self._device.torch_device
                self._whole = torch.empty(self.shape, dtype=self._dtype, device=place)
        if self._staging is not None:
            rows = self._staging[: rows.numel()].view(rows.shape).copy_(rows)
        elif self._device.torch_device.type != "cpu":
            rows = rows.to(self._dtype)
        # A blocking copy: the staging buffer is used again at once.
        with self._device.scope():
            self._whole[self.at(name, start, len(rows))].copy_(rows)

    def finish(self, model: Model) -> None:
        assert self._whole is not None
        if len(self.names) == 1:
            model.set_tensor(self.names[0], self._whole)
        else:
            model.set_matrices(self.names, self._whole)
        self._whole = None


class PackedTarget(_Rows):
    """A matrix in few bits, packed for the kernel that its device has once its rows are there."""

    def __init__(
        self,
        names: tuple[str, ...],
        shapes: Mapping[str, tuple[int, ...]],
        device: Device,
        weights: str,
    ) -> None:
        super().__init__(names, shapes)
        self._device, self._weights = device, weights
        self._codes: Codes | None = None

    @property
    def codes(self) -> Codes:
        """The codes taken so far."""
        assert self._codes is not None
        return self._codes

    def convert(self, source: TensorSource, start: int, stop: int) -> Codes:
        return codes_of(source, self._weights, start, stop)

    def take(self, name: str, start: int, rows: Codes) -> None:
        if self._codes is None:
            n_rows, columns = self.shape
            self._codes = Codes.empty(self._weights, n_rows, columns)
        self._codes.rows(self.at(name, start, len(rows.codes))).copy_(rows)

    def finish(self, model: Model) -> None:
        sizes = self.sizes if len(self.names) > 1 else None
        model.set_matrices(self.names, self.packed(sizes))

    def packed(self, sizes: list[int] | None = None) -> QuantLinear:
        """Return the packed matrix; its codes are let go."""
        codes, self._codes = self.codes, None
        with self._device.scope():
            place = self._device.torch_device
            kernel = choose_kernel(self._weights, place, *codes.shape)
            return QuantLinear(kernel, kernel.pack(codes, place), codes.shape, sizes)


class EmbeddingTarget(PackedTarget):
    """An embedding beside packed matrices: rows to look up, and a tied output of the same codes."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        device: Device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__((EMBEDDING,), shapes, device, OUTPUT_WEIGHTS)
        self._dtype, self._tied = dtype, OUTPUT not in shapes

    def finish(self, model: Model) -> None:
        codes = self.codes
        if self._tied:
            output = self.packed()
            model.set_matrices((OUTPUT,), output)
            kept = dict(output.named_buffers())
            if "codes" in kept:  # in the order in which they are looked up
                codes = Codes(kept["codes"], kept["scales"], None)
        with self._device.scope():
            place = self._device.torch_device
            tensors = [tensor.to(place) for tensor in codes.tensors()]
        model.set_matrices(self.names, QuantEmbedding(tensors[0], tensors[1], self._dtype))


def codes_of(source: TensorSource, weights: str, start: int, stop: int) -> Codes:
    """Return rows [start, stop) of a source as codes: its own if it has them, else new ones."""
    if isinstance(source, PackedRows) and source.weights == weights:
        return source.codes(start, stop)
    return quantize(source.rows(start, stop), weights)


def check_packable(shapes: Mapping[str, tuple[int, ...]], weights: str) -> None:
    """Return if every matrix of these shapes can be kept so.

    Raises:
        ConfigError: the rows of one are not of whole groups.
    """
    for name, shape in shapes.items():
        if len(shape) == 2 and not can_pack(saved_weights(name, weights), shape[1]):
            raise ConfigError(
                f"--weights {weights} needs rows of a multiple of {LEAST_GROUP} weights, but "
                f"{name} has {shape[1]}; use --weights int8"
            )


def loaded_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
    weights: str | None,
) -> int:
    """Return what a model's weights take on a device; `weights` None where none are packed."""
    if weights is None:
        return sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    total = 0
    for name, shape in shapes.items():
        if len(shape) == 1:
            total += shape[0] * dtype.itemsize
            continue
        rows, columns = shape
        kept = saved_weights(name, weights)
        kernel = choose_kernel(kept, device, rows, columns).name
        kernel = kernel if kernel == TINYGEMM else PORTABLE
        if name == EMBEDDING and OUTPUT not in shapes:
            total += sum(embedding_sizes(kernel, rows, columns, tied=True))
        else:
            kernel = PORTABLE if name == EMBEDDING else kernel
            total += sum(tensor_sizes(kept, kernel, rows, columns))
    return total


def targets(
    model: Model,
    checkpoint: Checkpoint,
    device: Device,
    dtype: torch.dtype,
    weights: str | None,
    staging: torch.Tensor | None,
) -> Iterator[Target]:
    """Yield a target for each weight, in file order as far as stacks allow.

    On the CPU matrices over one input lie in one, so that a small step multiplies once.
    """
    shapes = {name: source.shape for name, source in checkpoint.sources.items()}
    stacks = [] if device.offloads else model.stacks()
    stack_of = {name: stack for stack in stacks for name in stack}
    done: set[str] = set()
    for name, shape in shapes.items():
        if name in done:
            continue
        names = stack_of.get(name, (name,))
        done.update(names)
        if weights is None or len(shape) == 1:
            yield PlainTarget(names, shapes, device, dtype, staging)
        elif name == EMBEDDING:
            yield EmbeddingTarget(shapes, device, dtype)
        else:
            yield PackedTarget(names, shapes, device, saved_weights(name, weights))
