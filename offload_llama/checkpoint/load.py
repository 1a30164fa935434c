"""A checkpoint's tensors into a model on a device, about a MiB at a time.

The host holds no more than the few pieces that are being read, decoded and converted, so a model
larger than the memory left can still go to a card.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from tqdm import tqdm

from offload_llama.checkpoint.api import Checkpoint, TensorSource
from offload_llama.checkpoint.sources import pieces
from offload_llama.checkpoint.targets import (
    Model,
    Target,
    check_packable,
    loaded_bytes,
    targets,
)
from offload_llama.device.api import Device, PinRefused
from offload_llama.errors import CheckpointError, DoesNotFit
from offload_llama.machine import host_memory_available


def load_weights(
    model: Model,
    checkpoint: Checkpoint,
    *,
    device: Device,
    dtype: torch.dtype,
    progress: bool,
    weights: str | None = None,
) -> None:
    """Put every tensor of a checkpoint into the model, on the device and in this dtype.

    Args:
        progress: show a bar on stderr.
        weights: int8, int4 or int4-g32 to pack the matrices as they are read; None to keep them
            in the dtype.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape than the model's
            (found before anything is read), or a file is damaged.
        ConfigError: the matrices cannot be packed so.
        DoesNotFit: the weights plainly exceed the device's free memory.
    """
    expected = model.expected_tensors()
    check_tensors(checkpoint, expected)
    if weights is not None:
        check_packable(expected, weights)
    with device.scope():
        needed_bytes = loaded_bytes(expected, device.torch_device, dtype, weights)
    if device.offloads:
        check_device_memory(needed_bytes, device)
    else:
        check_host_memory(needed_bytes)
    bar = tqdm(
        total=checkpoint.n_bytes(),
        desc="loading",
        unit="B",
        unit_scale=True,
        leave=False,
        file=sys.stderr,
        disable=not progress,
    )
    staging = _staging(device, dtype, checkpoint.sources)
    parts = targets(model, checkpoint, device, dtype, weights, staging)
    with bar, _Readers() as readers:
        for target, name, piece, rows in readers.read(checkpoint.sources, parts):
            target.take(name, piece.start, rows)
            if piece.stop == checkpoint.sources[name].shape[0]:
                bar.update(checkpoint.sources[name].n_bytes)
                if name == target.names[-1]:
                    target.finish(model)
    with device.scope():
        model.tie_output()


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare names and shapes with what the model needs, without reading a tensor.

    Raises:
        CheckpointError: they differ; the message names the tensors.
    """
    sources = checkpoint.sources
    missing = [name for name in expected if name not in sources]
    if missing:
        raise CheckpointError(f"{checkpoint.path}: missing {_named(missing)}")
    extra = [name for name in sources if name not in expected]
    if extra:
        raise CheckpointError(
            f"{checkpoint.path}: {_named(extra)} in the file but not in the model, which would "
            "compute something else without"
        )
    for name, shape in expected.items():
        if tuple(sources[name].shape) != tuple(shape):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} has shape {list(sources[name].shape)}, but the "
                f"config asks for {list(shape)}"
            )


def _named(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _staging(
    device: Device, dtype: torch.dtype, sources: Mapping[str, TensorSource]
) -> torch.Tensor | None:
    """Return a pinned buffer for the largest piece, or None where a plain copy does as well."""
    if device.torch_device.type == "cpu":
        return None
    n_elements = max(
        (stop - start) * math.prod(source.shape[1:])
        for source in sources.values()
        for start, stop in pieces(source)
    )
    try:
        with device.scope():
            return device.pinned_empty((n_elements,), dtype)
    except PinRefused:
        return None


class _Readers:
    """Threads that read and decode pieces a little ahead of the one that copies them.

    Each runs its torch operations alone: pieces are too small to share one among threads, and
    there are enough of them.
    """

    def __init__(self) -> None:
        self.n_threads = min(4, os.cpu_count() or 1)

    def __enter__(self) -> _Readers:
        self._torch_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(
            self.n_threads, initializer=torch.set_num_threads, initargs=(1,)
        )
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._torch_threads)

    def read(
        self, sources: Mapping[str, TensorSource], parts: Iterable[Target]
    ) -> Iterator[tuple[Target, str, slice, Any]]:
        """Yield (target, name, row range, converted rows) of all tensors, target by target."""
        todo = (
            (target, name, piece)
            for target in parts
            for name in target.names
            for piece in pieces(sources[name])
        )
        ahead: deque[tuple[Target, str, slice, Future[Any]]] = deque()
        for target, name, piece in todo:
            future = self._pool.submit(target.convert, sources[name], *piece)
            ahead.append((target, name, slice(*piece), future))
            if len(ahead) > 2 * self.n_threads:
                yield self._next(ahead)
        while ahead:
            yield self._next(ahead)

    @staticmethod
    def _next(
        ahead: deque[tuple[Target, str, slice, Future[Any]]],
    ) -> tuple[Target, str, slice, Any]:
        target, name, piece, future = ahead.popleft()
        return target, name, piece, future.result()


def check_device_memory(needed_bytes: int, device: Device) -> None:
    """Return if this much of the card is free.

    Raises:
        DoesNotFit: it is not; both numbers are in the message.
    """
    available_bytes = device.memory().free_bytes
    if needed_bytes > available_bytes:
        raise DoesNotFit(
            f"the weights need {needed_bytes / 2**30:.2f} GiB, but {device.name} has "
            f"{available_bytes / 2**30:.2f} GiB free; use fewer bits (--weights int4 or --dtype "
            "bf16), a smaller model, or --device cpu",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
            suggestions=("--weights int4", "a smaller model", "--device cpu"),
        )


def check_host_memory(needed_bytes: int) -> None:
    """Return if this much host memory is free.

    Free is what the system can give without swapping, or less where a control group or an
    address-space limit of this process leaves less.

    Raises:
        DoesNotFit: it is not; both numbers are in the message.
    """
    available_bytes = host_memory_available()
    if needed_bytes > available_bytes:
        raise DoesNotFit(
            f"the weights need {needed_bytes / 2**30:.2f} GiB of host memory, but "
            f"{available_bytes / 2**30:.2f} GiB are free; use fewer bits (--weights int4 or "
            "--dtype bf16), a smaller model, or close other programs",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
            suggestions=("--weights int4", "a smaller model"),
        )
