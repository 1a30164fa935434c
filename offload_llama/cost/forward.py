"""One forward pass on the tape: the peak of its memory, and the times of its layers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from offload_llama.cost.setup import Setup, rounded
from offload_llama.cost.tape import Tape
from offload_llama.geometry import FIRST_BUFFER_TOKENS, resident_rows
from offload_llama.hardware import HardwareProfile


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence in a pass: the tokens it has, and new ones. A single one joins the last part."""

    start: int
    n_new: int

    @property
    def appends(self) -> bool:
        return self.n_new == 1

    def parts(self, part_tokens: int) -> list[int]:
        """Return how many rows of each part the new tokens attend."""
        visible = self.start + (1 if self.appends else 0)
        full, rest = divmod(visible, part_tokens)
        return [part_tokens] * full + ([rest] if rest else [])


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of the card, and kernels the host must launch for them."""

    seconds: float
    launches: int


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One layer: up to its attention, each cached part, and the rest."""

    before: Work
    parts: tuple[Work, ...]
    after: Work

    @property
    def seconds(self) -> float:
        return self.before.seconds + sum(w.seconds for w in self.parts) + self.after.seconds


@dataclass(frozen=True, slots=True)
class PassCost:
    """A forward pass: peak bytes beyond weights and cache, of which logits; and its work.

    `first` is what precedes layer 0. `growth_bytes` of a resident layer are in the peak.
    """

    peak_bytes: int
    logits_bytes: int
    first: Work
    resident: LayerWork
    host: LayerWork
    last: Work


def _work(tape: Tape, since: tuple[float, int]) -> Work:
    return Work(tape.seconds - since[0], tape.launches - since[1])


def _layer(tape: Tape, spans: Sequence[Span], hidden: int, host: bool) -> tuple[LayerWork, int]:
    """Run one layer; return its work and the block of the new hidden state.

    `hidden` is the block of its input, let go once the output is there.
    """
    setup, config = tape.setup, tape.config
    geometry = setup.geometry
    n = sum(span.n_new for span in spans)
    began = tape.seconds, tape.launches
    normed = tape.norm(n)
    xq = tape.linear(n, config.n_heads * config.head_dim, config.dim)
    xk = tape.linear(n, config.n_kv_heads * config.head_dim, config.dim)
    xv = tape.linear(n, config.n_kv_heads * config.head_dim, config.dim)
    turned = tape.rotary(n, config.n_heads, xq), tape.rotary(n, config.n_kv_heads, xk)
    if tape.item < 4:
        tape.drop(xq, xk)
    xq, xk = turned
    tape.marks.clear()
    before = tape.seconds, tape.launches
    outputs = []
    row_bytes = 2 * setup.kv_row_bytes
    for span in spans:
        if not host:
            held = resident_rows(geometry, span.start + span.n_new)[-1]
            # While a part's buffer doubles, the old one is there too.
            old_rows = held // 2 if held > FIRST_BUFFER_TOKENS else 0
            tape.drop(tape.new(old_rows * row_bytes))
        if not host or span.appends:
            tape.run(span.n_new * row_bytes, times=2)
        if host and span.appends:
            # The tail, half full on average, goes behind the rows of the last slot.
            tape.run(geometry.flush_tokens * row_bytes)
        own = not span.appends
        outputs.append(tape.attend(span.n_new, span.parts(geometry.part_tokens), own))
    if len(outputs) > 1:
        joined = tape.new(n * config.n_heads * config.head_dim * tape.item)
        tape.run(2 * n * config.n_heads * config.head_dim * tape.item)
        tape.drop(*outputs)
        outputs = [joined]
    marks = [before, *tape.marks]
    [output] = outputs
    flat = 0
    if len(spans) == 1 and n > 1:
        size = n * config.n_heads * config.head_dim * tape.item
        flat = tape.new(size)
        tape.run(2 * size)
    attended = tape.linear(n, config.dim, config.n_heads * config.head_dim)
    # Keys and values that leave the card are departing from here on, which the caller counts.
    tape.drop(flat, output, xq, xk, xv, normed)
    size = n * config.dim * tape.item
    h = tape.new(size)
    tape.run(3 * size)
    tape.drop(attended)
    normed = tape.norm(n)
    fed = tape.feed_forward(n)
    tape.drop(normed)
    out = tape.new(size)
    tape.run(3 * size)
    tape.drop(fed, h, hidden)
    points = [began, *marks, (tape.seconds, tape.launches)]
    pieces = [Work(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(points)]
    return LayerWork(pieces[0], tuple(pieces[1:-1]), pieces[-1]), out


@functools.lru_cache(maxsize=4096)
def forward(
    setup: Setup,
    profile: HardwareProfile,
    spans: tuple[Span, ...],
    *,
    n_wanted: int,
    departing_bytes: int = 0,
    growing: bool = True,
) -> PassCost:
    """Return the cost of one pass.

    Args:
        setup: the model and its numbers.
        profile: the card.
        spans: the sequences.
        n_wanted: rows whose logits are computed.
        departing_bytes: keys and values of earlier layers on their way out meanwhile.
        growing: whether some layer is resident, whose buffers may double in this pass.
    """
    config, tape = setup.config, Tape(setup, profile)
    n = sum(span.n_new for span in spans)
    departing = tape.new(departing_bytes)
    tokens = tape.new(8 * n), tape.new(8 * n), tape.new(8 * n)
    hidden = tape.embedding(n)
    angles = n * config.head_dim // 2 * 4
    as_float, turned = tape.new(4 * n), tape.new(angles)
    tape.drop(as_float)
    tape.run(12 * n)
    tape.run(2 * angles)
    ones, trig = tape.new(angles), tape.new(2 * angles)
    tape.run(angles)
    tape.run(4 * angles)
    tape.drop(turned, ones)
    first = _work(tape, (0.0, 0))
    resident, hidden = _layer(tape, spans, hidden, host=False) if growing else (None, hidden)
    host, hidden = _layer(tape, spans, hidden, host=True)
    layers_peak = tape.peak_bytes
    began = tape.seconds, tape.launches
    if n_wanted:
        logits = tape.head(n_wanted)
        tape.sample(n_wanted)
        tape.drop(logits)
    last = _work(tape, began)
    tape.drop(hidden, *tokens, trig, departing)
    return PassCost(
        peak_bytes=tape.peak_bytes - rounded(departing_bytes),
        logits_bytes=tape.peak_bytes - layers_peak,
        first=first,
        resident=resident or host,
        host=host,
        last=last,
    )
