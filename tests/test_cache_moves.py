"""Layers that leave the card while sequences grow: no row lost, no bit changed, no race."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from offload_llama.cache import KVCache
from offload_llama.cache.budget import step_bytes
from offload_llama.cache.host import HostStore
from offload_llama.cache.loads import Span
from offload_llama.cache.resident import ResidentStore
from offload_llama.device import Device, open_device
from offload_llama.device.sim.device import SimulatedDevice, simulated
from offload_llama.model import Transformer
from offload_llama.policy import spill_order
from tests.helpers_model import greedy, make_cache, prefill, random_model, run_step, tiny_config
from tests.reference import reference_greedy, reference_logits

ORDERS = ["inorder", "copy_last", "copy_first"]
LAYERS = 4
TOKEN = 2 * 2 * 8 * 4  # keys and values of one token in one layer of the tiny model
# In parts of 32 tokens: three layers and a tail at 65 tokens, two at 97, one at 129.
BUDGET = 37 << 10
TOLERANCE = 1e-4


def ids(n: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def oracle() -> Transformer:
    return random_model(tiny_config(n_layers=LAYERS), open_device("cpu"))


@pytest.fixture(params=ORDERS)
def card(request: pytest.FixtureRequest) -> Iterator[SimulatedDevice]:
    device = simulated("rtx-3060-12gb", order=request.param)
    with device.scope():
        yield device
    assert device.card.errors == []


def deep_model(device: Device) -> Transformer:
    return random_model(tiny_config(n_layers=LAYERS), device)


def checksums(cache: KVCache, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's keys and values of a row."""
    return [store.rows(row) for store in cache.stores]


def same(one: KVCache, other: KVCache, row: int, other_row: int | None = None) -> bool:
    """Whether two caches hold the same bits for a row."""
    pairs = zip(
        checksums(one, row), checksums(other, row if other_row is None else other_row), strict=True
    )
    return all(torch.equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True))


def watch_budget(monkeypatch: pytest.MonkeyPatch) -> Callable[[KVCache], list[int]]:
    """Note the KV bytes on the card at each allocation of a cache, the new tensor included."""
    seen: list[int] = []
    watched: list[KVCache] = []

    def noting(make: Any) -> Any:
        def made(self: Any, argument: Any) -> Any:
            had = isinstance(self, HostStore) and argument.tail is not None
            tensor = make(self, argument)
            if not had:
                extra = 0 if isinstance(self, HostStore) else tensor.numel() * 4
                [cache] = watched
                seen.append(cache.stats().device_kv_bytes + extra)
            return tensor

        return made

    monkeypatch.setattr(ResidentStore, "_buffer", noting(ResidentStore._buffer))
    monkeypatch.setattr(HostStore, "_tail", noting(HostStore._tail))

    def watch(cache: KVCache) -> list[int]:
        watched[:] = [cache]
        seen.clear()
        return seen

    return watch


@pytest.fixture(scope="module")
def on_the_card() -> tuple[list[int], list[torch.Tensor]]:
    """The ids of a run that never moves, and each layer's keys and values after it."""
    device = simulated("rtx-3060-12gb")
    with device.scope():
        model = deep_model(device)
        cache = make_cache(model, device, "gpu", part_tokens=16)
        new = greedy(model, cache, 0, ids(50), 68)
        return new, [half for layer in checksums(cache, 0) for half in layer]


def test_a_run_that_outgrows_its_budget_three_times_gives_the_ids_of_one_on_the_card(
    oracle, card, on_the_card
):
    """From 50 to 117 tokens; each layer's rows are the bits of those that never moved.

    Each pause brings exactly the moved layer's rows to the host.
    """
    model, prompt = deep_model(card), ids(50)
    moves: list[tuple[int, ...]] = []
    copied: list[int] = []
    cache = make_cache(
        model, card, "gpu", part_tokens=16, kv_budget_bytes=32 << 10,
        on_move=lambda layers: (moves.append(layers), copied.append(card.card.bytes("d2h"))),
    )  # fmt: skip
    out = prefill(model, cache, 0, prompt)
    assert moves == [] and not any(store.is_host for store in cache.stores)
    new = [int(out.argmax())]
    while len(new) < 68:
        before, n_moves, length = card.card.bytes("d2h"), len(moves), cache.lengths[0]
        new.append(int(run_step(model, cache, {0: [new[-1]]})[0].argmax()))
        assert len(moves) - n_moves <= 1
        if len(moves) > n_moves:
            assert copied[-1] - before == length * TOKEN
    assert new == on_the_card[0] == reference_greedy(oracle, prompt, 68)
    assert [len(layers) for layers in moves] == [1, 1, 1]
    assert [layer for layers in moves for layer in layers] == spill_order(LAYERS)[:3]
    rows = [half for layer in checksums(cache, 0) for half in layer]
    assert all(torch.equal(a, b) for a, b in zip(rows, on_the_card[1], strict=True))
    assert [store.is_host for store in cache.stores] == [
        p.store == "host" for p in cache.placements
    ]
    assert cache.placements[moves[0][0]].reason == (
        "moved to the host at 64 tokens: the card's budget was full"
    )


