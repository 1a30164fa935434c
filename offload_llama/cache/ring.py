"""Part-sized slots on the card that offloaded rows stream through.

Loads are queued on the copy stream in the order in which the pass consumes them. A slot's *ready*
event says that its load is done (compute waits), its *consumed* event that its last reader was
queued (the next load into it waits).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from offload_llama.cache.link import Link
from offload_llama.cache.loads import Load, Piece
from offload_llama.device import Device, Event
from offload_llama.geometry import Geometry

Fill = Callable[[int, Piece, torch.Tensor], None]
"""(layer, piece, destination (2, n_host, KH, D)): queues the copies of one piece."""


class Ring:
    """The slots, allocated once (there are none before), and the current step's queue of loads."""

    def __init__(
        self,
        device: Device,
        geometry: Geometry,
        dtype: torch.dtype,
        link: Link,
        *,
        slot_tokens: int,
    ) -> None:
        self.slot_tokens = slot_tokens
        self._shape = (2, slot_tokens, geometry.n_kv_heads, geometry.head_dim)
        self._device, self._dtype, self._link = device, dtype, link
        self._slots: list[torch.Tensor] = []
        self._ready: list[Event] = []
        self._consumed: list[Event] = []
        self._loads: Sequence[Load] = ()
        self._queued = self._taken = 0
        self._reading = False
        self._fill: Fill | None = None

    def allocate(self, n_slots: int) -> None:
        """Take the slots' memory; all of them or, if that raises, none."""
        where = self._device.torch_device
        self._slots = [
            torch.empty(self._shape, dtype=self._dtype, device=where) for _ in range(n_slots)
        ]
        self._ready = [self._device.event() for _ in range(n_slots)]
        self._consumed = [self._device.event() for _ in range(n_slots)]
        for consumed in self._consumed:
            # Their blocks come from the compute stream and may still be in use there.
            consumed.record(self._device.current_stream())

    def close(self) -> None:
        """Give the slots back; nothing is in flight any more."""
        self._slots = []

    @property
    def n_slots(self) -> int:
        return len(self._slots)

    @property
    def size_bytes(self) -> int:
        return sum(slot.numel() * slot.element_size() for slot in self._slots)

    def begin(self, loads: Sequence[Load], fill: Fill) -> None:
        """Start a step: queue as many of its loads as there are slots."""
        self._loads, self._fill = loads, fill
        self._queued = self._taken = 0
        for _ in self._slots:
            self._queue_next()

    def end(self) -> None:
        """End a step. If it broke off, a slot may have readers that were never marked."""
        if self._taken < len(self._loads) or self._reading:
            for consumed in self._consumed:
                consumed.record(self._device.current_stream())
        self._reading = False
        self._loads, self._fill = (), None

    def _queue_next(self) -> None:
        if self._queued == len(self._loads) or self._fill is None:
            return
        load, index = self._loads[self._queued], self._queued % len(self._slots)
        self._queued += 1
        self._link.stream.wait_event(self._consumed[index])
        for piece in load.pieces:
            rows = slice(piece.offset, piece.offset + piece.n_host)
            self._fill(load.layer, piece, self._slots[index][:, rows])
        self._ready[index].record(self._link.stream)

    def pieces(self, layer: int) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield the layer's pieces, each with its rows of the slot, (2, n_total, KH, D).

        A piece may be read, and its rows behind `n_host` written, until the next is asked for.
        """
        while self._taken < len(self._loads) and self._loads[self._taken].layer == layer:
            load, index = self._loads[self._taken], self._taken % len(self._slots)
            self._taken += 1
            self._reading = True
            self._device.current_stream().wait_event(self._ready[index])
            for piece in load.pieces:
                yield piece, self._slots[index][:, piece.offset : piece.offset + piece.n_total]
            self._consumed[index].record(self._device.current_stream())
            self._reading = False
            self._queue_next()
