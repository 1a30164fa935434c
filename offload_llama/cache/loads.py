"""Which host rows go into which slot in one step: the order of the ring's loads. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence in a step.

    Row `row` of the cache has `start` tokens and gets `n_new`, which are the packed tokens
    `[offset, offset + n_new)`.
    """

    row: int
    start: int
    n_new: int
    offset: int

    @property
    def appends(self) -> bool:
        """A single new token is attended inside the last part, several as a square of their own."""
        return self.n_new == 1

    @property
    def n_visible(self) -> int:
        """Rows that stand in parts while this step attends them."""
        return self.start + (1 if self.appends else 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one part of one sequence inside a slot.

    Rows `[first, first + n_host)` of cache row `row` come from the host to slot row `offset`; the
    card appends the part's newest rows behind them, `n_total` rows in all.
    """

    row: int
    first: int
    n_host: int
    n_total: int
    offset: int


@dataclass(frozen=True, slots=True)
class Load:
    """What one slot carries: pieces of one layer, in the order in which they are attended."""

    layer: int
    pieces: tuple[Piece, ...]


def part_ranges(n_rows: int, part_tokens: int) -> list[tuple[int, int]]:
    """Return the (first, stop) of each part of a sequence of n_rows rows."""
    return [(first, min(n_rows, first + part_tokens)) for first in range(0, n_rows, part_tokens)]


def plan_layer(
    layer: int,
    spans: Sequence[Span],
    host_lens: Sequence[int],
    *,
    part_tokens: int,
    slot_tokens: int,
) -> list[Load]:
    """Return the loads of one offloaded layer.

    Parts that hold no host row need no load. Short parts of several sequences share a slot.

    Args:
        layer: the layer.
        spans: the step's sequences.
        host_lens: rows of each span's sequence that are on the host.
        part_tokens: tokens of a part.
        slot_tokens: rows a slot holds; at least the rows of any part that occurs.
    """
    loads: list[Load] = []
    pieces: list[Piece] = []
    used = 0
    for span, host_len in zip(spans, host_lens, strict=True):
        for first, stop in part_ranges(span.n_visible, part_tokens):
            n_host = min(host_len, stop) - first
            if n_host <= 0:
                break
            if used + stop - first > slot_tokens:
                loads.append(Load(layer, tuple(pieces)))
                pieces, used = [], 0
            pieces.append(Piece(span.row, first, n_host, stop - first, used))
            used += stop - first
    if pieces:
        loads.append(Load(layer, tuple(pieces)))
    return loads
