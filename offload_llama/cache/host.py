"""The store of a layer whose rows live in host memory.

The host copy is authoritative: a row is written once and never copied back. Rows `[0, host_len)`
of a sequence are in its pages, `[host_len, len)` in its tail on the card.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from offload_llama.attention import Kernel, attend
from offload_llama.cache.budget import Held
from offload_llama.cache.link import Link
from offload_llama.cache.loads import Piece, Span, part_ranges
from offload_llama.cache.pages import PageTable
from offload_llama.cache.resident import ResidentStore
from offload_llama.cache.ring import Ring
from offload_llama.cache.slabs import HostPages
from offload_llama.cache.view import CacheView
from offload_llama.device import Device, Event
from offload_llama.geometry import FLUSHES_IN_FLIGHT, Geometry


class Departures:
    """Keys and values on their way out of the card, kept alive until they landed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._leaving: deque[tuple[Event, tuple[torch.Tensor, ...]]] = deque()

    def add(self, landed: Event, tensors: tuple[torch.Tensor, ...]) -> None:
        """Keep `tensors` until `landed`; the oldest go once compute is ordered behind them."""
        self._leaving.append((landed, tensors))
        while len(self._leaving) > FLUSHES_IN_FLIGHT:
            self._device.current_stream().wait_event(self._leaving[0][0])
            self._leaving.popleft()

    def settle(self) -> None:
        """Let go of everything that has landed by now; nothing waits on the host."""
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()

    def clear(self) -> None:
        """Let go of everything; the caller has synchronised."""
        self._leaving.clear()


class Sequence:
    """One sequence in one layer: its pages, its tail, and how far each reaches."""

    __slots__ = ("host_len", "landed", "pages", "tail")

    def __init__(self) -> None:
        self.host_len = 0
        self.pages = PageTable()
        self.tail: torch.Tensor | None = None
        self.landed: Event | None = None


