"""The KV cache of a model: one store per layer, the steps that fill them, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offload_llama.attention import choose_kernel
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
from offload_llama.policy import Placement


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

    Memory is taken as sequences grow. `lengths` are the tokens of each row; `stores` the layers.

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
        n_host = sum(p.store == "host" for p in placements)
        self._ring = self._make_ring(config, n_host, ring_slots) if n_host else None
        kernel = choose_kernel(device.torch_device, dtype, config.head_dim)
        self.stores: list[ResidentStore | HostStore] = []
        for p in placements:
            if p.store == "host" and self._ring is not None:
                self.stores.append(
                    HostStore(
                        p.layer,
                        device,
                        self.geometry,
                        dtype,
                        kernel,
                        self.lengths,
                        max_seq_len,
                        memory=self._memory,
                        ring=self._ring,
                        link=self._link,
                        departures=self._departures,
                    )
                )
            else:
                self.stores.append(
                    ResidentStore(
                        p.layer, device, self.geometry, dtype, kernel, self.lengths, max_seq_len
                    )
                )

    def _make_ring(self, config: ModelConfig, n_host: int, n_slots: int | None) -> Ring:
        part, tokens = self.geometry.part_tokens, self.max_batch_size * self.max_seq_len
        if n_slots is None:
            n_slots = choose_ring_slots(config, self.dtype.itemsize, n_host, -(-tokens // part))
        if n_slots < 2:
            raise ConfigError(f"the ring needs at least 2 slots, got {n_slots}")
        return Ring(
            self.device,
            self.geometry,
            self.dtype,
            self._link,
            n_slots=n_slots,
            slot_tokens=min(part, ceil_power(tokens)),
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
        """Queue the first loads of a step; called by the step itself."""
        self._departures.settle()
        if self._ring is None:
            return
        loads: list[Load] = []
        for store in self.stores:
            if isinstance(store, HostStore):
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
        if self._ring is not None:
            self._ring.end()

    def _fill(self, layer: int, piece: Piece, slot: torch.Tensor) -> None:
        store = self.stores[layer]
        if isinstance(store, HostStore):
            store.fill(piece, slot)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.max_batch_size:
            raise CacheError(f"the cache has rows 0-{self.max_batch_size - 1}, asked for {row}")

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens of a row from `length` on. Nothing is copied.

        Raises:
            CacheError: no such row, or it is shorter than that.
        """
        self._check_row(row)
        if not 0 <= length <= self.lengths[row]:
            raise CacheError(
                f"row {row} has {self.lengths[row]} tokens; cannot truncate it to {length}"
            )
        for store in self.stores:
            store.truncate(row, length)
        self.lengths[row] = length

    def free(self, row: int) -> None:
        """Forget a row; its pages and parts go back."""
        self._check_row(row)
        self.truncate(row, 0)

    def copy_row(self, src: int, dst: int) -> None:
        """Let row `dst` hold what `src` holds; host pages are shared until one of them writes.

        Raises:
            CacheError: no such row, or both are the same.
        """
        self._check_row(src)
        self._check_row(dst)
        if src == dst:
            raise CacheError(f"cannot copy row {src} to itself")
        for store in self.stores:
            store.copy_row(src, dst)
        self.lengths[dst] = self.lengths[src]

    def stats(self) -> CacheStats:
        """Return what is held and what was copied."""
        return CacheStats(
            host_kv_bytes=sum(store.host_bytes for store in self.stores),
            device_kv_bytes=sum(store.device_bytes for store in self.stores),
            ring_bytes=self._ring.size_bytes if self._ring else 0,
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
        self._ring = None
        self._link.close()
        self._memory.close()
        self.lengths[:] = [0] * self.max_batch_size
