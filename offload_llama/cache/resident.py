"""The store of a layer whose rows stay on the card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from offload_llama.attention import Kernel, attend
from offload_llama.cache.budget import Held
from offload_llama.cache.loads import Span, part_ranges
from offload_llama.cache.view import CacheView
from offload_llama.device import Device
from offload_llama.geometry import MIN_PAGE_TOKENS, Geometry, resident_rows


class ResidentStore:
    """Each sequence is a list of parts on the card; only the last one's buffer grows, doubling."""

    is_host = False

    def __init__(
        self,
        layer: int,
        device: Device,
        geometry: Geometry,
        dtype: torch.dtype,
        kernel: Kernel,
        lengths: list[int],
        max_seq_len: int,
    ) -> None:
        self.layer, self.geometry, self.dtype = layer, geometry, dtype
        self.max_seq_len = max_seq_len
        self._device, self._kernel, self._lengths = device, kernel, lengths
        self._parts: list[list[torch.Tensor]] = [[] for _ in lengths]

    def attend(
        self, xq: torch.Tensor, xk: torch.Tensor, xv: torch.Tensor, step: Any
    ) -> torch.Tensor:
        """Append the new rows and return the attention output, (N, H, D)."""
        outputs = []
        for span in step.spans:
            new = slice(span.offset, span.offset + span.n_new)
            k, v = xk[new], xv[new]
            self._append(span, k, v)
            own = None if span.appends else (k, v)
            outputs.append(attend(self._kernel, xq[new], self._visible(span), own))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _visible(self, span: Span) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        parts = part_ranges(span.n_visible, self.geometry.part_tokens)
        for buffer, (first, stop) in zip(self._parts[span.row], parts, strict=False):
            yield buffer[0, : stop - first], buffer[1, : stop - first]

    def _append(self, span: Span, k: torch.Tensor, v: torch.Tensor) -> None:
        parts, size = self._parts[span.row], self.geometry.part_tokens
        done = 0
        while done < span.n_new:
            index, inside = divmod(span.start + done, size)
            n = min(size - inside, span.n_new - done)
            if index == len(parts):
                parts.append(self._buffer(inside + n))
            elif parts[index].shape[1] < inside + n:
                larger = self._buffer(inside + n)
                larger[:, :inside].copy_(parts[index][:, :inside])
                parts[index] = larger
            parts[index][0, inside : inside + n].copy_(k[done : done + n])
            parts[index][1, inside : inside + n].copy_(v[done : done + n])
            done += n

    def _buffer(self, tokens: int) -> torch.Tensor:
        [rows] = resident_rows(self.geometry, tokens)
        shape = (2, rows, self.geometry.n_kv_heads, self.geometry.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self._device.torch_device)

    def truncate(self, row: int, length: int) -> None:
        """Forget the rows from `length` on.

        The last part kept moves to a smaller buffer if one does, unless so few rows are dropped
        that it would soon be too small again, or the card has no room for it beside the old one.
        """
        parts, size = self._parts[row], self.geometry.part_tokens
        del parts[-(-length // size) :]
        inside = length - size * (len(parts) - 1)
        dropped = self._lengths[row] - length
        if parts and dropped > MIN_PAGE_TOKENS:
            smaller_rows = resident_rows(self.geometry, inside)[-1]
            if smaller_rows < parts[-1].shape[1]:
                try:
                    smaller = self._buffer(inside)
                except torch.OutOfMemoryError:
                    return
                smaller[:, :inside].copy_(parts[-1][:, :inside])
                parts[-1] = smaller

    def free(self, row: int) -> None:
        """Forget a sequence."""
        self.truncate(row, 0)

    def take_parts(self, row: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield keys and values of each part, (n, KH, D); its buffer goes as the next is asked for.

        The sequence is gone afterwards.
        """
        for first, stop in part_ranges(self._lengths[row], self.geometry.part_tokens):
            buffer = self._parts[row].pop(0)
            yield buffer[0, : stop - first], buffer[1, : stop - first]
        self.free(row)

    def copy_row(self, src: int, dst: int) -> None:
        """Let `dst` hold a copy of `src`'s rows."""
        self.free(dst)
        self._parts[dst] = [part.clone() for part in self._parts[src]]

    def snapshot(self, row: int) -> int:
        """Return what `restore` needs; rows beyond the length are simply never read."""
        return self._lengths[row]

    def restore(self, row: int, saved: int) -> None:
        """Undo the appends of a step that failed."""
        self.truncate(row, saved)

    def rows(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of a sequence, each (length, KH, D) on the CPU."""
        parts = part_ranges(self._lengths[row], self.geometry.part_tokens)
        pieces = [
            buffer[:, : stop - first].cpu()
            for buffer, (first, stop) in zip(self._parts[row], parts, strict=False)
        ]
        shape = (2, 0, self.geometry.n_kv_heads, self.geometry.head_dim)
        k, v = torch.cat(pieces, dim=1) if pieces else torch.empty(shape, dtype=self.dtype)
        return k, v

    @property
    def held(self) -> Held:
        """The buffers on the card."""
        rows = (tuple(buffer.shape[1] for buffer in parts) for parts in self._parts)
        return Held(False, tuple(rows))

    @property
    def device_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for parts in self._parts for p in parts)

    @property
    def host_bytes(self) -> int:
        return 0

    @property
    def cache_k(self) -> CacheView:
        return CacheView(self, 0)

    @property
    def cache_v(self) -> CacheView:
        return CacheView(self, 1)

    @property
    def n_rows(self) -> int:
        return len(self._lengths)
