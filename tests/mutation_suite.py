"""Small scenarios that every wait, record, pin and keep-alive of the cache must be needed for.

`run_all` raises at the first thing that is wrong. `scripts/mutation_test.py` runs it against
mutants of the package, so it imports the package only inside functions.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

ORDERS = ("copy_last", "copy_first")
TOLERANCE = 1e-4


class Bench:
    """A tiny model on a simulated card, its cache, and what each row should hold."""

    def __init__(self, order: str, policy: str = "offload", **options: Any) -> None:
        from offload_llama.device import open_device
        from offload_llama.device.sim import simulated
        from tests.helpers_model import make_cache, random_model, tiny_config

        config = tiny_config(**options.pop("config", {}))
        card = options.pop("card", "rtx-3060-12gb")
        self.device = options.pop("device", None) or simulated(card, order=order, strict=False)
        refuse = options.pop("refuse", None)
        if refuse is not None:
            self.device.card.refuse_pins_after(refuse)
        self.oracle = random_model(config, open_device("cpu"))
        with self.device.scope():
            self.model = random_model(config, self.device)
            self.base_bytes = self.device.memory().allocated_bytes
            self.cache = make_cache(
                self.model, self.device, policy, **({"ring_slots": 2, "part_tokens": 16} | options)
            )
        self.rows: dict[int, list[int]] = {}

    def feed(self, new: dict[int, list[int]], logits: str = "last") -> Any:
        """Append tokens to rows in one step and return the logits on the card."""
        rows = list(new)
        start = [self.cache.lengths[row] for row in rows]
        with self.cache.step(rows, start, [len(new[row]) for row in rows], logits) as step:
            out = self.model(step.upload([i for row in rows for i in new[row]]), step)
        for row in rows:
            self.rows[row] = [*self.rows.get(row, []), *new[row]]
        return out

    def decode(self, rows: list[int], n: int) -> Any:
        """Take n greedy-like steps; each reads its token, as generation does."""
        token = 1
        for _ in range(n):
            out = self.feed({row: [(token + row) % 97] for row in rows})
            token = sampled(out)
        return out

    def check(self, out: Any, rows: list[int]) -> None:
        """The logits are the reference's, and the card has nothing to complain of."""
        from tests.reference import reference_logits

        for row, logits in zip(rows, out.cpu(), strict=True):
            expected = reference_logits(self.oracle, self.rows[row])[-1]
            difference = float((logits - expected).abs().max())
            assert difference < TOLERANCE, f"row {row} differs by {difference}"
        assert self.device.card.errors == [], self.device.card.errors[0]


def sampled(out: Any) -> int:
    """Return a token on the host: the one wait a step may have."""
    return int(out.argmax(-1)[0].item())


def ids(n: int, seed: int) -> list[int]:
    return [(i * 31 + seed * 7) % 97 for i in range(n)]


def decode_of_a_ragged_batch(order: str, policy: str) -> None:
    """Prefill in chunks, decode past flushes and part borders; count bytes, waits and streams."""
    bench = Bench(order, policy)
    with bench.device.scope():
        for row, n in enumerate((5, 40, 90)):
            prompt = ids(n, row)
            for first in range(0, n, 20):
                bench.feed({row: prompt[first : first + 20]})
        bench.decode([0, 1, 2], 5)
        bench.device.synchronize()
        card, cache = bench.device.card, bench.cache
        cache.reset_counters()
        card.forget()
        expected = 0
        for _ in range(16):
            expected += cache.stats().host_kv_bytes
            out = bench.decode([0, 1, 2], 1)
        waits = {wait.site.code.co_name for wait in card.syncs}
        assert waits == {"sampled"}, f"the host waited in {waits}"
        bench.device.synchronize()
        stream = cache._link.stream.name
        n_host = sum(store.is_host for store in cache.stores)
        assert cache.stats().h2d_bytes == expected == card.bytes("h2d", stream)
        assert cache.stats().d2h_bytes == 16 * 3 * n_host * 128 == card.bytes("d2h", stream)
        assert stream != "default"
        assert not cache._departures._leaving, "keys and values that landed are still held"
        bench.check(out, [0, 1, 2])
        for store in cache.stores:
            for row in (1, 2):
                held = torch.cat([k for k, _ in store.host_view(row)]) if store.is_host else None
                keys, _ = store.rows(row)
                assert keys.isfinite().all()
                assert held is None or torch.equal(held, keys[: len(held)])


