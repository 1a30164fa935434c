"""`cache_k` and `cache_v` as Meta's users know them, for inspection."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from offload_llama.geometry import Geometry


class Gatherable(Protocol):
    """What a view needs of a store."""

    geometry: Geometry
    dtype: torch.dtype
    max_seq_len: int

    @property
    def n_rows(self) -> int: ...

    def rows(self, row: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class CacheView:
    """Keys (or values) of one layer in the shape of Meta's `cache_k`.

    `shape`, `dtype` and `nbytes` are known without touching the cache. `tensor` and indexing
    synchronise and gather a copy: changing it changes nothing in the cache.
    """

    def __init__(self, store: Gatherable, half: int) -> None:
        self._store, self._half = store, half
        geometry = store.geometry
        self.dtype = store.dtype
        self.shape = torch.Size(
            (store.n_rows, store.max_seq_len, geometry.n_kv_heads, geometry.head_dim)
        )

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """Return a copy on the CPU, (max_batch_size, max_seq_len, KH, D); unused rows are zero."""
        full = torch.zeros(self.shape, dtype=self.dtype)
        for row in range(self.shape[0]):
            rows = self._store.rows(row)[self._half]
            full[row, : len(rows)] = rows
        return full

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor()[index]

    def __repr__(self) -> str:
        return f"CacheView(shape={tuple(self.shape)}, dtype={self.dtype})"
