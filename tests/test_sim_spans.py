"""Which bytes a tensor covers, against a count of every byte."""

from __future__ import annotations

import random

import pytest
import torch

from offload_llama.device.sim.spans import Span, covers, overlap, span_of


def bytes_of(tensor: torch.Tensor) -> set[int]:
    """Return the byte offsets that a tensor's elements lie on, one by one."""
    starts = {tensor.storage_offset()}
    for stride, n in zip(tensor.stride(), tensor.size(), strict=True):
        starts = {start + stride * i for start in starts for i in range(n)}
    item = tensor.element_size()
    return {start * item + i for start in starts for i in range(item)}


def random_view(generator: random.Random) -> torch.Tensor:
    """Return a sliced and permuted view of 240 elements."""
    shape = generator.choice([(4, 5, 12), (240,), (24, 10), (2, 3, 4, 10)])
    view = torch.empty(240, dtype=torch.int16).view(shape)
    for dim in range(view.dim()):
        start = generator.randrange(view.shape[dim])
        stop = generator.randint(start + 1, view.shape[dim])
        view = view[(slice(None),) * dim + (slice(start, stop, generator.choice([1, 1, 2])),)]
    dims = list(range(view.dim()))
    generator.shuffle(dims)
    return view.permute(dims)


def test_spans_overlap_exactly_where_bytes_are_shared() -> None:
    generator = random.Random(0)
    shared = apart = 0
    for _ in range(3000):
        a, b = random_view(generator), random_view(generator)
        expected = not bytes_of(a).isdisjoint(bytes_of(b))
        assert overlap(span_of(a), span_of(b)) == overlap(span_of(b), span_of(a)) == expected
        shared, apart = shared + expected, apart + (not expected)
    assert min(shared, apart) > 300


def test_a_span_that_covers_another_has_all_its_bytes() -> None:
    generator = random.Random(1)
    found = 0
    for _ in range(3000):
        a, b = random_view(generator), random_view(generator)
        assert span_of(a).nbytes == len(bytes_of(a))
        if covers(span_of(a), span_of(b)):
            assert bytes_of(b) <= bytes_of(a)
            found += 1
    assert found > 20


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (torch.empty(4, 8), Span(0, 128, 128)),
        (torch.empty(4, 8)[1:3], Span(32, 96, 64)),
        (torch.empty(1, 8).expand(5, 8), Span(0, 32, 32, 32)),
        (torch.empty(4, 8)[:, 2:4], Span(8, 112, 32, 8, ((32, 4),))),
        (torch.empty(0, 8), Span(0, 0, 0)),
        (torch.empty(4, 8).T[3:3], Span(12, 12, 0)),
        (torch.empty(()), Span(0, 4, 4)),
    ],
)
def test_spans_name_their_runs(view: torch.Tensor, expected: Span) -> None:
    assert span_of(view) == expected