@pytest.mark.parametrize(
    "policy",
    ["gpu", "offload", "gpu-layers:2", "layers:0-1=gpu,2-3=offload", "layers:0-1=offload,2-3=gpu",
     "layers:0=gpu,1-3=offload", "layers:0-2=offload,3=gpu"],
)  # fmt: skip
@pytest.mark.parametrize("moving", [False, True])
def test_the_rows_of_every_layer_equal_a_recompute_after_many_small_turns(oracle, policy, moving):
    """B35: none, all, alternate, first half, last half, only first, only last; also as they move.

    The rows of a run on the card in the same turns are the same bits, and those of one pass over
    all tokens are the same within rounding.
    """
    device, generator = open_device("cpu"), torch.Generator().manual_seed(4)
    cache = make_cache(oracle, device, policy, kv_budget_bytes=BUDGET if moving else None)
    held, once = (make_cache(oracle, device, "gpu") for _ in range(2))
    tokens: list[int] = []
    while len(tokens) < 190:
        turn = ids(int(torch.randint(1, 30, (), generator=generator)), len(tokens))
        for one in (cache, held):
            prefill(oracle, one, 1, turn)
            for i in range(3):
                last = run_step(oracle, one, {1: [i]})
        tokens += [*turn, 0, 1, 2]
    assert same(cache, held, 1)
    prefill(oracle, once, 1, tokens, len(tokens))
    for left, right in zip(checksums(cache, 1), checksums(once, 1), strict=True):
        for a, b in zip(left, right, strict=True):
            assert (a - b).abs().max() < TOLERANCE
    assert (last[0] - reference_logits(oracle, tokens)[-1]).abs().max() < TOLERANCE


def test_a_ragged_batch_moves_within_its_budget_and_every_row_stays_the_same(card, monkeypatch):
    """Three rows of different ages; buffers of 64 double up to a part of 256."""
    model, watch = deep_model(card), watch_budget(monkeypatch)
    budget = 200 << 10
    moved: list[int] = []
    cache = make_cache(
        model, card, "gpu", part_tokens=256, kv_budget_bytes=budget, on_move=moved.extend
    )
    held = make_cache(model, card, "gpu", part_tokens=256)
    results: list[list[torch.Tensor]] = []
    for one in (cache, held):
        seen = watch(one)
        out = [prefill(model, one, row, ids(n, row), 40) for row, n in enumerate((3, 60, 117))]
        for i in range(12):
            out += run_step(model, one, {2: [i], 0: [i + 1], 1: [i + 2]})
        out.append(prefill(model, one, 0, ids(200, 9), 50))
        for i in range(9):
            out += run_step(model, one, {0: [i], 1: [i], 2: [i]})
        results.append(out)
        if one is cache:
            assert max(seen) <= budget < 2 * max(seen)
    assert len(moved) >= 2 and torch.equal(torch.stack(results[0]), torch.stack(results[1]))
    assert all(same(cache, held, row) for row in range(3))


