"""Seconds of a decode step and of a prompt: kernels, copies and launches, as the ring orders them.

A step is followed load by load: a copy starts when the link is free and its slot was read, a part
is attended when its copy is there, and nothing starts before the host launched it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from offload_llama.cost.forward import LayerWork, PassCost, Span, Work, forward
from offload_llama.cost.memory import ring_slots, slot_tokens
from offload_llama.cost.setup import Setup
from offload_llama.geometry import MIN_PAGE_TOKENS
from offload_llama.hardware import HardwareProfile

PREFILL_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class LoadCost:
    """One slot's copies: seconds alone on the link, how many, and the parts they bring."""

    seconds: float
    copies: int
    n_parts: int


def copies_of(setup: Setup, rows: int) -> int:
    """Return how many copies carry the keys (or the values) of this many rows of a part.

    The pages of one prompt chunk are neighbours, and those of the next chunk lie behind the other
    layers'. The last rows are in ever smaller pages: one for each power of two they consist of,
    which on average is every second one.
    """
    together = min(setup.geometry.part_tokens, setup.prefill_chunk)
    whole, rest = divmod(rows, together)
    return max(1, whole + ((-(-rest // MIN_PAGE_TOKENS)).bit_length() + 1) // 2)


def loads_of_layer(
    setup: Setup, profile: HardwareProfile, starts: Sequence[int]
) -> tuple[LoadCost, ...]:
    """Return the loads of one offloaded layer for sequences of these lengths.

    The newest rows are in the tail, half full on average; short parts share a slot.
    """
    geometry = setup.geometry
    capacity, size = slot_tokens(setup), geometry.part_tokens
    loads: list[list[int]] = []
    used = capacity
    for start in starts:
        on_host = max(0, start - geometry.flush_tokens // 2)
        full, rest = divmod(on_host, size)
        for rows in [size] * full + ([rest] if rest else []):
            if used + rows > capacity:
                loads.append([])
                used = 0
            loads[-1].append(rows)
            used += rows
    costs = []
    for load in loads:
        halves = [rows * setup.kv_row_bytes for rows in load]
        copies = 2 * sum(copies_of(setup, rows) for rows in load)
        seconds = copies * profile.copy_latency_s + 2 * sum(halves) / profile.h2d_bytes_per_s
        costs.append(LoadCost(seconds, copies, len(load)))
    return tuple(costs)


class Pipeline:
    """The clocks of host, compute and link during one pass."""

    def __init__(self, launch_s: float, slots: int, loads: Sequence[LoadCost], n_host: int) -> None:
        self.host_s = self.compute_s = self.link_s = 0.0
        self._launch_s, self._slots, self._loads = launch_s, slots, loads
        self._total = n_host * len(loads)
        self._ready: list[float] = []
        self._consumed: list[float] = []
        self._taken = 0

    def begin(self) -> None:
        """Queue as many loads as there are slots."""
        for _ in range(self._slots):
            self._queue_next()

    def _queue_next(self) -> None:
        index = len(self._ready)
        if index == self._total:
            return
        load = self._loads[index % len(self._loads)]
        self.host_s += load.copies * self._launch_s
        start = max(self.link_s, self.host_s)
        if index >= self._slots:
            start = max(start, self._consumed[index - self._slots])
        self.link_s = start + load.seconds
        self._ready.append(self.link_s)

    def compute(self, work: Work) -> None:
        """Launch kernels and let them run behind what is queued."""
        began_s = max(self.compute_s, self.host_s)
        self.host_s += work.launches * self._launch_s
        self.compute_s = max(began_s + work.seconds, self.host_s)

    def resident(self, layer: LayerWork) -> None:
        """Run a layer whose rows are on the card."""
        self.compute(layer.before)
        for work in layer.parts:
            self.compute(work)
        self.compute(layer.after)

    def streamed(self, layer: LayerWork) -> None:
        """Run a layer whose parts come through the ring."""
        self.compute(layer.before)
        parts = iter(layer.parts)
        for load in self._loads:
            self.compute_s = max(self.compute_s, self._ready[self._taken])
            self._taken += 1
            for _ in range(load.n_parts):
                work = next(parts, None)
                if work is not None:
                    self.compute(work)
            self._consumed.append(self.compute_s)
            self._queue_next()
        for work in parts:
            self.compute(work)
        self.compute(layer.after)


def _pass_seconds(
    setup: Setup,
    profile: HardwareProfile,
    hosts: Sequence[bool],
    cost: PassCost,
    loads: Sequence[LoadCost],
    flush_s: float,
) -> float:
    """Return the seconds of one pass; `flush_s` is what each offloaded layer sends down."""
    n_host = sum(hosts)
    slots = ring_slots(setup, n_host) if n_host else 0
    clocks = Pipeline(profile.launch_s, slots, loads, n_host)
    clocks.host_s = 2 * profile.launch_s
    clocks.begin()
    clocks.compute(cost.first)
    for on_host in hosts:
        if on_host:
            clocks.streamed(cost.host)
            clocks.link_s = max(clocks.link_s, clocks.compute_s) if flush_s else clocks.link_s
            clocks.link_s += flush_s
        else:
            clocks.resident(cost.resident)
    clocks.compute(cost.last)
    # The choice comes back in one small copy, which the host waits for.
    return max(clocks.host_s, clocks.compute_s) + profile.copy_latency_s + profile.launch_s


@functools.lru_cache(maxsize=4096)
def _decode_seconds(
    setup: Setup, profile: HardwareProfile, hosts: tuple[bool, ...], context: int
) -> float:
    spans = (Span(max(0, context - 1), 1),) * setup.batch
    cost = forward(setup, profile, spans, n_wanted=setup.batch, growing=not all(hosts))
    loads = loads_of_layer(setup, profile, [span.start for span in spans])
    return _pass_seconds(setup, profile, hosts, cost, loads, 0.0)


def decode_seconds(
    setup: Setup, profile: HardwareProfile, hosts: Sequence[bool], context: int
) -> float:
    """Return the seconds of a decode step of all sequences at this many tokens each.

    Args:
        setup: the model and its numbers.
        profile: the card.
        hosts: for each layer, whether it is offloaded.
        context: tokens that each sequence has, the new one included.
    """
    return _decode_seconds(setup, profile, tuple(hosts), context)


def prefill_seconds(
    setup: Setup, profile: HardwareProfile, hosts: Sequence[bool], n_tokens: int
) -> float:
    """Return the seconds of one prompt of this many tokens, to its first answer token.

    Some chunks are computed and those between them interpolated: their cost grows steadily.
    """
    chunk = min(setup.prefill_chunk, n_tokens)
    starts = list(range(0, n_tokens, chunk))
    step = max(1, (len(starts) - 1) // PREFILL_SAMPLES)
    sampled = sorted({*range(0, len(starts), step), len(starts) - 1})
    seconds = []
    for index in sampled:
        start = starts[index]
        last = index == len(starts) - 1
        span = Span(start, min(chunk, n_tokens - start))
        cost = forward(setup, profile, (span,), n_wanted=int(last), growing=not all(hosts))
        loads = loads_of_layer(setup, profile, [start + setup.geometry.flush_tokens // 2])
        half = span.n_new * setup.kv_row_bytes
        copies = 2 * copies_of(setup, span.n_new)
        flush_s = copies * profile.copy_latency_s + 2 * half / profile.d2h_bytes_per_s
        seconds.append(_pass_seconds(setup, profile, hosts, cost, loads, flush_s))
    total = seconds[0]
    for (a, left), (b, right) in itertools.pairwise(zip(sampled, seconds, strict=True)):
        # Chunks a+1 .. b on the line between the two.
        total += sum(left + (right - left) * (i - a) / (b - a) for i in range(a + 1, b + 1))
    return total
