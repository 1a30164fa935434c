"""Models in Meta's layout: a folder with `params.json` and `consolidated.NN.pth` shards.

Source: the Llama 2 and Llama 3 reference code (`ModelArgs`, the parallel layers' split axes) and
the `params.json` files released with the models.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import pickle
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from offload_llama.checkpoint.api import TensorSource
from offload_llama.checkpoint.damage import bad_file, check_is_data, read_json
from offload_llama.checkpoint.meta_config import meta_config
from offload_llama.checkpoint.sources import FileCheckpoint
from offload_llama.errors import CheckpointError

_SHARD = re.compile(r"consolidated\.(\d{2})\.pth")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Which axis the model-parallel layers split; a name that is not here is whole in every shard.
_SPLIT_AXIS = {
    "wq": 0,
    "wk": 0,
    "wv": 0,
    "w1": 0,
    "w3": 0,
    "output": 0,
    "wo": 1,
    "w2": 1,
}
_RECOMPUTED = ("rope.freqs",)

# What one read may map beside what it reads: the file's cache is in pieces of up to a huge page.
MAPPED_AROUND_BYTES = 2 << 20


def shard_name(index: int) -> str:
    """Return the file name of a shard."""
    return f"consolidated.{index:02d}.pth"


@dataclass(frozen=True, slots=True)
class MergedRows:
    """One tensor as its pieces in the shards, joined along `axis` as its rows are read.

    The pieces are views of mapped files. Their pages are given back after each read, since they
    would count as this process's memory until the file is unmapped.
    """

    parts: tuple[torch.Tensor, ...]
    axis: int
    row_step: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype on disk."""
        return self.parts[0].dtype

    @property
    def n_bytes(self) -> int:
        """Bytes on disk, in all shards."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of the joined tensor in new memory."""
        if self.axis == 1:
            views = [part[start:stop] for part in self.parts]
        else:
            views, first = [], 0
            for part in self.parts:
                views.append(part[max(0, start - first) : max(0, stop - first)])
                first += len(part)
        merged = torch.cat(views, dim=self.axis)
        for view in views:
            _release_pages(view)
        return merged


def _release_pages(view: torch.Tensor) -> None:
    """Let the kernel take back the file pages under a view; a later read fetches them again.

    And those around it, which a read maps along; never beyond the tensor, where other memory lies.
    """
    if not hasattr(mmap, "MADV_DONTNEED") or not view.numel() or not view.is_contiguous():
        return
    storage = view.untyped_storage()
    first = max(storage.data_ptr(), view.data_ptr() - MAPPED_AROUND_BYTES)
    end = min(
        storage.data_ptr() + storage.nbytes(), view.data_ptr() + view.nbytes + MAPPED_AROUND_BYTES
    )
    start = first // mmap.PAGESIZE * mmap.PAGESIZE
    length = end - start
    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def open_meta(folder: Path) -> FileCheckpoint:
    """Open a model in Meta's layout; shards are mapped, not read.

    Raises:
        CheckpointError: a file is missing or damaged, or the model is not supported.
    """
    params = read_json(folder / "params.json")
    paths = shard_files(folder)
    shards = [_load_shard(path) for path in paths]
    _check_same_names(paths, shards)
    _check_shard_count(folder, params, shards)
    dim = params.get("dim")
    sources: dict[str, TensorSource] = {}
    for name in shards[0]:
        if name not in _RECOMPUTED:
            sources[name] = _merge(folder, name, [shard[name] for shard in shards], dim)
    shapes = {name: source.shape for name, source in sources.items()}
    config = meta_config(folder / "params.json", params, shapes)
    return FileCheckpoint(folder, "meta", config, (), sources)


def shard_files(folder: Path) -> list[Path]:
    """Return the shards of a folder in order.

    Raises:
        CheckpointError: there are none, or one before the last is missing.
    """
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _SHARD.fullmatch(path.name)) is not None
    }
    if not found:
        raise CheckpointError(f"{folder}: no weights; looked for {shard_name(0)}")
    missing = [shard_name(i) for i in range(max(found)) if i not in found]
    if missing:
        raise CheckpointError(
            f"{folder}: {', '.join(missing)} missing; expected {shard_name(0)} to "
            f"{shard_name(max(found))}"
        )
    return [found[i] for i in sorted(found)]


def _load_shard(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of one shard as views of the mapped file."""
    size_bytes = check_is_data(path)
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            raise bad_file(
                path,
                size_bytes,
                "not a torch archive; if it is an old one, torch.load and torch.save it again",
            )
    try:
        zipfile.ZipFile(path).close()
    except zipfile.BadZipFile as error:
        raise bad_file(
            path, size_bytes, "torch archive cut short or damaged; fetch it again"
        ) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise bad_file(
            path, size_bytes, "holds more than tensors, which is not loaded as it may run code"
        ) from error
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise bad_file(path, size_bytes, f"torch cannot read it ({reason})") from error
    if not isinstance(state, dict) or not state:
        raise bad_file(path, size_bytes, "no named tensors in it")
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or not value.ndim:
            raise bad_file(path, size_bytes, f"the entry {name!r} is not a tensor with rows")
        if value.dtype not in _FLOATS and name not in _RECOMPUTED:
            raise bad_file(
                path,
                size_bytes,
                f"tensor {name} is of dtype {value.dtype}; supported: float32, float16, bfloat16",
            )
    return state


def _check_same_names(paths: Sequence[Path], shards: Sequence[dict[str, torch.Tensor]]) -> None:
    for path, shard in zip(paths[1:], shards[1:], strict=True):
        different = sorted(shard.keys() ^ shards[0].keys())
        if different:
            raise CheckpointError(
                f"{path}: not of the same model as {paths[0].name}, tensor {different[0]} is in "
                "only one of them"
            )


def _check_shard_count(
    folder: Path, params: dict[str, object], shards: Sequence[dict[str, torch.Tensor]]
) -> None:
    """Compare the width of one piece of `wo` with the whole, which tells how many pieces exist."""
    wo = shards[0].get("layers.0.attention.wo.weight")
    dim, n_heads = params.get("dim"), params.get("n_heads")
    if wo is None or wo.ndim != 2 or not isinstance(dim, int) or not isinstance(n_heads, int):
        return
    head_dim = params.get("head_dim")
    width = n_heads * head_dim if isinstance(head_dim, int) else dim
    expected, rest = divmod(width, wo.shape[1])
    if not rest and expected > len(shards):
        missing = ", ".join(shard_name(i) for i in range(len(shards), expected))
        raise CheckpointError(
            f"{folder}: {len(shards)} of {expected} shards are here; {missing} missing (expected "
            f"{shard_name(0)} to {shard_name(expected - 1)})"
        )


def _merge(folder: Path, name: str, parts: list[torch.Tensor], dim: object) -> MergedRows:
    """Return the joined tensor of one name."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    axis = _SPLIT_AXIS.get(module)
    if module == "tok_embeddings":
        # Llama 1 and 2 split the embedding's columns, Llama 3 its rows.
        axis = 0 if parts[0].shape[-1] == dim else 1
    if axis is None or len(parts) == 1:
        return MergedRows((parts[0],), 0)
    ours = [(part.dtype, *part.shape[:axis], *part.shape[axis + 1 :]) for part in parts]
    if parts[0].ndim != 2 or len(set(ours)) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise CheckpointError(
            f"{folder}: the pieces of tensor {name} do not fit together: {shapes}"
        )
    return MergedRows(tuple(parts), axis)
