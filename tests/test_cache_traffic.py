"""What a decode step moves, allocates and waits for, on the simulated card."""

from __future__ import annotations

import mmap
import re
from typing import Any

import pytest
import torch

from offload_llama.cache import KVCache
from offload_llama.cache.kv import CacheStats
from offload_llama.cache.step import Uploads
from offload_llama.device.sim.device import simulated
from offload_llama.policy import place
from tests.helpers_model import make_cache, prefill, random_model, run_step, tiny_config

ROW = 2 * 2 * 8 * 4  # keys and values of one token in one layer of the tiny model
FLUSH = 8
KV_MAKERS = {"_buffer", "_tail", "allocate", "__init__", "pinned_empty", "_add_slab"}
POLICIES = {"offload": 4, "gpu-layers:2": 2, "layers:0-2=gpu,3=offload": 1, "gpu": 0}


def ids(n: int) -> list[int]:
    return [i * 7 % 97 for i in range(n)]


def decode(model: Any, cache: KVCache, rows: list[int], n: int) -> None:
    """Greedy steps over rows; the sampled token is the only thing the host asks for."""
    tokens = [1] * len(rows)
    for _ in range(n):
        start = [cache.lengths[row] for row in rows]
        with cache.step(rows, start, [1] * len(rows)) as step:
            logits = model(step.upload(tokens), step)
        tokens = logits.argmax(-1).tolist()