class HostStore:
    """One offloaded layer, read through the ring."""

    is_host = True

    def __init__(
        self,
        layer: int,
        device: Device,
        geometry: Geometry,
        dtype: torch.dtype,
        kernel: Kernel,
        lengths: list[int],
        max_seq_len: int,
        *,
        memory: HostPages,
        ring: Ring,
        link: Link,
        departures: Departures,
    ) -> None:
        self.layer, self.geometry, self.dtype = layer, geometry, dtype
        self.max_seq_len = max_seq_len
        self._device, self._kernel, self._lengths = device, kernel, lengths
        self._memory, self._ring, self._link = memory, ring, link
        self._departures = departures
        self._rows = [Sequence() for _ in lengths]

    def host_len(self, row: int) -> int:
        """Return how many rows of a sequence are on the host."""
        return self._rows[row].host_len

    def fill(self, piece: Piece, slot: torch.Tensor) -> None:
        """Queue the copies of a piece's host rows to `slot`, (2, n_host, KH, D)."""
        self._memory.load(self._rows[piece.row].pages, piece.first, slot)

    def attend(
        self, xq: torch.Tensor, xk: torch.Tensor, xv: torch.Tensor, step: Any
    ) -> torch.Tensor:
        """Append the new rows and return the attention output, (N, H, D)."""
        outputs = []
        pieces = self._ring.pieces(self.layer)
        for span in step.spans:
            new = slice(span.offset, span.offset + span.n_new)
            k, v = xk[new], xv[new]
            if span.appends:
                self._append_to_tail(span, k, v)
            own = None if span.appends else (k, v)
            outputs.append(attend(self._kernel, xq[new], self._visible(span, pieces), own))
            if span.appends:
                if span.start + 1 - self.host_len(span.row) == self.geometry.flush_tokens:
                    self._flush_tail(span.row, span.start + 1)
            else:
                self._flush_chunk(span, k, v)
        for _ in pieces:
            raise ValueError(f"layer {self.layer}: a load was planned that nobody reads")
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _visible(
        self, span: Span, pieces: Iterator[tuple[Piece, torch.Tensor]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield keys and values of each part: host rows in a slot, tail rows behind them."""
        row = self._rows[span.row]
        for first, stop in part_ranges(span.n_visible, self.geometry.part_tokens):
            if first >= row.host_len:
                yield (
                    self._tail(row)[0, first - row.host_len : stop - row.host_len],
                    self._tail(row)[1, first - row.host_len : stop - row.host_len],
                )
                continue
            piece, slot = next(pieces)
            if piece.n_total > piece.n_host:
                rows = self._tail(row)[:, : piece.n_total - piece.n_host]
                slot[:, piece.n_host :].copy_(rows)
            yield slot[0], slot[1]

    def _tail(self, row: Sequence) -> torch.Tensor:
        """Return the tail, (2, F, KH, D); row i of it is sequence row `host_len + i`."""
        if row.tail is None:
            shape = (2, self.geometry.flush_tokens, self.geometry.n_kv_heads)
            row.tail = torch.empty(
                (*shape, self.geometry.head_dim), dtype=self.dtype, device=self._device.torch_device
            )
        return row.tail

    def _tail_writable(self, row: Sequence) -> torch.Tensor:
        """Return the tail once compute is ordered behind the flush that still reads it."""
        if row.landed is not None:
            self._device.current_stream().wait_event(row.landed)
            row.landed = None
        return self._tail(row)

    def _append_to_tail(self, span: Span, k: torch.Tensor, v: torch.Tensor) -> None:
        row = self._rows[span.row]
        tail, at = self._tail_writable(row), span.start - row.host_len
        tail[0, at : at + 1].copy_(k)
        tail[1, at : at + 1].copy_(v)

    def _flush_tail(self, index: int, stop: int) -> None:
        """Queue the tail's rows, up to sequence row `stop`, to the host."""
        row = self._rows[index]
        if row.host_len == stop:
            return
        n, tail = stop - row.host_len, self._tail(row)
        row.landed = self._flush(row, tail[0, :n], tail[1, :n])

    def _flush_chunk(self, span: Span, k: torch.Tensor, v: torch.Tensor) -> None:
        """Queue the tail and a chunk's own keys and values to the host."""
        # The tail that a decode step will need is there from the first rows on: what a prompt
        # takes of the card does not depend on what came before it.
        self._tail(self._rows[span.row])
        self._flush_tail(span.row, span.start)
        k, v = k.contiguous(), v.contiguous()
        self._departures.add(self._flush(self._rows[span.row], k, v), (k, v))

    def _flush(self, row: Sequence, k: torch.Tensor, v: torch.Tensor) -> Event:
        """Queue rows to the host behind the compute that wrote them; return the landed event."""
        self._memory.own_page(row.pages, row.host_len)
        self._memory.grow(row.pages, row.host_len + len(k))
        written, landed = self._device.event(), self._device.event()
        written.record(self._device.current_stream())
        self._link.stream.wait_event(written)
        self._memory.store(row.pages, row.host_len, k, v)
        landed.record(self._link.stream)
        row.host_len += len(k)
        return landed

    def take_over(self, source: ResidentStore) -> None:
        """Bring every row of a resident layer to the host; each part goes once it has landed.

        The host waits here, so that the card's memory is free when this returns. Pages are taken
        before anything moves: if that raises, the resident layer still has all its rows.
        """
        try:
            for row, length in zip(self._rows, self._lengths, strict=True):
                self._memory.grow(row.pages, length)
        except BaseException:
            for index in range(self.n_rows):
                self.free(index)
            raise
        for index, row in enumerate(self._rows):
            for k, v in source.take_parts(index):
                landed = self._flush(row, k, v)
                landed.synchronize()

    def truncate(self, index: int, length: int) -> None:
        """Forget the rows from `length` on: no copy, whole pages go back."""
        row = self._rows[index]
        row.host_len = min(row.host_len, length)
        self._memory.drop(row.pages.cut(row.host_len))

    def free(self, index: int) -> None:
        """Forget a sequence; its tail goes too."""
        self.truncate(index, 0)
        row = self._rows[index]
        if row.tail is not None:
            self._tail_writable(row)
            row.tail = None

    def copy_row(self, src: int, dst: int) -> None:
        """Let `dst` share `src`'s pages, and copy the tail."""
        source, target = self._rows[src], self._rows[dst]
        self.truncate(dst, 0)
        for page in source.pages.pages:
            page.users += 1
        target.pages.pages = list(source.pages.pages)
        target.host_len = source.host_len
        n = self._lengths[src] - source.host_len
        if n:
            self._tail_writable(target)[:, :n].copy_(self._tail(source)[:, :n])

    def snapshot(self, row: int) -> int:
        """Return what `restore` needs."""
        return self._rows[row].host_len

    def restore(self, row: int, saved: int) -> None:
        """Undo the appends of a step that failed; the tail still holds its rows."""
        self.truncate(row, saved)

    def host_view(self, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the pinned memory of rows [0, host_len): keys and values of each run of pages.

        Views, valid until the sequence is truncated or freed; nothing is in flight to them now.
        """
        self._link.stream.synchronize()
        entry = self._rows[row]
        return [self._memory.views(run) for run in entry.pages.runs(0, entry.host_len)]

    def rows(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of a sequence, each (length, KH, D) on the CPU."""
        entry = self._rows[row]
        n_tail = self._lengths[row] - entry.host_len
        pieces = [torch.stack(views) for views in self.host_view(row)]
        if n_tail:
            pieces.append(self._tail(entry)[:, :n_tail].cpu())
        shape = (2, 0, self.geometry.n_kv_heads, self.geometry.head_dim)
        k, v = torch.cat(pieces, dim=1) if pieces else torch.empty(shape, dtype=self.dtype)
        return k, v

    @property
    def held(self) -> Held:
        """The tails on the card."""
        tails = (() if row.tail is None else (row.tail.shape[1],) for row in self._rows)
        return Held(True, tuple(tails))

    @property
    def device_bytes(self) -> int:
        """Bytes of the tails on the card."""
        tails = (row.tail for row in self._rows if row.tail is not None)
        return sum(tail.numel() * tail.element_size() for tail in tails)

    @property
    def host_bytes(self) -> int:
        """Bytes of the rows on the host."""
        return 2 * self.geometry.row_bytes * sum(row.host_len for row in self._rows)

    @property
    def cache_k(self) -> CacheView:
        return CacheView(self, 0)

    @property
    def cache_v(self) -> CacheView:
        return CacheView(self, 1)

    @property
    def n_rows(self) -> int:
        return len(self._lengths)
