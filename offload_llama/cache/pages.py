"""Host memory as pages: which units of which slab belong to which sequence. Integers only.

A *unit* is `MIN_PAGE_TOKENS` tokens of keys and of values. A slab is a power of two of units, cut
in halves until a page fits (a buddy system), so that neighbouring pages are neighbours in memory
and freed ones join again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offload_llama.geometry import MIN_PAGE_TOKENS, Geometry


@dataclass(slots=True, eq=False)
class Page:
    """A run of `tokens` tokens in slab `slab`, from token `offset` of it; `users` share it."""

    slab: int
    offset: int
    tokens: int
    users: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows in memory: `tokens` tokens of slab `slab` from token `offset`."""

    slab: int
    offset: int
    tokens: int


class Buddies:
    """The free and used pages of one slab of `tokens` tokens (a power of two)."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._free: dict[int, set[int]] = {tokens: {0}}

    def take(self, tokens: int) -> int | None:
        """Return the offset of a free run of this size, or None; the lowest fitting one."""
        sizes = [size for size, offsets in self._free.items() if offsets and size >= tokens]
        if not sizes:
            return None
        size = min(sizes)
        offset = min(self._free[size])
        self._free[size].discard(offset)
        while size > tokens:
            size //= 2
            self._free.setdefault(size, set()).add(offset + size)
        return offset

    def give(self, offset: int, tokens: int) -> None:
        """Take a run back, joining it with its free buddy as long as there is one."""
        while tokens < self.tokens:
            buddy = offset ^ tokens
            peers = self._free.setdefault(tokens, set())
            if buddy not in peers:
                break
            peers.discard(buddy)
            offset, tokens = min(offset, buddy), tokens * 2
        self._free.setdefault(tokens, set()).add(offset)

    @property
    def free_tokens(self) -> int:
        return sum(size * len(offsets) for size, offsets in self._free.items())


class PagePool:
    """Pages over slabs that are added as the cache grows."""

    def __init__(self) -> None:
        self.slabs: list[Buddies] = []

    def add_slab(self, tokens: int) -> None:
        """Add `tokens` tokens (a power of two) of free memory."""
        self.slabs.append(Buddies(tokens))

    def take(self, tokens: int) -> Page | None:
        """Return a page of this size from the first slab that has room, or None."""
        for index, slab in enumerate(self.slabs):
            offset = slab.take(tokens)
            if offset is not None:
                return Page(index, offset, tokens)
        return None

    def drop(self, page: Page) -> None:
        """Let one user of a page go; the last one frees it."""
        page.users -= 1
        if page.users == 0:
            self.slabs[page.slab].give(page.offset, page.tokens)

    @property
    def used_tokens(self) -> int:
        return sum(slab.tokens - slab.free_tokens for slab in self.slabs)


@dataclass(slots=True)
class PageTable:
    """The pages of one sequence in one layer, in token order."""

    pages: list[Page] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        return sum(page.tokens for page in self.pages)

    def shared_tail(self, start: int) -> int | None:
        """Return the index of the page that holds token `start` if others use it too, or None."""
        first = 0
        for index, page in enumerate(self.pages):
            if first <= start < first + page.tokens:
                return index if page.users > 1 else None
            first += page.tokens
        return None

    def first_token(self, index: int) -> int:
        """Return the sequence position of a page's first token."""
        return sum(page.tokens for page in self.pages[:index])

    def runs(self, start: int, stop: int) -> list[Run]:
        """Return the memory of tokens [start, stop), neighbours joined, in token order."""
        runs: list[Run] = []
        first = 0
        for page in self.pages:
            low, high = max(start, first), min(stop, first + page.tokens)
            if low < high:
                offset = page.offset + low - first
                last = runs[-1] if runs else None
                if last and last.slab == page.slab and last.offset + last.tokens == offset:
                    runs[-1] = Run(last.slab, last.offset, last.tokens + high - low)
                else:
                    runs.append(Run(page.slab, offset, high - low))
            first += page.tokens
            if first >= stop:
                break
        if sum(run.tokens for run in runs) != stop - start:
            raise ValueError(f"pages hold {self.capacity} tokens, asked for {start}-{stop}")
        return runs

    def cut(self, length: int) -> list[Page]:
        """Remove and return the pages that hold no token below `length`."""
        kept, first = 0, 0
        while kept < len(self.pages) and first < length:
            first += self.pages[kept].tokens
            kept += 1
        gone = self.pages[kept:]
        del self.pages[kept:]
        return gone


def next_page_tokens(geometry: Geometry, table: PageTable, target: int) -> int:
    """Return how large the next page of a table that must reach `target` tokens should be."""
    have = table.capacity
    units = -(-(target - have) // MIN_PAGE_TOKENS)
    return geometry.page_tokens(have, units * MIN_PAGE_TOKENS)