@pytest.mark.parametrize("seed", range(8))
def test_the_bytes_of_a_step_are_known_before_it_to_the_byte(oracle, monkeypatch, seed):
    """Random steps over three rows, with truncations, copies and moves between them."""
    draw = torch.Generator().manual_seed(seed)

    def pick(n: int) -> int:
        return int(torch.randint(0, n, (), generator=draw))

    watch = watch_budget(monkeypatch)
    cache = make_cache(oracle, open_device("cpu"), "gpu-layers:3", part_tokens=128)
    seen = watch(cache)
    for _ in range(40):
        rows = [row for row in range(3) if pick(3)] or [0]
        start = [max(0, cache.lengths[row] - (pick(50) if pick(4) == 0 else 0)) for row in rows]
        n_new = [1 if pick(2) else 1 + pick(70) for _ in rows]
        if any(a + n > 512 for a, n in zip(start, n_new, strict=True)):
            cache.free(pick(3))
            continue
        for row, first in zip(rows, start, strict=True):
            cache.truncate(row, first)
        spans = [Span(row, a, n, 0) for row, a, n in zip(rows, start, n_new, strict=True)]
        held = [store.held for store in cache.stores]
        now = cache.stats().device_kv_bytes
        assert step_bytes(held, (), cache.geometry) == now
        expected = step_bytes(held, spans, cache.geometry)
        seen.clear()
        new = {row: ids(n) for row, n in zip(rows, n_new, strict=True)}
        run_step(oracle, cache, new, "none")
        assert max([now, *seen]) == expected
        if pick(12) == 0:
            cache.move_to_host(spill_order(LAYERS)[: 1 + pick(3)])
        if pick(9) == 0:
            cache.copy_row(rows[0], (rows[0] + 1) % 3)


def test_moving_a_layer_needs_no_memory_and_frees_all_of_it(card):
    model = deep_model(card)
    cache = make_cache(model, card, "gpu", part_tokens=64)
    prefill(model, cache, 0, ids(200))
    prefill(model, cache, 2, ids(70))
    for i in range(3):
        run_step(model, cache, {0: [i], 2: [i]})
    layer_bytes = cache.stores[3].device_bytes
    card.reset_peak()
    before = card.memory()
    assert cache.move_to_host([3, 3]) == (3,)
    after = card.memory()
    assert after.peak_bytes == before.allocated_bytes
    assert before.allocated_bytes - after.allocated_bytes == layer_bytes > 0
    assert cache.stores[3].device_bytes == 0 and cache.stores[3].host_len(0) == 203
    assert cache.move_to_host([3]) == ()


def test_a_part_is_free_before_the_next_one_is_copied(card):
    """So that a pause can be cut off at any part, and nothing is held twice."""
    model = deep_model(card)
    cache = make_cache(model, card, "gpu")
    prefill(model, cache, 0, ids(96))
    allocated: list[int] = []
    copy = cache._link.d2h

    def noting(*operands: Any, **options: Any) -> None:
        allocated.append(card.memory().allocated_bytes)
        copy(*operands, **options)

    cache._link.d2h = noting  # type: ignore[method-assign]  # only to look on
    cache.move_to_host([2])
    parts = sorted(set(allocated), reverse=True)
    assert [parts[0] - n for n in parts] == [0, 32 * TOKEN, 64 * TOKEN]


@pytest.mark.parametrize("length", [0, 40, 75])
def test_rows_are_cut_shared_and_freed_as_ever_after_a_move(oracle, card, length):
    model = deep_model(card)
    cache = make_cache(model, card, "gpu")
    prefill(model, cache, 0, ids(70))
    for i in range(5):
        run_step(model, cache, {0: [i]})
    cache.move_to_host([3, 1])
    whole = [*ids(70), 0, 1, 2, 3, 4]
    cache.truncate(0, length)
    branches = {0: whole[:length] + ids(30, 9)}
    prefill(model, cache, 0, ids(30, 9))
    cache.copy_row(0, 1)  # shares the pages of the moved layers
    branches[1] = list(branches[0])
    cache.move_to_host([0])
    for i in range(9):
        new = {0: [i + 10], 1: [i + 40]}
        out = run_step(model, cache, new)
        for row in new:
            branches[row] += new[row]
    for row, logits in zip((0, 1), out, strict=True):
        expected = reference_logits(oracle, branches[row])[-1]
        assert (logits - expected).abs().max() < TOLERANCE
    cache.free(0)
    out = prefill(model, cache, 0, ids(50, 3))
    assert (out - reference_logits(oracle, ids(50, 3))[-1]).abs().max() < TOLERANCE
    kept = run_step(model, cache, {1: [5]})[0]
    assert (kept - reference_logits(oracle, [*branches[1], 5])[-1]).abs().max() < TOLERANCE


def test_a_copy_of_a_row_keeps_to_the_budget(oracle, monkeypatch):
    watch = watch_budget(monkeypatch)
    cache = make_cache(oracle, open_device("cpu"), "gpu", kv_budget_bytes=BUDGET)
    seen = watch(cache)
    prefill(oracle, cache, 0, ids(60))
    for i in range(3):
        run_step(oracle, cache, {0: [i]})
    cache.copy_row(0, 1)
    assert cache.stats().device_kv_bytes <= BUDGET and max(seen) <= BUDGET
    assert same(cache, cache, 0, 1) and any(store.is_host for store in cache.stores)