def rows_come_and_go(order: str, policy: str) -> None:
    """Truncate, share, diverge, free, reuse; and a step that fails half way."""
    bench = Bench(order, policy)
    with bench.device.scope():
        bench.feed({0: ids(37, 1)}, "none")
        for store in bench.cache.stores:
            keys, values = store.rows(0)
            assert keys.isfinite().all() and values.isfinite().all() and len(keys) == 37
        bench.decode([0], 9)
        bench.cache.truncate(0, 42)
        bench.rows[0] = bench.rows[0][:42]
        bench.check(bench.decode([0], 12), [0])
        bench.cache.truncate(0, 21)
        bench.rows[0] = bench.rows[0][:21]
        bench.check(bench.feed({0: ids(11, 2)}), [0])
        bench.decode([0], 11)
        bench.feed({1: ids(3, 3)})
        bench.cache.copy_row(0, 1)
        bench.rows[1] = list(bench.rows[0])
        for i in range(14):
            out = bench.feed({0: [i], 1: [i + 50]})
        bench.check(out, [0, 1])
        bench.cache.free(0)
        bench.rows[0] = []
        bench.feed({2: ids(50, 4), 0: ids(20, 5)})
        bench.check(bench.decode([0, 1, 2], 9), [0, 1, 2])
        broken = bench.model.layers[2].feed_forward
        forward = broken.forward
        for new in ([5], ids(21, 6)):
            broken.forward = broken_forward
            held = dict(bench.rows)
            try:
                bench.feed({1: new})
            except ZeroDivisionError:
                bench.rows = held
            broken.forward = forward
        bench.check(bench.decode([0, 1, 2], 10), [0, 1, 2])


def broken_forward(x: Any) -> Any:
    raise ZeroDivisionError


def a_pass_that_breaks_off_inside_a_slot(order: str, policy: str) -> None:
    """A kernel that raises while a slot has readers; the next step loads into that slot."""
    bench = Bench(order, policy)
    with bench.device.scope():
        bench.feed({0: ids(90, 1)})
        store = next(store for store in bench.cache.stores if store.is_host)
        kernel, calls = store._kernel, []

        def breaks(*operands: Any) -> Any:
            calls.append(operands)
            result = kernel(*operands)
            if len(calls) == 4:
                raise ZeroDivisionError
            return result

        store._kernel = breaks
        try:
            bench.feed({0: [3]})
        except ZeroDivisionError:
            bench.rows[0] = ids(90, 1)
        store._kernel = kernel
        bench.check(bench.decode([0], 3), [0])


def long_prefill_without_a_wait(order: str, policy: str) -> None:
    """A dozen chunks whose logits nobody asks for: uploads and departures overlap.

    Kernels are slow on this card, so the host runs far ahead of it.
    """
    bench = Bench(order, policy, max_seq_len=512, card="rtx-3060-12gb?kernel=1e-3")
    with bench.device.scope():
        prompt = ids(240, 9)
        for first in range(0, 239, 20):
            bench.feed({1: prompt[first : min(239, first + 20)]}, "none")
        bench.check(bench.feed({1: prompt[239:]}), [1])
        live = bench.device.memory().allocated_bytes
        bench.decode([1], 1)
        grown = bench.device.memory().allocated_bytes - live
        assert grown <= 8192, f"a decode step keeps {grown} bytes more on the card"


def a_short_row_flushes_often(order: str, policy: str) -> None:
    """Three rows share a slot, and every load is queued before the layers' flushes."""
    bench = Bench(order, policy, part_tokens=64, ring_slots=3)
    with bench.device.scope():
        bench.feed({0: ids(5, 1), 1: ids(11, 2), 2: ids(3, 3)})
        bench.check(bench.decode([0, 1, 2], 20), [0, 1, 2])


