"""Host memory of the cache: exactly pinned slabs that grow with use, and the pages in them."""

from __future__ import annotations

import mmap

import torch

from offload_llama.cache.link import Link
from offload_llama.cache.pages import Page, PagePool, PageTable, Run, next_page_tokens
from offload_llama.device import Device, PinRefused
from offload_llama.geometry import (
    FIRST_SLAB_BYTES,
    MAX_SLAB_BYTES,
    Geometry,
    ceil_power,
    floor_power,
)


class Slab:
    """One mapping of host memory: keys of all its tokens, then their values.

    `k` and `v` are (tokens, KH, D) views of it. Pages of the mapping are registered exactly;
    PyTorch's own pinned allocator would round the block up to a power of two.
    """

    def __init__(
        self, device: Device, geometry: Geometry, dtype: torch.dtype, tokens: int, *, pin: bool
    ) -> None:
        half_bytes = tokens * geometry.row_bytes
        size = -(-2 * half_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self.tokens = tokens
        self.size_bytes = size
        self._memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        shape = (tokens, geometry.n_kv_heads, geometry.head_dim)
        self.k = self._memory[:half_bytes].view(dtype).view(shape)
        self.v = self._memory[half_bytes : 2 * half_bytes].view(dtype).view(shape)
        self._device = device
        self.pinned = False
        if pin:
            try:
                device.register(self._memory)
                self.pinned = True
            except PinRefused:
                pass

    def close(self) -> None:
        """Unpin and unmap; nothing in flight may touch the memory any more."""
        memory = self._memory
        del self.k, self.v, self._memory
        if self.pinned:
            self._device.unregister(memory)
        self.pinned = False


class HostPages:
    """The pages of all offloaded layers, and the copies into and out of them."""

    def __init__(
        self, device: Device, geometry: Geometry, dtype: torch.dtype, link: Link, *, pin: bool
    ) -> None:
        self.geometry = geometry
        self.link = link
        self._device, self._dtype, self._pin = device, dtype, pin
        self._pool = PagePool()
        self.slabs: list[Slab] = []

    @property
    def pinned_bytes(self) -> int:
        return sum(slab.size_bytes for slab in self.slabs if slab.pinned)

    @property
    def size_bytes(self) -> int:
        return sum(slab.size_bytes for slab in self.slabs)

    @property
    def used_tokens(self) -> int:
        return self._pool.used_tokens

    def grow(self, table: PageTable, target: int) -> None:
        """Give a table pages until it holds `target` tokens."""
        while table.capacity < target:
            table.pages.append(self._take(next_page_tokens(self.geometry, table, target)))

    def _take(self, tokens: int) -> Page:
        page = self._pool.take(tokens)
        if page is None:
            self._add_slab(tokens)
            page = self._pool.take(tokens)
            if page is None:
                raise ValueError(f"a page of {tokens} tokens is larger than a slab")
        return page

    def _add_slab(self, page_tokens: int) -> None:
        wanted_bytes = min(MAX_SLAB_BYTES, FIRST_SLAB_BYTES << len(self.slabs))
        fitting = wanted_bytes // (2 * self.geometry.row_bytes)
        tokens = max(floor_power(max(1, fitting)), ceil_power(page_tokens))
        slab = Slab(self._device, self.geometry, self._dtype, tokens, pin=self._pin)
        if not slab.pinned and self._device.offloads:
            self.link.refused(slab.size_bytes, self.pinned_bytes)
        self.slabs.append(slab)
        self._pool.add_slab(tokens)

    def drop(self, pages: list[Page]) -> None:
        """Let one user of each page go."""
        for page in pages:
            self._pool.drop(page)

    def own_page(self, table: PageTable, start: int) -> None:
        """Make sure that rows from `start` on can be written: copy the page if it is shared.

        The host waits for the copy stream here: a page still being read or written must not be
        touched by the CPU. It happens once after `copy_row`, not in every step.
        """
        index = table.shared_tail(start)
        if index is None:
            return
        shared = table.pages[index]
        first = table.first_token(index)
        page = self._take(shared.tokens)
        self.link.stream.synchronize()
        for old, new in zip(self._page_views(shared), self._page_views(page), strict=True):
            new[: start - first].copy_(old[: start - first])
        table.pages[index] = page
        self._pool.drop(shared)

    def _page_views(self, page: Page) -> tuple[torch.Tensor, torch.Tensor]:
        return self.views(Run(page.slab, page.offset, page.tokens))

    def views(self, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a run, (tokens, KH, D) views of host memory."""
        slab = self.slabs[run.slab]
        rows = slice(run.offset, run.offset + run.tokens)
        return slab.k[rows], slab.v[rows]

    def load(self, table: PageTable, first: int, slot: torch.Tensor) -> None:
        """Queue the copy of rows [first, first + n) to the card.

        Args:
            table: the sequence's pages.
            first: first row.
            slot: destination, (2, n, KH, D): keys, values.
        """
        done = 0
        for run in table.runs(first, first + slot.shape[1]):
            pinned = self.slabs[run.slab].pinned
            for half, host in zip(slot, self.views(run), strict=True):
                self.link.h2d(half[done : done + run.tokens], host, pinned=pinned)
            done += run.tokens

    def store(self, table: PageTable, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Queue the copy of new rows to the host; the table has pages for them.

        Args:
            table: the sequence's pages.
            first: sequence position of the first row.
            k, v: (n, KH, D) on the card, contiguous; kept unchanged until the copy landed.
        """
        done = 0
        for run in table.runs(first, first + len(k)):
            pinned = self.slabs[run.slab].pinned
            for half, host in zip((k, v), self.views(run), strict=True):
                self.link.d2h(host, half[done : done + run.tokens], pinned=pinned)
            done += run.tokens

    def close(self) -> None:
        """Unpin and unmap everything. The caller has synchronised and dropped its views."""
        for slab in self.slabs:
            slab.close()
        self.slabs.clear()
        self._pool = PagePool()
