"""The integer side of the cache: parts, pages, loads, the order of spilling."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_llama.cache.budget import Held, layers_to_move, step_bytes
from offload_llama.cache.loads import Span, part_ranges, plan_layer
from offload_llama.cache.pages import Buddies, PagePool, PageTable, Run, next_page_tokens
from offload_llama.config import ModelConfig
from offload_llama.errors import ConfigError
from offload_llama.geometry import choose_geometry, choose_ring_slots
from offload_llama.policy import place, spill_order
from tests.helpers_model import tiny_config

LLAMA_8B = ModelConfig(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336,
    vocab_size=128256,
)  # fmt: skip


def test_the_geometry_follows_from_the_model_as_designed():
    geometry = choose_geometry(LLAMA_8B, 2)
    assert geometry.row_bytes == 2048
    assert geometry.part_tokens * 2 * geometry.row_bytes == 16 << 20
    assert geometry.flush_tokens == 64
    assert geometry.max_page_tokens * geometry.row_bytes == 2 << 20


@pytest.mark.parametrize("part_tokens", [0, 3, 48, -16])
def test_a_part_that_is_no_power_of_two_is_refused(part_tokens):
    with pytest.raises(ConfigError, match="power of two"):
        choose_geometry(LLAMA_8B, 2, part_tokens=part_tokens)


def test_the_ring_has_room_for_the_gap_between_streamed_layers():
    """An 8B layer in fp16 is 436 MB: while it is read, more than two parts cross the link."""
    assert choose_ring_slots(LLAMA_8B, 2, 32, 3) == 4
    assert choose_ring_slots(LLAMA_8B, 2, 16, 10) == 7
    assert choose_ring_slots(LLAMA_8B, 2, 16, 3) == 4
    assert choose_ring_slots(LLAMA_8B, 2, 1, 100) == 9
    assert choose_ring_slots(tiny_config(), 4, 1, 1) == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_buddies_never_hand_out_the_same_memory_twice_and_join_again(operations):
    buddies, held = Buddies(256), []
    for take, number in operations:
        if take:
            size = 1 << (number + 3)
            offset = buddies.take(size)
            if offset is not None:
                assert all(offset + size <= o or o + s <= offset for o, s in held)
                assert offset % size == 0 and offset + size <= 256
                held.append((offset, size))
        elif held:
            buddies.give(*held.pop(number % len(held)))
        assert buddies.free_tokens == 256 - sum(size for _, size in held)
    for offset, size in held:
        buddies.give(offset, size)
    assert buddies.take(256) == 0


def grown_table(lengths: list[int]) -> tuple[PagePool, PageTable]:
    geometry = choose_geometry(tiny_config(), 4)
    pool, table = PagePool(), PageTable()
    pool.add_slab(1 << 16)
    for length in lengths:
        while table.capacity < length:
            page = pool.take(next_page_tokens(geometry, table, length))
            assert page is not None
            table.pages.append(page)
    return pool, table


def test_pages_start_small_and_waste_at_most_a_thirtysecond():
    assert grown_table([1])[1].capacity == 16
    assert grown_table([100])[1].capacity == 112
    for length in (4096, 4097, 10_000):
        one_by_one = grown_table([*range(16, length + 1, 16), length])[1].capacity
        assert length <= one_by_one <= length + max(16, length // 32)


def test_neighbouring_pages_load_as_one_run():
    _, table = grown_table([16, 32, 48, 64])
    assert len(table.pages) == 4
    assert table.runs(5, 60) == [Run(0, 5, 55)]


def test_a_cut_frees_only_pages_beyond_the_length():
    pool, table = grown_table([16, 32, 48])
    for page in table.cut(17):
        pool.drop(page)
    assert table.capacity == 32 and pool.used_tokens == 32
    with pytest.raises(ValueError, match="asked for"):
        table.runs(0, 48)


def test_parts_are_fixed_ranges_by_token_index():
    assert part_ranges(70, 32) == [(0, 32), (32, 64), (64, 70)]
    assert part_ranges(0, 32) == []


def test_short_rows_share_a_slot_and_a_load_skips_parts_in_the_tail():
    spans = [Span(0, 10, 1, 0), Span(1, 12, 1, 1), Span(2, 70, 1, 2)]
    loads = plan_layer(5, spans, [8, 8, 64], part_tokens=32, slot_tokens=32)
    assert [[(p.row, p.first, p.n_host, p.n_total, p.offset) for p in x.pieces] for x in loads] == [
        [(0, 0, 8, 11, 0), (1, 0, 8, 13, 11)],
        [(2, 0, 32, 32, 0)],
        [(2, 32, 32, 32, 0)],
    ]
    assert all(load.layer == 5 for load in loads)


@given(st.integers(1, 80))
def test_every_state_of_the_spill_order_is_spread(n_layers):
    order = spill_order(n_layers)
    assert sorted(order) == list(range(n_layers)) and order[0] == n_layers - 1
    for n in range(1, n_layers + 1):
        gone = sorted(order[:n])
        gaps = [b - a for a, b in zip([gone[-1] - n_layers, *gone], gone, strict=False)]
        assert max(gaps) <= 4 * -(-n_layers // n)


def test_gpu_layers_are_spread_and_counted():
    stores = [p.store for p in place("gpu-layers:15", 30)]
    assert stores.count("resident") == 15 and stores != ["resident"] * 15 + ["host"] * 15
    assert {p.store for p in place("gpu", 30)} == {"resident"}
    assert {p.store for p in place("offload", 30)} == {"host"}
    explicit = [p.store for p in place("layers:0-14=gpu,15-29=offload", 30)]
    assert explicit == ["resident"] * 15 + ["host"] * 15


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("none", "use auto, gpu, offload"),
        ("gpu-layers:31", "more layers than the model's 30"),
        ("gpu-layers:-1", "whole number"),
        ("gpu-layers:x", "for example gpu-layers:15"),
        ("layers:0-99=gpu", "outside 0-29"),
        ("layers:0-14=gpu", "leaves out layer 15"),
        ("layers:0-14=gpu,14-29=offload", "placed twice"),
        ("layers:5-2=gpu", "outside"),
        ("layers:-1=gpu", "write ranges like"),
        ("layers:0=disk", "write ranges like"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_what_to_type(policy, says):
    """B58: invalid layers are rejected, every documented value works."""
    with pytest.raises(ConfigError, match=says) as error:
        place(policy, 30)
    assert "\n" not in str(error.value)


def test_blocks_are_counted_as_the_allocator_rounds_them():
    geometry = choose_geometry(tiny_config(n_kv_heads=1, head_dim=2), 2, part_tokens=1024)
    held = Held(False, ((64,), ()))
    assert step_bytes([held], (), geometry) == 512  # 64 tokens of 8 bytes
    assert step_bytes([held], [Span(1, 0, 65, 0)], geometry) == 512 + 1024
    assert step_bytes([held], [Span(0, 64, 1, 0)], geometry) == 512 + 1024
    on_host = Held(True, ((), ()))
    for n_new in (1, 9):
        span = Span(0, 9, n_new, 0)
        assert step_bytes([on_host], [span], geometry) == 8 * geometry.flush_tokens
    # The first layer's old buffer is gone before the second one's new one is made.
    assert step_bytes([held, held], [Span(0, 64, 1, 0)], geometry) == 1024 + 512 + 1024


def test_the_fewest_layers_leave_in_order_and_those_on_the_host_are_passed_over():
    geometry = choose_geometry(tiny_config(), 4, part_tokens=32, flush_tokens=8)
    order = spill_order(4)
    layers = [Held(layer == order[0], ((32,) if layer != order[0] else (),)) for layer in range(4)]
    spans = [Span(0, 32, 1, 0)]
    full = step_bytes(layers, spans, geometry)
    assert layers_to_move(order, layers, spans, geometry, full) == ()
    assert layers_to_move(order, layers, spans, geometry, full - 1) == (order[1],)
    assert layers_to_move(order, layers, spans, geometry, 0) == tuple(order[1:])