def a_page_is_shared_while_it_is_written(order: str, policy: str) -> None:
    """The rows of a shared page are still on their way when the page is copied."""
    bench = Bench(order, policy, card="rtx-3060-12gb?kernel=1e-3")
    with bench.device.scope():
        bench.feed({0: ids(21, 1)}, "none")
        bench.cache.copy_row(0, 1)
        bench.rows[1] = list(bench.rows[0])
        bench.feed({1: ids(11, 2)}, "none")
        bench.feed({0: ids(6, 3)}, "none")
        bench.check(bench.decode([0, 1], 3), [0, 1])


def a_resident_part_grows(order: str) -> None:
    """From 64 to 128 rows, and the rows it had are still there."""
    bench = Bench(order, "gpu", part_tokens=256)
    with bench.device.scope():
        bench.feed({0: ids(60, 1)})
        bench.check(bench.decode([0], 8), [0])


def freed_pages_join() -> None:
    """Two halves that come back make a whole again."""
    from offload_llama.cache.pages import Buddies

    buddies = Buddies(64)
    taken = [buddies.take(16), buddies.take(16)]
    for offset in taken:
        assert offset is not None
        buddies.give(offset, 16)
    assert buddies.take(64) == 0, "freed pages did not join"


def refused_pins(order: str, allowed_bytes: int) -> None:
    """Rows pass through the bounce buffers, several times around."""
    wide = {"n_kv_heads": 8, "n_heads": 8, "head_dim": 64, "n_layers": 2}
    bench = Bench(order, refuse=allowed_bytes, config=wide, part_tokens=512, max_seq_len=1024)
    with bench.device.scope():
        bench.feed({0: ids(600, 1)}, "none")
        bench.feed({1: ids(500, 2)}, "none")
        out = bench.decode([0, 1], 9)
        waits = {wait.site.code.co_name for wait in bench.device.card.syncs}
        assert "h2d" not in waits, "the host waits for every bounced copy"
        bench.check(out, [0, 1])
        held = bench.device.card.pinned_bytes
        pinned = bench.cache.stats().pinned_bytes
        bench.cache.close()
        gc.collect()
        left = bench.device.card.pinned_bytes - (held - pinned)
        assert left < 0, "closing left the bounce buffers pinned"


def another_accelerator(order: str) -> None:
    """The generic device, with `torch.accelerator` answered by the card: rows bounce."""
    from offload_llama.device.accelerator import AcceleratorDevice
    from offload_llama.device.sim import simulated

    card_device = simulated("rtx-3060-12gb?kernel=1e-4", order=order, strict=False)
    card = card_device.card

    class OnCard(AcceleratorDevice):
        def scope(self) -> Any:
            return card_device.scope()

    answers: dict[str, Any] = {
        "current_stream": lambda device=None: card.current,
        "set_stream": lambda stream: setattr(card, "current", stream),
        "synchronize": lambda device=None: card.synchronize(),
        "get_memory_info": lambda device=None: (card.memory.free_bytes, card.memory.total_bytes),
        "memory_allocated": lambda device=None: card.live_bytes,
        "max_memory_allocated": lambda device=None: card.peak_bytes,
        "memory_reserved": lambda device=None: card.live_bytes,
    }
    device: Any = OnCard("cuda")
    device.card = card
    with patch.multiple(torch.accelerator, **answers), device.scope():
        bench = Bench(order, device=device)
        bench.feed({0: ids(70, 1)}, "none")
        bench.check(bench.decode([0], 9), [0])
        streams = {(record.engine, record.stream) for record in card.timeline}
        assert {s for engine, s in streams if engine == "compute"} == {"default"}, streams
        copies = {s for engine, s in streams if engine == "d2h"} - {"default"}
        assert len(copies) == 1, "rows leave on the stream that computes"
        done = device.event()
        bench.feed({0: [1]})
        done.record(device.current_stream())
        device.synchronize()
        arrived = done.mark.time_s is not None and done.mark.time_s <= card.now()
        assert arrived, "the host did not wait for the card"


