"""A checkpoint's tensors into a model on a device, about a MiB at a time.

The host holds no more than the few pieces that are being read, decoded and converted, so a model
larger than the memory left can still go to a card.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import psutil
import torch
from tqdm import tqdm

from offload_llama.checkpoint.api import Checkpoint, TensorSource
from offload_llama.checkpoint.sources import pieces
from offload_llama.device.api import Device, PinRefused
from offload_llama.errors import CheckpointError, DoesNotFit


class Model(Protocol):
    """What the loader asks of a model, see `Transformer`."""

    def expected_tensors(self) -> dict[str, tuple[int, ...]]: ...

    def set_tensor(self, name: str, tensor: torch.Tensor) -> None: ...

    def tie_output(self) -> None: ...


def load_weights(
    model: Model, checkpoint: Checkpoint, *, device: Device, dtype: torch.dtype, progress: bool
) -> None:
    """Put every tensor of a checkpoint into the model, on the device and in this dtype.

    Args:
        progress: show a bar on stderr.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape than the model's
            (found before anything is read), or a file is damaged.
        DoesNotFit: the weights plainly exceed the device's free memory.
    """
    expected = model.expected_tensors()
    check_tensors(checkpoint, expected)
    needed_bytes = sum(math.prod(s) for s in expected.values()) * dtype.itemsize
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
    with bar, _Readers() as readers:
        for name, piece, rows in readers.read(checkpoint.sources):
            source = checkpoint.sources[name]
            if piece.start == 0:
                with device.scope():
                    target = torch.empty(source.shape, dtype=dtype, device=device.torch_device)
            _copy(target, piece, rows, device, staging)
            if piece.stop == source.shape[0]:
                model.set_tensor(name, target)
                bar.update(source.n_bytes)
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


def _copy(
    target: torch.Tensor,
    piece: slice,
    rows: torch.Tensor,
    device: Device,
    staging: torch.Tensor | None,
) -> None:
    """Copy host rows into a piece of the target, converting them on the host."""
    if staging is not None:
        rows = staging[: rows.numel()].view(rows.shape).copy_(rows)
    elif device.torch_device.type != "cpu":
        rows = rows.to(target.dtype)
    # A blocking copy: the staging buffer is used again at once.
    with device.scope():
        target[piece].copy_(rows)


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
        self, sources: Mapping[str, TensorSource]
    ) -> Iterator[tuple[str, slice, torch.Tensor]]:
        """Yield (name, row range, rows) of all tensors in order, each in its own memory."""
        todo = ((name, source, p) for name, source in sources.items() for p in pieces(source))
        ahead: deque[tuple[str, slice, Future[torch.Tensor]]] = deque()
        for name, source, piece in todo:
            ahead.append((name, slice(*piece), self._pool.submit(source.rows, *piece)))
            if len(ahead) > 2 * self.n_threads:
                yield self._next(ahead)
        while ahead:
            yield self._next(ahead)

    @staticmethod
    def _next(
        ahead: deque[tuple[str, slice, Future[torch.Tensor]]],
    ) -> tuple[str, slice, torch.Tensor]:
        name, piece, future = ahead.popleft()
        return name, piece, future.result()


def check_device_memory(needed_bytes: int, device: Device) -> None:
    """Return if this much of the card is free.

    Raises:
        DoesNotFit: it is not; both numbers are in the message.
    """
    available_bytes = device.memory().free_bytes
    if needed_bytes > available_bytes:
        raise DoesNotFit(
            f"the weights need {needed_bytes / 2**30:.2f} GiB, but {device.name} has "
            f"{available_bytes / 2**30:.2f} GiB free; use a smaller --dtype or model, or "
            "--device cpu",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
            suggestions=("--dtype bfloat16", "a smaller model", "--device cpu"),
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
            f"{available_bytes / 2**30:.2f} GiB are free; use a smaller --dtype or model, or "
            "close other programs",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
            suggestions=("--dtype bfloat16", "a smaller model"),
        )


def host_memory_available(root: Path = Path("/")) -> int:
    """Return the bytes of host memory this process can still take.

    Args:
        root: where `proc` and `sys` are, for tests.
    """
    limits = [psutil.virtual_memory().available, *_cgroup_room(root)]
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft - psutil.Process().memory_info().vms)
    return max(0, min(limits))


def _cgroup_room(root: Path) -> Iterator[int]:
    """Yield what each memory control group above this process leaves free.

    Source: the Linux kernel's "Control Group v2", `memory.max`, `memory.current` and
    `memory.stat`; cached file pages are given back on demand, so they count as free.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        hierarchy, controllers, name = line.split(":", 2)
        if hierarchy == "0":
            base, files = top, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = top / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / name.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            yield from _room_in(folder, *files)


def _room_in(folder: Path, limit_file: str, usage_file: str, cached_key: str) -> Iterator[int]:
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return
    if limit != "max":
        yield int(limit) - usage + int(stat.get(cached_key, 0))
