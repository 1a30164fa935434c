"""One forward pass: everything that concerns the whole of it, before layer 0."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from offload_llama.cache.loads import Span
from offload_llama.device import Device, PinRefused
from offload_llama.geometry import ceil_power

if TYPE_CHECKING:
    from offload_llama.cache.kv import KVCache

LOGITS = ("last", "all", "none")
STAGING_BUFFERS = 4


class Uploads:
    """Small integers to the card through pinned buffers, used in turn.

    Where the platform pins nothing at all, the buffers are ordinary and the copies block.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pinned = True
        self._buffers: list[torch.Tensor] = []
        self._sent = [device.event() for _ in range(STAGING_BUFFERS)]
        self._next = 0

    def send(self, values: Sequence[int]) -> torch.Tensor:
        """Return `values` as an int64 tensor on the device."""
        n = len(values)
        if not self._buffers or self._buffers[0].numel() < n:
            # PyTorch's pinned allocator keeps the old ones until the copies from them are done.
            size = ceil_power(max(n, 64))
            self._buffers = [self._buffer(size) for _ in range(STAGING_BUFFERS)]
        index = self._next
        self._next = (index + 1) % STAGING_BUFFERS
        if not self._sent[index].query():
            self._sent[index].synchronize()
        staged = self._buffers[index][:n]
        staged.copy_(torch.tensor(values, dtype=torch.int64))
        moved = torch.empty(n, dtype=torch.int64, device=self._device.torch_device)
        moved.copy_(staged, non_blocking=self._pinned)
        self._sent[index].record(self._device.current_stream())
        return moved

    def _buffer(self, size: int) -> torch.Tensor:
        if self._pinned:
            try:
                return self._device.pinned_empty((size,), torch.int64)
            except PinRefused:
                self._pinned = False
        return torch.empty(size, dtype=torch.int64)


class Step:
    """A pass over new tokens of some sequences; enter it, run the model once, leave it.

    Leaving commits the new lengths. If the body raises, the cache is as it was before.

    Attributes:
        cache: the cache it belongs to.
        spans: the sequences, in the order of their packed tokens.
        positions: (N,) int64 on the device, the position of each new token.
    """

    positions: torch.Tensor

    def __init__(self, cache: KVCache, spans: tuple[Span, ...], logits: str) -> None:
        self.cache = cache
        self.spans = spans
        self.n_tokens = sum(span.n_new for span in spans)
        self._logits = logits
        self._saved: list[tuple[int, list[int]]] = []

    def __enter__(self) -> Step:
        cache = self.cache
        for span in self.spans:
            if span.start < cache.lengths[span.row]:
                cache.truncate(span.row, span.start)
        positions = [s.start + i for s in self.spans for i in range(s.n_new)]
        self.positions = self.upload(positions)
        cache.begin_step(self)
        self._saved = [
            (span.row, [store.snapshot(span.row) for store in cache.stores]) for span in self.spans
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cache.end_step()
        if kind is None:
            for span in self.spans:
                self.cache.lengths[span.row] = span.start + span.n_new
            return
        for row, saved in self._saved:
            for store, state in zip(self.cache.stores, saved, strict=True):
                store.restore(row, state)

    def upload(self, ids: Sequence[int]) -> torch.Tensor:
        """Return one integer for each new token as (N,) int64 on the device."""
        if len(ids) != self.n_tokens:
            raise ValueError(f"this step has {self.n_tokens} new tokens, got {len(ids)}")
        return self.cache.uploads.send(ids)

    def select(self, h: torch.Tensor) -> torch.Tensor | None:
        """Return the rows of h (N, dim) whose logits are wanted: (R, dim), (N, dim) or None."""
        if self._logits == "none":
            return None
        if self._logits == "all" or len(self.spans) == self.n_tokens:
            return h
        last = [span.offset + span.n_new for span in self.spans]
        rows = [h[stop - 1 : stop] for stop in last]
        return rows[0] if len(rows) == 1 else torch.cat(rows)