def test_a_failed_step_after_a_move_rolls_back_and_the_next_one_is_right(oracle, card):
    model = deep_model(card)
    cache = make_cache(model, card, "gpu", kv_budget_bytes=BUDGET)
    prefill(model, cache, 0, ids(64))
    block = model.layers[2].feed_forward
    with pytest.raises(ZeroDivisionError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "forward", lambda x: 1 // 0)
        run_step(model, cache, {0: [3]})
    assert sum(store.is_host for store in cache.stores) == 1 and cache.lengths[0] == 64
    out = run_step(model, cache, {0: [5]})[0]
    assert (out - reference_logits(oracle, [*ids(64), 5])[-1]).abs().max() < TOLERANCE


def test_an_idle_cache_brings_its_layers_back_and_a_busy_one_never_does(card):
    model = deep_model(card)
    cache = make_cache(model, card, "gpu-layers:3", kv_budget_bytes=BUDGET)
    first = cache.placements
    prefill(model, cache, 0, ids(20))
    prefill(model, cache, 1, ids(130))
    away = [p.store for p in cache.placements]
    assert away.count("host") > 1
    cache.free(1)
    run_step(model, cache, {0: [1]})
    assert [p.store for p in cache.placements] == away
    run_step(model, cache, {0: [1]})
    cache.truncate(0, 0)
    assert [p.store for p in cache.placements] == away  # for whoever reports on the run
    run_step(model, cache, {0: [1]})
    assert cache.placements == first
    assert [store.is_host for store in cache.stores] == [p.store == "host" for p in first]
    assert cache.stats().host_kv_bytes == 0


def test_relief_moves_the_next_layer_and_a_small_ring_comes_from_what_it_freed(oracle, card):
    model, told = deep_model(card), []
    cache = make_cache(model, card, "gpu", on_move=told.append)
    prefill(model, cache, 0, ids(90))
    card.card.take_memory(card.memory().free_bytes - 2_000)
    order = spill_order(LAYERS)
    assert cache.relieve() == (order[0],)
    assert "the card had no memory left" in cache.placements[order[0]].reason
    assert cache.stats().ring_bytes == 0
    while True:  # the ring and the step's own tensors need more than one layer's rows
        try:
            out = run_step(model, cache, {0: [7]})
            break
        except torch.OutOfMemoryError:
            pass
        assert cache.relieve() == (order[len(told) - 1],)
    assert cache.stats().ring_bytes == 2 * 32 * TOKEN and 1 < len(told) < LAYERS
    assert (out[0] - reference_logits(oracle, [*ids(90), 7])[-1]).abs().max() < TOLERANCE
    card.card.take_memory(0)
    while cache.relieve():
        pass
    assert len(told) == LAYERS and cache.relieve() == ()


def test_host_memory_that_cannot_be_had_leaves_the_layer_on_the_card(oracle, monkeypatch):
    cache = make_cache(oracle, open_device("cpu"), "gpu")
    prefill(oracle, cache, 0, ids(90))
    prefill(oracle, cache, 1, ids(40))
    grow, calls = cache._memory.grow, []

    def refuses(*operands: Any) -> None:
        calls.append(operands)
        if len(calls) == 2:
            raise OSError("no memory")
        grow(*operands)

    monkeypatch.setattr(cache._memory, "grow", refuses)
    with pytest.raises(OSError, match="no memory"):
        cache.move_to_host([2])
    assert cache._memory.used_tokens == 0 and not cache.stores[2].is_host
    out = run_step(oracle, cache, {0: [7]})[0]
    assert (out - reference_logits(oracle, [*ids(90), 7])[-1]).abs().max() < TOLERANCE


def test_a_row_can_be_cut_on_a_card_without_room_and_move_afterwards(oracle, card):
    """Cutting may bring the last part to a smaller buffer; without room it keeps its own."""
    model = deep_model(card)
    cache = make_cache(model, card, "gpu", part_tokens=256)
    prefill(model, cache, 0, ids(200))
    card.card.take_memory(card.memory().free_bytes)
    cache.truncate(0, 100)
    assert cache.stats().device_kv_bytes == LAYERS * 256 * TOKEN
    cache.move_to_host([1])
    card.card.take_memory(0)
    out = run_step(model, cache, {0: [7]})[0]
    assert (out - reference_logits(oracle, [*ids(200)[:100], 7])[-1]).abs().max() < TOLERANCE
