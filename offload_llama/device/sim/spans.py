"""Which bytes of a memory block a tensor covers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

# Two strided patterns with more runs than this are compared by their outer bounds.
_MAX_RUNS = 2**20


class Span(NamedTuple):
    """Bytes [lo, hi) of a block, all of them if `dims` is empty.

    Otherwise runs of `run` bytes, repeated by `dims`: (stride in bytes, count), outermost first.
    `nbytes` counts the distinct bytes.
    """

    lo: int
    hi: int
    nbytes: int
    run: int = 0
    dims: tuple[tuple[int, int], ...] = ()


def span_of(tensor: torch.Tensor, base: int | None = None) -> Span:
    """Return the bytes a tensor covers, counted from its storage's start, or from `base`.

    Repetitions (stride 0) count once.
    """
    item = tensor.element_size()
    lo = int(tensor.storage_offset()) * item if base is None else base
    numel = tensor.numel()
    if tensor.is_contiguous():
        n_bytes = numel * item
        return Span(lo, lo + n_bytes, n_bytes)
    if numel == 0:
        return Span(lo, lo, 0)
    dims = sorted(
        (stride * item, n)
        for stride, n in zip(tensor.stride(), tensor.size(), strict=True)
        if n > 1 and stride
    )
    run = item
    while dims and dims[0][0] <= run:
        stride, n = dims.pop(0)
        run += stride * (n - 1)
    extent, count = run, 1
    for stride, n in dims:
        extent += stride * (n - 1)
        count *= n
    return Span(lo, lo + extent, run * count, run, tuple(reversed(dims)))


def _starts(span: Span) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    starts = np.array([span.lo], dtype=np.int64)
    for stride, n in span.dims:
        starts = (starts[:, None] + np.arange(n, dtype=np.int64) * stride).ravel()
    return np.sort(starts)


def overlap(a: Span, b: Span) -> bool:
    """Return whether two spans of one block share a byte, exactly."""
    if a.hi <= b.lo or b.hi <= a.lo or not a.nbytes or not b.nbytes:
        return False
    if not a.dims and not b.dims:
        return True
    run_a, run_b = (a.run if a.dims else a.nbytes), (b.run if b.dims else b.nbytes)
    if a.nbytes // run_a > _MAX_RUNS or b.nbytes // run_b > _MAX_RUNS:
        return True
    starts_a, starts_b = _starts(a), _starts(b)
    # For each run of a: does the first run of b that ends behind its start begin before its end?
    first = np.searchsorted(starts_b, starts_a - run_b, side="right")
    inside = first < len(starts_b)
    return bool(np.any(starts_b[first[inside]] < starts_a[inside] + run_a))


def covers(a: Span, b: Span) -> bool:
    """Return whether a certainly covers every byte of b."""
    return a == b or (not a.dims and a.lo <= b.lo and b.hi <= a.hi)
