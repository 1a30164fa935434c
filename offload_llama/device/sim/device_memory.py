"""The card's memory: blocks, their bytes, and what became of freed ones.

Sizes are rounded up to 512 bytes, as the CUDA caching allocator does; that it serves blocks from
larger segments, and what it loses between them, is not modelled. A freed block belongs to the
stream it was allocated on, and the next allocation of that stream may be cut from it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from offload_llama.device.sim.hazards import Access, Actor, Memory, pending
from offload_llama.device.sim.site import Site
from offload_llama.device.sim.spans import Span

GRANULARITY_BYTES = 512
# Blocks up to this size and larger ones come from separate pools.
# Source: c10/cuda/CUDACachingAllocator, kSmallSize.
_SMALL_BYTES = 2**20
_KEPT_RECORDS = 500_000


class Allocation(NamedTuple):
    """One allocation on the card."""

    nbytes: int
    site: Site

    @property
    def where(self) -> str:
        """The line of the engine that asked for it."""
        return str(self.site)


class Block(Memory):
    """One allocation; given back when the last tensor that views it dies."""

    __slots__ = ("flat", "memory", "nbytes", "owner", "recorded")

    def __init__(self, memory: DeviceMemoryModel, nbytes: int, owner: Actor) -> None:
        super().__init__(f"a device block of {nbytes} bytes")
        self.memory, self.nbytes, self.owner = memory, nbytes, owner
        self.flat: torch.Tensor | None = None
        self.recorded: set[int] = set()

    def __del__(self) -> None:
        self.memory.release(self)


class DeviceMemoryModel:
    """Counts bytes, and decides what a new block may have been before."""

    def __init__(self, capacity_bytes: int, total_bytes: int) -> None:
        self.capacity_bytes, self.total_bytes = capacity_bytes, total_bytes
        self.taken_by_others_bytes = 0
        self.live_bytes = self.peak_bytes = 0
        self.n_allocs = 0
        self.allocations: deque[Allocation] = deque(maxlen=_KEPT_RECORDS)
        self._freed: dict[tuple[int, bool], list[Access]] = {}
        self._flats: dict[tuple[int, int], list[torch.Tensor]] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes a new block could take."""
        return max(0, self.capacity_bytes - self.taken_by_others_bytes - self.live_bytes)

    def allocate(self, nbytes: int, owner: Actor, site: Site) -> Block:
        """Return a new block, with the accesses that its first use must come after.

        Raises:
            torch.OutOfMemoryError: it would not fit the card.
        """
        rounded = -(-nbytes // GRANULARITY_BYTES) * GRANULARITY_BYTES
        if rounded > self.free_bytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {rounded / 2**20:.2f} MiB. The simulated "
                f"card has {self.total_bytes / 2**30:.2f} GiB, of which "
                f"{self.free_bytes / 2**20:.2f} MiB are free; tensors hold "
                f"{self.live_bytes / 2**20:.2f} MiB ({site})"
            )
        block = Block(self, rounded, owner)
        self.live_bytes += rounded
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.n_allocs += 1
        self.allocations.append(Allocation(rounded, site))
        pool = (owner.actor_id, rounded <= _SMALL_BYTES)
        freed = self._freed.get(pool)
        if freed:
            # What the stream has waited for since can hurt nobody; dropped to keep the list short.
            freed[:] = pending(freed, owner.clock)
            block.log = [a.as_freed(nbytes) for a in freed]
        # Whoever else uses the block first must come after what its stream did to it before.
        count = owner.clock[owner.actor_id]
        if count:
            whole = Span(0, nbytes, nbytes)
            block.log.append(Access(owner, count, whole, True, "the allocation", site))
        return block

    def release(self, block: Block) -> None:
        """Give a block back: its bytes at once, its pending accesses to whoever takes it next.

        Streams that the tensor was recorded on are waited for by the allocator itself.
        """
        self.live_bytes -= block.nbytes
        owner = block.owner
        left = [
            a
            for a in pending(block.log, owner.clock)
            if a.actor is not owner and not a.freed and a.actor.actor_id not in block.recorded
        ]
        if left:
            pool = (owner.actor_id, block.nbytes <= _SMALL_BYTES)
            self._freed.setdefault(pool, []).extend(left)
        if block.flat is not None and not block.recorded:
            self._flats.setdefault((owner.actor_id, block.nbytes), []).append(block.flat)

    def flat_memory(self, block: Block) -> torch.Tensor:
        """Return the block's real bytes, (nbytes,) uint8: those of a freed block if there is one.

        So that where work runs late, memory that was freed early is really overwritten.
        """
        flats = self._flats.get((block.owner.actor_id, block.nbytes))
        with torch.inference_mode(False):
            block.flat = flats.pop() if flats else torch.empty(block.nbytes, dtype=torch.uint8)
        return block.flat

    def forget(self) -> None:
        """Empty the list of allocations, not the bytes they hold."""
        self.n_allocs = 0
        self.allocations.clear()
