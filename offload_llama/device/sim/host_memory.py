"""Page-locked host memory: which addresses copies may use asynchronously."""

from __future__ import annotations

import bisect
import mmap
import weakref

import torch

from offload_llama.device.sim.errors import UseAfterFreeError
from offload_llama.device.sim.hazards import Actor, Memory, pending
from offload_llama.device.sim.spans import Span, span_of

# Source: the CUDA runtime's enum cudaError.
SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713


class Region(Memory):
    """One page-locked address range [start, end)."""

    __slots__ = ("end", "held_bytes", "registered", "start")

    def __init__(self, start: int, nbytes: int, held_bytes: int, registered: bool) -> None:
        super().__init__(f"a pinned host buffer of {nbytes} bytes")
        self.start, self.end = start, start + nbytes
        self.held_bytes, self.registered = held_bytes, registered


class HostMemory:
    """Every page-locked region, found by address."""

    def __init__(self) -> None:
        self.pinned_bytes = 0
        self.peak_pinned_bytes = 0
        self.limit_bytes: int | None = None
        self.limit_pinned_empty = False
        self._starts: list[int] = []
        self._regions: list[Region] = []

    def __bool__(self) -> bool:
        return bool(self._regions)

    def find(self, tensor: torch.Tensor) -> tuple[Region, Span] | None:
        """Return the region that holds all of a host tensor, and where in it; None: pageable."""
        if not self._regions:
            return None
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._regions[at].end:
            return None
        region = self._regions[at]
        span = span_of(tensor, address - region.start)
        return (region, span) if region.start + span.hi <= region.end else None

    def pinned_empty(self, nbytes: int) -> torch.Tensor | None:
        """Return new pinned memory, (nbytes,) uint8, None where the platform refuses.

        PyTorch's allocator takes blocks of powers of two. It also remembers which streams copy
        from a block that dies, so nothing is checked when it does.
        """
        held = 1 << max(0, nbytes - 1).bit_length()
        if self.limit_pinned_empty and self._refuses(held):
            return None
        memory = torch.empty(nbytes, dtype=torch.uint8)
        region = Region(memory.data_ptr(), nbytes, held, registered=False)
        if nbytes:
            self._add(region)
            weakref.finalize(memory.untyped_storage(), self._remove, region).atexit = False
        return memory

    def register(self, address: int, nbytes: int) -> int:
        """Page-lock existing memory and return the runtime's code.

        Two ranges that share a page of the operating system cannot both be registered.
        """
        if nbytes <= 0 or address == 0:
            return INVALID_VALUE
        page = mmap.PAGESIZE
        first, last = address // page * page, -(-(address + nbytes) // page) * page
        at = bisect.bisect_left(self._starts, last)
        while at > 0 and self._regions[at - 1].end > first:
            at -= 1
            if self._regions[at].registered:
                return ALREADY_REGISTERED
        if self._refuses(nbytes):
            return OUT_OF_MEMORY
        self._add(Region(address, nbytes, nbytes, registered=True))
        return SUCCESS

    def unregister(self, address: int, host: Actor) -> tuple[int, UseAfterFreeError | None]:
        """Unlock registered memory; return the runtime's code and what was still in flight."""
        at = bisect.bisect_left(self._starts, address)
        if at == len(self._starts) or self._starts[at] != address:
            return NOT_REGISTERED, None
        region = self._regions[at]
        if not region.registered:
            return NOT_REGISTERED, None
        left = pending(region.log, host.clock)
        self._remove(region)
        if not left:
            return SUCCESS, None
        return SUCCESS, UseAfterFreeError(
            f"{region.label} was unregistered before the host waited for the {left[0]}"
        )

    def _refuses(self, nbytes: int) -> bool:
        return self.limit_bytes is not None and self.pinned_bytes + nbytes > self.limit_bytes

    def _add(self, region: Region) -> None:
        at = bisect.bisect_left(self._starts, region.start)
        self._starts.insert(at, region.start)
        self._regions.insert(at, region)
        self.pinned_bytes += region.held_bytes
        self.peak_pinned_bytes = max(self.peak_pinned_bytes, self.pinned_bytes)

    def _remove(self, region: Region) -> None:
        at = self._regions.index(region)
        del self._starts[at], self._regions[at]
        self.pinned_bytes -= region.held_bytes
