"""The traffic between the two memories: one copy stream, its byte counters, its fallbacks.

One stream carries both directions, first in first out, so a load never overtakes the flush of the
rows it reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from offload_llama.device import Device, PinRefused
from offload_llama.geometry import MIB

BOUNCE_BYTES = 1 * MIB
BOUNCE_BUFFERS = 4


class Link:
    """Copies rows between pinned host memory and the card.

    Attributes:
        h2d_bytes, d2h_bytes: KV bytes copied so far.
    """

    def __init__(self, device: Device, *, pin: bool, warn: Callable[[str], None]) -> None:
        self.device = device
        self.stream = device.stream()
        self.pin = pin
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        self._warn = warn
        self._warned = False
        self._bounce: Bounce | None = None

    def refused(self, asked_bytes: int, pinned_bytes: int) -> None:
        """Take note that the platform pins no more: stage through a few small pinned buffers."""
        if self._bounce is None and self.pin:
            with contextlib.suppress(PinRefused):
                self._bounce = Bounce(self.device)
        if not self._warned:
            self._warned = True
            how = (
                "copies go through small pinned buffers"
                if self._bounce
                else "copies are pageable and block"
            )
            self._warn(
                f"host memory: {asked_bytes / MIB:.0f} MiB more could not be pinned "
                f"({pinned_bytes / MIB:.0f} MiB are); {how}, so offloaded layers stream at about "
                "half the link's speed. The text is the same."
            )

    def h2d(self, dst: torch.Tensor, src: torch.Tensor, *, pinned: bool) -> None:
        """Queue a copy of host rows `src` to the card on the copy stream.

        Both are (S, KH, D), contiguous, of one dtype. Unpinned rows are read before this returns.
        """
        self.h2d_bytes += src.numel() * src.element_size()
        with self.device.use(self.stream):
            if pinned:
                dst.copy_(src, non_blocking=True)
            elif self._bounce is not None:
                self._bounce.h2d(dst, src)
            else:
                dst.copy_(src)

    def d2h(self, dst: torch.Tensor, src: torch.Tensor, *, pinned: bool) -> None:
        """Queue a copy of the card's rows `src` to host rows `dst` on the copy stream.

        Unpinned rows have arrived when this returns.
        """
        self.d2h_bytes += src.numel() * src.element_size()
        with self.device.use(self.stream):
            if pinned:
                dst.copy_(src, non_blocking=True)
            elif self._bounce is not None:
                self._bounce.d2h(dst, src)
            else:
                dst.copy_(src)

    def close(self) -> None:
        """Drop the bounce buffers; nothing is in flight any more."""
        self._bounce = None


class Bounce:
    """A few small pinned buffers that unpinned rows pass through, one after the other."""

    def __init__(self, device: Device) -> None:
        self._buffers = [
            device.pinned_empty((BOUNCE_BYTES,), torch.uint8) for _ in range(BOUNCE_BUFFERS)
        ]
        self._done = [device.event() for _ in self._buffers]
        self._next = 0

    def _pieces(self, rows: torch.Tensor) -> list[tuple[int, int]]:
        step = max(1, BOUNCE_BYTES // (rows[0].numel() * rows.element_size()))
        return [(first, min(len(rows), first + step)) for first in range(0, len(rows), step)]

    def _take(self, rows: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return a free buffer shaped like `rows`, and the event to record behind its copy."""
        buffer, done = self._buffers[self._next], self._done[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        done.synchronize()
        n_bytes = rows.numel() * rows.element_size()
        return buffer[:n_bytes].view(rows.dtype).view(rows.shape), done

    def h2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy `src` into buffers on the host, and from there to the card on the current stream."""
        for first, stop in self._pieces(src):
            buffer, done = self._take(src[first:stop])
            buffer.copy_(src[first:stop])
            dst[first:stop].copy_(buffer, non_blocking=True)
            done.record()

    def d2h(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy `src` into buffers on the current stream, wait, and go on to `dst` on the host."""
        for first, stop in self._pieces(src):
            buffer, _ = self._take(src[first:stop])
            buffer.copy_(src[first:stop])
            dst[first:stop].copy_(buffer)
