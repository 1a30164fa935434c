"""What the cache's layers take of the card in one step, and which of them must leave for it.

Integers only: the same tensors that the stores make, counted before they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_llama.cache.loads import Span
from offload_llama.cost.setup import rounded
from offload_llama.geometry import Geometry, resident_rows


@dataclass(frozen=True, slots=True)
class Held:
    """One layer's tensors on the card: for each row of the cache the tokens of each buffer.

    A resident layer has a buffer for each part, a layer on the host at most its tail.
    """

    is_host: bool
    rows: tuple[tuple[int, ...], ...]

    def with_copy(self, src: int, dst: int) -> Held:
        """Return what the layer holds once row `dst` is a copy of row `src`."""
        rows = (self.rows[src if row == dst else row] for row in range(len(self.rows)))
        return Held(self.is_host, tuple(rows))


def block_bytes(geometry: Geometry, tokens: int) -> int:
    """Return what keys and values of this many tokens take of the card."""
    return rounded(2 * tokens * geometry.row_bytes)


def layer_bytes(held: Held, spans: Sequence[Span], geometry: Geometry) -> tuple[int, int, int]:
    """Return the layer's bytes before a step, at most during it, and after it.

    While the last part's buffer grows, the old one is there too.
    """
    part = geometry.part_tokens
    before = sum(block_bytes(geometry, tokens) for row in held.rows for tokens in row)
    most = after = before
    for span in spans:
        buffers, stop = held.rows[span.row], span.start + span.n_new
        if held.is_host:
            if not buffers:
                after += block_bytes(geometry, geometry.flush_tokens)
            most = max(most, after)
            continue
        for index in range(span.start // part, -(-stop // part)):
            tokens = min(part, stop - index * part)
            old = buffers[index] if index < len(buffers) else 0
            if old < tokens:
                after += block_bytes(geometry, resident_rows(geometry, tokens)[0])
                most = max(most, after)
                after -= block_bytes(geometry, old)
    return before, most, after


def step_bytes(layers: Sequence[Held], spans: Sequence[Span], geometry: Geometry) -> int:
    """Return the most bytes that the layers' rows and tails take during a step.

    Args:
        layers: what each holds, in the order in which they run.
        spans: the step's sequences; none for what is held now.
        geometry: the cache's.
    """
    known = {held: layer_bytes(held, spans, geometry) for held in set(layers)}
    total = most = sum(known[held][0] for held in layers)
    for held in layers:
        before, during, after = known[held]
        most = max(most, total - before + during)
        total += after - before
    return most


def layers_to_move(
    order: Sequence[int],
    layers: Sequence[Held],
    spans: Sequence[Span],
    geometry: Geometry,
    budget_bytes: int,
) -> tuple[int, ...]:
    """Return the resident layers that must leave so that a step stays within the budget.

    Where even all of them are not enough, that is all of them.

    Args:
        order: every layer, in the order in which they leave.
        layers: what each holds.
        spans: the step's sequences.
        geometry: the cache's.
        budget_bytes: bytes that rows and tails may take.
    """
    left, moved = list(layers), []
    for layer in order:
        if step_bytes(left, spans, geometry) <= budget_bytes:
            break
        if not left[layer].is_host:
            left[layer] = Held(True, ((),) * len(left[layer].rows))
            moved.append(layer)
    return tuple(moved)