@pytest.mark.parametrize("order", ["inorder", "copy_last", "copy_first"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ring_slots", [2, 4])
@pytest.mark.parametrize("lengths", [[57], [5, 40, 90]])
def test_a_decode_step_moves_the_host_s_rows_up_and_only_new_rows_down(
    order, policy, ring_slots, lengths
):
    """Also: no race, no KV allocation after warm-up, no host wait but for the sampled token."""
    device = simulated("rtx-3060-12gb", order=order)
    card, n_host = device.card, POLICIES[policy]
    with device.scope():
        model = random_model(tiny_config(), device)
        cache = make_cache(model, device, policy, ring_slots=ring_slots, part_tokens=32)
        rows = list(range(len(lengths)))
        for row in rows:
            prefill(model, cache, row, ids(lengths[row]))
        decode(model, cache, rows, 6)
        device.synchronize()
        cache.reset_counters()
        card.forget()
        expected_h2d, n_steps = 0, 2 * FLUSH
        for _ in range(n_steps):
            expected_h2d += cache.stats().host_kv_bytes
            decode(model, cache, rows, 1)
        device.synchronize()
        stats = cache.stats()
        new_bytes = n_steps * len(rows) * ROW * n_host
        assert stats.d2h_bytes == new_bytes
        assert stats.h2d_bytes == expected_h2d
        copy_stream = cache._link.stream.name
        assert card.bytes("h2d", copy_stream) == expected_h2d
        assert card.bytes("d2h", copy_stream) == new_bytes
        assert card.errors == []
        waits = {(wait.op, re.sub(r":\d+$", "", wait.where)) for wait in card.syncs}
        assert {where.rpartition("/")[2] for _, where in waits} <= {
            "test_cache_traffic.py",
        }, waits
        kept = [a.site.code.co_name for a in card.allocations if a.site.code.co_name in KV_MAKERS]
        # A resident layer's last part may double its buffer; nothing else takes memory.
        assert set(kept) <= ({"_buffer"} if n_host < 4 else set())
        cache.close()


def test_pinned_views_of_a_row_are_the_pages_themselves():
    """B22: readable at once, the host having waited for what was in flight."""
    device = simulated("rtx-3060-12gb", order="copy_last")
    with device.scope():
        model = random_model(tiny_config(), device)
        cache = make_cache(model, device, "offload")
        prefill(model, cache, 1, ids(40))
        decode(model, cache, [1], 9)
        store = cache.stores[2]
        views = store.host_view(1)
        assert sum(len(k) for k, _ in views) == store.host_len(1) == 48
        again = store.host_view(1)
        for (k, v), (k2, v2) in zip(views, again, strict=True):
            assert k.data_ptr() == k2.data_ptr() and v.data_ptr() == v2.data_ptr()
            for half in (k, v):
                assert any(
                    slab.pinned
                    and slab.k.data_ptr() <= half.data_ptr() < slab.k.data_ptr() + slab.size_bytes
                    for slab in cache._memory.slabs
                )
        keys = torch.cat([k for k, _ in views])
        assert torch.equal(keys, store.rows(1)[0][:48]) and keys.isfinite().all()
    assert device.card.errors == []


@pytest.mark.parametrize("n_tokens", [4096, 5000, 8192])
def test_pinned_bytes_follow_the_rows_within_five_percent_and_a_slab(n_tokens):
    """B14: slabs are registered exactly, not rounded up to powers of two."""
    stats = shape_only(n_tokens, prefill_tokens=n_tokens - 300, steps=300)
    assert stats.host_kv_bytes <= stats.pinned_bytes <= 1.05 * stats.host_kv_bytes + (64 << 20)


def shape_only(n_tokens: int, prefill_tokens: int, steps: int) -> CacheStats:
    """Grow one sequence of SmolLM2-135M's cache shape in 2 layers of float32."""
    config = tiny_config(n_kv_heads=3, n_heads=9, head_dim=64, n_layers=2, max_seq_len=8192)
    device = simulated("rtx-3060-12gb", values=False)
    with device.scope():
        model = random_model(config, device)
        cache = KVCache(
            config, device, place("offload", 2), dtype=torch.float32, max_batch_size=1,
            max_seq_len=8192,
        )  # fmt: skip
        prefill(model, cache, 0, [0] * prefill_tokens, 512)
        decode(model, cache, [0], steps)
        stats = cache.stats()
        used = cache._memory.used_tokens * 2 * cache.geometry.row_bytes
        assert used <= 1.05 * 2 * 2 * n_tokens * cache.geometry.row_bytes
        cache.close()
        assert cache.stats().pinned_bytes == 0
    return stats


def test_many_short_sequences_pin_little():
    """32 sequences of 100 tokens, the default model's 30 layers in float32: at most 256 MiB."""
    config = tiny_config(n_kv_heads=3, n_heads=9, head_dim=64, n_layers=30)
    device = simulated("rtx-3060-12gb", values=False)
    with device.scope():
        model = random_model(config, device)
        cache = KVCache(
            config, device, place("offload", 30), dtype=torch.float32, max_batch_size=32,
            max_seq_len=1024,
        )  # fmt: skip
        for row in range(32):
            prefill(model, cache, row, [0] * 100, 100)
        stats = cache.stats()
        assert stats.host_kv_bytes == 32 * 100 * 30 * 2 * 768
        assert stats.pinned_bytes <= 256 << 20
        cache.close()


@pytest.mark.parametrize(("allowed_bytes", "bounce"), [(0, True), (0, False), (4 << 20, True)])
@pytest.mark.parametrize("order", ["inorder", "copy_last"])
def test_refused_pins_cost_speed_and_one_warning_but_no_bit(allowed_bytes, bounce, order):
    """B31: the platform pins nothing, or only the first slab; the numbers are the same."""
    results, warnings = [], []
    config = tiny_config(n_kv_heads=8, n_heads=8, head_dim=64, n_layers=2)
    for refuse in (False, True):
        device = simulated("rtx-3060-12gb", order=order)
        if refuse:
            device.card.refuse_pins_after(allowed_bytes, pinned_empty=not bounce)
        with device.scope():
            model = random_model(config, device)
            cache = make_cache(
                model, device, "offload", warn=warnings.append, part_tokens=512, flush_tokens=16,
                max_seq_len=1024,
            )  # fmt: skip
            out = [prefill(model, cache, 1, ids(700), 300), prefill(model, cache, 0, ids(40))]
            out += [run_step(model, cache, {1: [i], 0: [i]}) for i in range(20)]
            results.append(torch.cat([o.view(-1, 97) for o in out]))
            if refuse:
                assert cache.stats().pinned_bytes <= allowed_bytes < cache.stats().host_kv_bytes
            cache.close()
        assert device.card.errors == []
    assert torch.equal(*results)
    assert len(warnings) == 1 and "could not be pinned" in warnings[0]


def test_without_pinning_nothing_is_registered_and_the_text_is_the_same():
    results = []
    for pin in (True, False):
        device = simulated("rtx-3060-12gb", order="copy_first")
        with device.scope():
            model = random_model(tiny_config(), device)
            cache = make_cache(model, device, "offload", pin=pin)
            prefill(model, cache, 0, ids(90))
            results.append(torch.cat([run_step(model, cache, {0: [i]}) for i in range(12)]))
            assert (cache.stats().pinned_bytes > 0) == pin
            cache.close()
        assert device.card.errors == []
    assert torch.equal(*results)


def test_slabs_are_whole_pages_that_share_none_with_others():
    device = simulated("rtx-3060-12gb")
    with device.scope():
        model = random_model(tiny_config(), device)
        cache = make_cache(model, device, "offload")
        prefill(model, cache, 0, ids(30))
        for slab in cache._memory.slabs:
            assert slab.k.data_ptr() % mmap.PAGESIZE == 0
            assert slab.size_bytes % mmap.PAGESIZE == 0
        cache.close()


def test_decoding_holds_the_peak_flat_and_closing_gives_everything_back():
    """B53: after a long prefill, 190 steps allocate no KV; B10's buffers are gone at the end."""
    device = simulated("rtx-3060-12gb")
    with device.scope():
        model = random_model(tiny_config(), device)
        base = device.memory().allocated_bytes
        cache = make_cache(model, device, "offload", part_tokens=128)
        prefill(model, cache, 0, ids(300))
        decode(model, cache, [0], 10)
        device.synchronize()
        device.reset_peak()
        decode(model, cache, [0], 10)
        early = device.memory().peak_bytes
        device.reset_peak()
        decode(model, cache, [0], 150)
        assert device.memory().peak_bytes <= early + 4096
        cache.close()
        del cache
        model.stores = []
        for layer in model.layers:
            del layer.attention.store
        assert device.memory().allocated_bytes <= base + 4096
    assert device.card.errors == []


def test_uploads_wait_only_for_a_buffer_that_is_still_leaving():
    device = simulated("rtx-3060-12gb", order="copy_last")
    with device.scope():
        uploads = Uploads(device)
        sent = [uploads.send([i, i + 1]) for i in range(20)]
        assert [s.tolist() for s in sent] == [[i, i + 1] for i in range(20)]
        larger = uploads.send(list(range(1000)))
        assert larger.tolist() == list(range(1000))
    assert device.card.errors == []


def test_the_ring_is_there_before_the_first_layer_leaves_if_there_is_a_budget():
    device = simulated("rtx-3060-12gb")
    with device.scope():
        model = random_model(tiny_config(), device)
        assert make_cache(model, device, "gpu").stats().ring_bytes == 0
        cache = make_cache(model, device, "gpu", kv_budget_bytes=12 << 10)
        assert cache.stats().ring_bytes == 3 * 32 * ROW
        prefill(model, cache, 0, ids(100))
        assert any(store.is_host for store in cache.stores)
        assert cache.stats().ring_bytes == 3 * 32 * ROW