def closing_gives_everything_back(order: str) -> None:
    """Registered memory and card memory are as before, and a second cache works."""
    bench = Bench(order)
    with bench.device.scope():
        bench.feed({0: ids(60, 1)})
        registered = bench.device.card.host_memory
        slabs = bench.cache._memory.slabs
        assert slabs and all(slab.pinned for slab in slabs), "a slab is not pinned"
        held = bench.device.card.pinned_bytes
        size = sum(slab.size_bytes for slab in slabs)
        bench.feed({1: ids(60, 3)}, "none")
        bench.cache.close()
        assert registered.pinned_bytes == held - size, "closing left memory registered"
        assert bench.cache.stats().pinned_bytes == 0, "a closed cache says it pins memory"
        assert bench.cache._memory.size_bytes == 0, "closing kept a slab"
        del slabs
        bench.model.stores = []
        for layer in bench.model.layers:
            del layer.attention.store
        # What was prepared for the last step, and nothing of the cache.
        kept = bench.device.memory().allocated_bytes - bench.base_bytes
        assert kept <= 2048, f"closing left {kept} bytes on the card"
        from tests.helpers_model import make_cache

        bench.cache = make_cache(bench.model, bench.device, "offload")
        gc.collect()
        bench.rows = {}
        bench.feed({0: ids(60, 2)})
        bench.check(bench.decode([0], 9), [0])


def copies_hide_behind_compute() -> None:
    """On the virtual clock, a step takes about the larger of the two."""
    from offload_llama.device.sim import simulated
    from offload_llama.model import Transformer
    from tests.helpers_model import make_cache, tiny_config

    config = tiny_config(
        dim=4096, n_heads=32, n_kv_heads=32, head_dim=128, hidden_dim=11008, max_seq_len=4096
    )
    device = simulated("rtx-3060-12gb", values=False)
    with device.scope():
        model = Transformer(config)
        for name, shape in model.expected_tensors().items():
            empty = torch.empty(shape, dtype=torch.float16, device=device.torch_device)
            model.set_tensor(name, empty)
        model.tie_output()
        cache = make_cache(
            model, device, "gpu-layers:2", max_seq_len=4096, part_tokens=1024, flush_tokens=16
        )
        with cache.step([0], [0], [3000], "none") as step:
            model(step.upload([0] * 3000), step)
        device.synchronize()
        device.card.forget()
        start_s = device.clock()
        for _ in range(5):
            with cache.step([0], [cache.lengths[0]], [1]) as step:
                sampled(model(step.upload([0]), step))
        device.synchronize()
        total_s = device.clock() - start_s
        busy = {"compute": 0.0, "h2d": 0.0}
        for record in device.card.timeline:
            if record.engine in busy:
                busy[record.engine] += record.end_s - record.start_s
        assert total_s < 0.75 * (busy["compute"] + busy["h2d"]), "no overlap"
        assert device.card.errors == []


def scenarios() -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
    """Return the scenarios with their arguments, the quick ones first."""
    from tests.mutation_moves import a_row_is_freed_while_it_leaves, layers_leave_the_card

    mixed = "layers:0=gpu,1-2=offload,3=gpu"
    all_: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(freed_pages_join, ())]
    all_ += [(a_resident_part_grows, ("copy_last",)), (copies_hide_behind_compute, ())]
    moves = (layers_leave_the_card, a_row_is_freed_while_it_leaves)
    all_ += [(move, (order,)) for move in moves for order in ORDERS]
    for order, allowed_bytes in zip(ORDERS, (0, 4 << 20), strict=True):
        all_ += [
            (a_short_row_flushes_often, (order, mixed)),
            (refused_pins, (order, allowed_bytes)),
            (a_pass_that_breaks_off_inside_a_slot, (order, mixed)),
            (closing_gives_everything_back, (order,)),
            (a_page_is_shared_while_it_is_written, (order, mixed)),
            (long_prefill_without_a_wait, (order, "offload")),
        ]
    all_ += [(another_accelerator, ("copy_last",)), (a_short_row_flushes_often, ("inorder", mixed))]
    for order in ORDERS:
        all_ += [
            (decode_of_a_ragged_batch, (order, "offload")),
            (rows_come_and_go, (order, mixed)),
        ]
    return all_


def run_all() -> None:
    """Run every scenario; raise at the first that fails."""
    with torch.no_grad():
        for scenario, arguments in scenarios():
            try:
                scenario(*arguments)
            except Exception as error:
                raise AssertionError(f"{scenario.__name__}{arguments}: {error}") from error
