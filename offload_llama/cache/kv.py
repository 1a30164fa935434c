"""The KV cache of a model: one store per layer, the steps that fill them, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from offload_llama.attention import choose_kernel
from offload_llama.cache.budget import Held, layers_to_move
from offload_llama.cache.host import Departures, HostStore
from offload_llama.cache.link import Link
from offload_llama.cache.loads import Load, Piece, Span, plan_layer
from offload_llama.cache.resident import ResidentStore
from offload_llama.cache.ring import Ring
from offload_llama.cache.slabs import HostPages
from offload_llama.cache.step import LOGITS, Step, Uploads
from offload_llama.config import ModelConfig
from offload_llama.device import Device
from offload_llama.errors import CacheError, CapacityError, ConfigError
from offload_llama.geometry import ceil_power, choose_geometry, choose_ring_slots
from offload_llama.policy import Placement, spill_order

LATE_RING_SLOTS = 2
"""Slots of a ring that is first needed when the card is full: the fewest that overlap."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Bytes of the cache now, and KV bytes copied since `reset_counters`.

    `device_kv_bytes` are the resident parts and the tails, without the ring (`ring_bytes`);
    `host_kv_bytes` are the rows on the host, `pinned_bytes` the memory pinned for them.
    """

    host_kv_bytes: int
    device_kv_bytes: int
    ring_bytes: int
    pinned_bytes: int
    h2d_bytes: int
    d2h_bytes: int


class KVCache:
    """Keys and values of up to `max_batch_size` sequences of up to `max_seq_len` tokens.

    Memory is taken as sequences grow, and layers move to the host as it runs out; when every row
    is gone, they come back.

    Attributes:
        lengths: tokens of each row.
        stores: the layers; another list whenever one of them moved.
        placements: where each layer is now, and why.

    Args:
        kv_budget_bytes: bytes of the card that resident rows and tails may take; None sets no
            limit. With a limit the ring is there from the beginning.
        on_move: is told, between steps, which layers have just moved to the host.

    Raises:
        ConfigError: a size is not possible, or placements do not match the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        placements: Sequence[Placement],
        *,
        dtype: torch.dtype,
        max_batch_size: int,
        max_seq_len: int,
        part_tokens: int | None = None,
        flush_tokens: int | None = None,
        ring_slots: int | None = None,
        pin: bool = True,
        warn: Callable[[str], None] = lambda message: None,
        kv_budget_bytes: int | None = None,
        on_move: Callable[[tuple[int, ...]], None] = lambda layers: None,
    ) -> None:
        if max_batch_size < 1 or max_seq_len < 1:
            raise ConfigError(
                "the cache needs a batch size and a context of at least 1, got "
                f"{max_batch_size} and {max_seq_len}"
            )
        if [p.layer for p in placements] != list(range(config.n_layers)):
            raise ConfigError(f"one placement for each of {config.n_layers} layers is needed")
        self.geometry = choose_geometry(
            config, dtype.itemsize, part_tokens=part_tokens, flush_tokens=flush_tokens
        )
        self.device, self.dtype = device, dtype
        self.max_batch_size, self.max_seq_len = max_batch_size, max_seq_len
        self.lengths = [0] * max_batch_size
        self.uploads = Uploads(device)
        self._link = Link(device, pin=pin, warn=warn)
        self._memory = HostPages(device, self.geometry, dtype, self._link, pin=pin)
        self._departures = Departures(device)
        self.kv_budget_bytes, self.on_move = kv_budget_bytes, on_move
        self._kernel = choose_kernel(device.torch_device, dtype, config.head_dim)
        tokens = max_batch_size * max_seq_len
        slot_tokens = min(self.geometry.part_tokens, ceil_power(tokens))
        self._ring = Ring(device, self.geometry, dtype, self._link, slot_tokens=slot_tokens)
        n_host = sum(p.store == "host" for p in placements)
        if n_host or kv_budget_bytes is not None:
            if ring_slots is None:
                parts = -(-tokens // self.geometry.part_tokens)
                ring_slots = choose_ring_slots(config, dtype.itemsize, n_host, parts)
            if ring_slots < 2:
                raise ConfigError(f"the ring needs at least 2 slots, got {ring_slots}")
            self._ring.allocate(ring_slots)
        self.placements = self._first_placements = tuple(placements)
        self._departure_order = spill_order(config.n_layers)
        self._was_emptied = False
        self.stores: list[ResidentStore | HostStore] = [
            self._host_store(p.layer) if p.store == "host" else self._resident_store(p.layer)
            for p in placements
        ]

    def _resident_store(self, layer: int) -> ResidentStore:
        return ResidentStore(
            layer,
            self.device,
            self.geometry,
            self.dtype,
            self._kernel,
            self.lengths,
            self.max_seq_len,
        )

    def _host_store(self, layer: int) -> HostStore:
        return HostStore(
            layer,
            self.device,
            self.geometry,
            self.dtype,
            self._kernel,
            self.lengths,
            self.max_seq_len,
            memory=self._memory,
            ring=self._ring,
            link=self._link,
            departures=self._departures,
        )

    def step(
        self,
        rows: Sequence[int],
        start: Sequence[int],
        n_new: Sequence[int],
        logits: str = "last",
    ) -> Step:
        """Return a step that appends `n_new[i]` tokens at position `start[i]` to row `rows[i]`.

        Args:
            rows: cache rows, each at most once.
            start: at most the row's length; if smaller, the row is truncated there first.
            n_new: new tokens of each row, at least 1.
            logits: "last" for each row's last token, "all" for every token, or "none".

        Raises:
            CacheError: a row is out of range, repeated or would leave a gap.
            CapacityError: a row would outgrow `max_seq_len`.
        """
        if not rows or not len(rows) == len(start) == len(n_new):
            raise CacheError("a step needs rows, and one start and one n_new for each of them")
        if logits not in LOGITS:
            raise CacheError(f"logits must be one of {', '.join(LOGITS)}, got {logits!r}")
        if len(set(rows)) != len(rows):
            raise CacheError(f"a step names a cache row twice: {list(rows)}")
        spans: list[Span] = []
        offset = 0
        for row, first, n in zip(rows, start, n_new, strict=True):
            self._check_row(row)
            if n < 1 or not 0 <= first <= self.lengths[row]:
                raise CacheError(
                    f"row {row} has {self.lengths[row]} tokens; cannot append {n} at {first}"
                )
            if first + n > self.max_seq_len:
                raise CapacityError(
                    f"{first + n} tokens do not fit the context of {self.max_seq_len}; "
                    "raise it with --ctx"
                )
            spans.append(Span(row, first, n, offset))
            offset += n
        return Step(self, tuple(spans), logits)

    def begin_step(self, step: Step) -> None:
        """Move what the budget asks for and queue the first loads; called by the step itself."""
        self._departures.settle()
        if self._was_emptied:
            self._come_back()
        self._make_room((store.held for store in self.stores), step.spans)
        host = [store for store in self.stores if isinstance(store, HostStore)]
        if host and not self._ring.n_slots:
            self._ring.allocate(LATE_RING_SLOTS)
        loads: list[Load] = []
        for store in host:
            loads += plan_layer(
                store.layer,
                step.spans,
                [store.host_len(span.row) for span in step.spans],
                part_tokens=self.geometry.part_tokens,
                slot_tokens=self._ring.slot_tokens,
            )
        self._ring.begin(loads, self._fill)

    def end_step(self) -> None:
        """Forget loads that nobody took; called by the step itself."""
        self._ring.end()

    def _fill(self, layer: int, piece: Piece, slot: torch.Tensor) -> None:
        store = self.stores[layer]
        if isinstance(store, HostStore):
            store.fill(piece, slot)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.max_batch_size:
            raise CacheError(f"the cache has rows 0-{self.max_batch_size - 1}, asked for {row}")

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens of a row from `length` on. Nothing crosses the link.

        Raises:
            CacheError: no such row, or it is shorter than that.
        """
        self._check_row(row)
        if not 0 <= length <= self.lengths[row]:
            raise CacheError(
                f"row {row} has {self.lengths[row]} tokens; cannot truncate it to {length}"
            )
        with self.device.scope():  # a resident part may move to a smaller buffer
            for store in self.stores:
                store.truncate(row, length)
        self.lengths[row] = length
        self._was_emptied = not any(self.lengths)

    def free(self, row: int) -> None:
        """Forget a row; its pages, parts and tails go back."""
        self.truncate(row, 0)
        for store in self.stores:
            store.free(row)

    def copy_row(self, src: int, dst: int) -> None:
        """Let row `dst` hold what `src` holds; host pages are shared until one of them writes.

        Raises:
            CacheError: no such row, or both are the same.
        """
        self._check_row(src)
        self._check_row(dst)
        if src == dst:
            raise CacheError(f"cannot copy row {src} to itself")
        self.free(dst)
        self._make_room((store.held.with_copy(src, dst) for store in self.stores), ())
        for store in self.stores:
            store.copy_row(src, dst)
        self.lengths[dst] = self.lengths[src]

    def move_to_host(self, layers: Sequence[int], *, because: str = "asked for") -> tuple[int, ...]:
        """Move resident layers to the host, between steps, and return those that moved.

        Every row arrives there, and none is computed again. The host waits for one part at a
        time; its memory on the card is free before the next part is copied.
        """
        moved: list[int] = []
        for layer in layers:
            source = self.stores[layer]
            if isinstance(source, ResidentStore):
                target = self._host_store(layer)
                target.take_over(source)
                reason = f"moved to the host at {sum(self.lengths):,} tokens: {because}"
                self._replace(target, Placement(layer=layer, store="host", reason=reason))
                moved.append(layer)
        if moved:
            self.on_move(tuple(moved))
        return tuple(moved)

    def relieve(self) -> tuple[int, ...]:
        """Move the next resident layer to the host, because memory of the card ran out.

        Where there is no ring yet, the next step takes a small one from what this freed; should
        that fail too, ask again: nothing is lost. Returns the moved layer, or () if none is left.
        """
        if not self.device.offloads:
            return ()
        resident = [layer for layer in self._departure_order if not self.stores[layer].is_host]
        return self.move_to_host(resident[:1], because="the card had no memory left")

    def _make_room(self, held: Iterable[Held], spans: Sequence[Span]) -> None:
        """Move layers until a step on what is held keeps to the budget, or none are left."""
        if self.kv_budget_bytes is not None:
            layers = layers_to_move(
                self._departure_order, list(held), spans, self.geometry, self.kv_budget_bytes
            )
            self.move_to_host(layers, because="the card's budget was full")

    def _come_back(self) -> None:
        """Give each layer its first placement again; no row is there to be copied."""
        self._was_emptied = False
        for first, now in zip(self._first_placements, self.placements, strict=True):
            if first.store != now.store:
                for row in range(self.max_batch_size):
                    self.stores[first.layer].free(row)
                self._replace(self._resident_store(first.layer), first)

    def _replace(self, store: ResidentStore | HostStore, placement: Placement) -> None:
        at = placement.layer
        self.stores = [*self.stores[:at], store, *self.stores[at + 1 :]]
        self.placements = (*self.placements[:at], placement, *self.placements[at + 1 :])

    def stats(self) -> CacheStats:
        """Return what is held and what was copied."""
        return CacheStats(
            host_kv_bytes=sum(store.host_bytes for store in self.stores),
            device_kv_bytes=sum(store.device_bytes for store in self.stores),
            ring_bytes=self._ring.size_bytes,
            pinned_bytes=self._memory.pinned_bytes,
            h2d_bytes=self._link.h2d_bytes,
            d2h_bytes=self._link.d2h_bytes,
        )

    def reset_counters(self) -> None:
        """Start counting copied bytes from zero."""
        self._link.h2d_bytes = self._link.d2h_bytes = 0

    def close(self) -> None:
        """Give everything back: synchronise, drop what is on the card, unpin, unmap."""
        self.device.synchronize()
        self._departures.clear()
        self.stores.clear()
        self._ring.close()
        self._link.close()
        self._memory.close()
        self.lengths[:] = [0] * self.max_batch_size
