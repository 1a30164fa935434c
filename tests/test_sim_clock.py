"""The virtual clock: each operation's time from its operands, and what overlaps."""

from __future__ import annotations

import pytest
import torch

from offload_llama.device.sim import SimulatedDevice, simulated
from tests.helpers_sim import quiet_card

MIB = 2**20


def elapsed(device: SimulatedDevice, start_s: float) -> float:
    """Return the virtual seconds since then, all work done."""
    device.synchronize()
    return device.clock() - start_s


def upload(device: SimulatedDevice, nbytes: int, pinned: bool = True) -> None:
    host = torch.empty(nbytes, dtype=torch.uint8)
    if pinned:
        host = device.pinned_empty((nbytes,), torch.uint8)
    torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device).copy_(
        host, non_blocking=pinned
    )


def test_a_copy_takes_its_bytes_over_the_links_rate() -> None:
    device = quiet_card(h2d_bytes_per_s=16e9, d2h_bytes_per_s=8e9)
    with device.scope():
        upload(device, 64 * MIB)
        assert elapsed(device, 0.0) == pytest.approx(64 * MIB / 16e9)
        start = device.clock()
        torch.empty(64 * MIB, dtype=torch.uint8, device=device.torch_device).cpu()
        assert elapsed(device, start) == pytest.approx(64 * MIB / 8e9 / 0.55)


def test_a_copy_has_a_latency_and_a_kernel_a_least_time() -> None:
    device = quiet_card(copy_latency_s=1e-3, kernel_s=1e-2, launch_s=1e-4)
    with device.scope():
        upload(device, 4)
        assert elapsed(device, 0.0) == pytest.approx(1e-3 + 1e-4, rel=1e-4)
        start = device.clock()
        x = torch.zeros(4, device=device.torch_device)
        x.add_(1)
        assert elapsed(device, start) == pytest.approx(1e-4 + 2e-2, rel=1e-4)


def test_a_matrix_product_takes_the_larger_of_bytes_and_operations() -> None:
    device = quiet_card(values=False, mem_bytes_per_s=1e12, fp16_flops=1e13, fp32_flops=1e12)
    with device.scope():
        for dtype, flops in ((torch.float16, 1e13), (torch.float32, 1e12)):
            a = torch.empty(512, 1024, dtype=dtype, device=device.torch_device)
            b = torch.empty(1024, 2048, dtype=dtype, device=device.torch_device)
            start = device.clock()
            a @ b
            assert elapsed(device, start) == pytest.approx(2 * 512 * 1024 * 2048 / flops)
            row = a[:1]
            start = device.clock()
            row @ b
            n_bytes = (1024 + 1024 * 2048 + 2048) * dtype.itemsize
            assert elapsed(device, start) == pytest.approx(n_bytes / 1e12)


def test_attention_is_timed_by_its_operands_not_by_a_score_matrix() -> None:
    device = quiet_card(values=False, mem_bytes_per_s=1e12, fp16_flops=1e13)
    with device.scope():
        q = torch.empty(1, 8, 4, 64, dtype=torch.float16, device=device.torch_device)
        k = torch.empty(1, 8, 4096, 64, dtype=torch.float16, device=device.torch_device)
        start = device.clock()
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, k)
        lse_bytes = 8 * 4 * 4
        n_bytes = 2 * (2 * q.numel() + 2 * k.numel()) + lse_bytes
        assert elapsed(device, start) == pytest.approx(n_bytes / 1e12)


def test_repeated_heads_are_read_once() -> None:
    device = quiet_card(values=False, mem_bytes_per_s=1e9)
    with device.scope():
        x = torch.empty(1, 1000, device=device.torch_device)
        start = device.clock()
        x.expand(50, 1000).sum(0)
        assert elapsed(device, start) == pytest.approx(8e3 / 1e9)


def test_a_lookup_reads_its_rows_not_the_table() -> None:
    device = quiet_card(mem_bytes_per_s=1e9)
    with device.scope():
        table = torch.empty(10_000, 100, device=device.torch_device)
        rows = torch.zeros(5, dtype=torch.int64, device=device.torch_device)
        start = elapsed(device, 0.0)
        torch.nn.functional.embedding(rows, table)
        assert elapsed(device, start) == pytest.approx((2 * 5 * 100 * 4 + 5 * 8) / 1e9)


def overlapped(device: SimulatedDevice, n_products: int, copy_bytes: int, wait: bool) -> float:
    """Return the time of products beside one copy on a stream of its own."""
    copy, begin = device.stream(), device.event()
    host = device.pinned_empty((copy_bytes,), torch.uint8)
    slot = torch.empty(copy_bytes, dtype=torch.uint8, device=device.torch_device)
    x = torch.empty(1000, 1000, device=device.torch_device)
    start = elapsed(device, 0.0)
    with device.use(copy):
        slot.copy_(host, non_blocking=True)
        begin.record(copy)
    if wait:
        device.current_stream().wait_event(begin)
    for _ in range(n_products):
        x @ x
    return elapsed(device, start)


@pytest.mark.parametrize(("n_products", "copy_mib"), [(1, 64), (8, 64), (40, 64)])
def test_copy_and_compute_on_two_streams_take_the_longer_of_both(
    n_products: int, copy_mib: int
) -> None:
    device = quiet_card(values=False, fp32_flops=2e12, h2d_bytes_per_s=16e9)
    compute_s, copy_s = n_products * 2e9 / 2e12, copy_mib * MIB / 16e9
    with device.scope():
        side_by_side = overlapped(device, n_products, copy_mib * MIB, wait=False)
        one_by_one = overlapped(device, n_products, copy_mib * MIB, wait=True)
    assert side_by_side == pytest.approx(max(compute_s, copy_s))
    assert one_by_one == pytest.approx(compute_s + copy_s)


def test_work_on_one_stream_never_overlaps() -> None:
    device = quiet_card(values=False, fp32_flops=2e12, h2d_bytes_per_s=16e9)
    with device.scope():
        x = torch.empty(1000, 1000, device=device.torch_device)
        host = device.pinned_empty((16 * MIB,), torch.uint8)
        slot = torch.empty(16 * MIB, dtype=torch.uint8, device=device.torch_device)
        slot.copy_(host, non_blocking=True)
        x @ x
        assert elapsed(device, 0.0) == pytest.approx(16 * MIB / 16e9 + 1e-3)


def test_kernels_of_two_streams_share_one_engine() -> None:
    device = quiet_card(values=False, fp32_flops=2e12)
    with device.scope():
        x = torch.empty(1000, 1000, device=device.torch_device)
        with device.use(device.stream()):
            x @ x
        x @ x
        assert elapsed(device, 0.0) == pytest.approx(2e-3)


def both_ways(device: SimulatedDevice, up_bytes: int, down_bytes: int) -> float:
    up, down = device.stream(), device.stream()
    up_host = device.pinned_empty((up_bytes,), torch.uint8)
    down_host = device.pinned_empty((down_bytes,), torch.uint8)
    up_slot = torch.empty(up_bytes, dtype=torch.uint8, device=device.torch_device)
    down_slot = torch.empty(down_bytes, dtype=torch.uint8, device=device.torch_device)
    start = elapsed(device, 0.0)
    with device.use(up):
        up_slot.copy_(up_host, non_blocking=True)
    with device.use(down):
        down_host.copy_(down_slot, non_blocking=True)
    return elapsed(device, start)


def test_copies_in_both_directions_slow_each_other_down_while_both_run() -> None:
    device = quiet_card(values=False, h2d_bytes_per_s=10e9, d2h_bytes_per_s=10e9, duplex_factor=0.8)
    with device.scope():
        assert both_ways(device, 10**8, 10**8) == pytest.approx(0.01 / 0.8)
        # The shorter one ends at 0.005 / 0.8; the longer has 0.005 left, at the full rate.
        assert both_ways(device, 10**8, 5 * 10**7) == pytest.approx(0.005 / 0.8 + 0.005)
        assert both_ways(device, 5 * 10**7, 10**8) == pytest.approx(0.005 / 0.8 + 0.005)


def test_a_later_copy_that_is_ready_goes_before_an_earlier_one_that_waits() -> None:
    device = quiet_card(values=False, fp32_flops=1e12, h2d_bytes_per_s=10e9)
    with device.scope():
        x = torch.empty(1000, 1000, device=device.torch_device)
        late, free = device.stream(), device.stream()
        host = device.pinned_empty((2 * 10**7,), torch.uint8)
        slots = torch.empty(2 * 10**7, dtype=torch.uint8, device=device.torch_device)
        x @ x  # 2 ms
        done = device.event()
        done.record(device.current_stream())
        late.wait_event(done)
        with device.use(late):
            slots[: 10**7].copy_(host[: 10**7], non_blocking=True)
        with device.use(free):
            slots[10**7 :].copy_(host[10**7 :], non_blocking=True)
        assert elapsed(device, 0.0) == pytest.approx(3e-3)
        copies = {r.stream: r.start_s for r in device.card.timeline if r.engine == "h2d"}
    assert copies[free.name] == 0.0
    assert copies[late.name] == pytest.approx(2e-3)


def test_the_launching_host_is_the_bound_when_kernels_are_small() -> None:
    device = simulated(launch_s=1e-5, kernel_s=1e-6)
    with device.scope():
        x = torch.zeros(4, device=device.torch_device)
        start = elapsed(device, 0.0)
        for _ in range(100):
            x.add_(1)
        assert elapsed(device, start) == pytest.approx(100e-5 + 1e-6, rel=1e-3)


def test_a_blocking_copy_makes_the_host_wait_and_an_asynchronous_one_does_not() -> None:
    device = quiet_card(values=False)
    with device.scope():
        upload(device, 64 * MIB)
        assert device.clock() == 0.0
        upload(device, 64 * MIB, pinned=False)
        assert device.clock() > 64 * MIB / 24e9


def test_events_tell_the_time_between_them_and_when_they_are_done() -> None:
    device = quiet_card(values=False, fp32_flops=1e12, launch_s=1e-6)
    with device.scope():
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        x = torch.empty(1000, 1000, device=device.torch_device)
        begin.record()
        x @ x
        end.record()
        assert not end.query()
        while not end.query():
            pass
        assert device.clock() == pytest.approx(2e-3, rel=2e-3)
        assert begin.elapsed_time(end) == pytest.approx(2.0, rel=2e-3)
        assert device.event().query()


def test_attention_on_the_host_takes_the_hosts_time() -> None:
    device = quiet_card(cpu_attention_bytes_per_s=1e9)
    with device.scope():
        q = torch.ones(1, 1, 1, 16)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
        assert device.clock() == pytest.approx(3 * 64 / 1e9)


def test_a_copy_within_host_memory_takes_the_hosts_time() -> None:
    device = quiet_card(host_dram_bytes_per_s=40e9)
    with device.scope():
        device.pinned_empty((10**6,), torch.uint8).copy_(torch.empty(10**6, dtype=torch.uint8))
        assert device.clock() == pytest.approx(2e6 / 40e9)


def test_the_timeline_says_what_ran_where_and_when() -> None:
    device = quiet_card(values=False)
    with device.scope():
        upload(device, MIB)
        torch.zeros(4, device=device.torch_device)
        device.synchronize()
        copy, fill = device.card.timeline
        assert (copy.engine, copy.stream, copy.op, copy.nbytes) == (
            "h2d",
            "default",
            "h2d copy",
            MIB,
        )
        assert (fill.engine, fill.op, fill.nbytes) == ("compute", "zeros", 16)
        assert copy.start_s == 0.0 < copy.end_s == fill.start_s < fill.end_s
        assert copy.where.startswith("test_sim_clock.py:")
        device.card.forget()
        assert device.card.timeline == [] and device.card.bytes("h2d") == 0
        assert device.clock() == fill.end_s


def test_bytes_are_counted_by_direction_and_stream() -> None:
    device = simulated()
    with device.scope():
        x = torch.zeros(256, device=device.torch_device)
        host = device.pinned_empty((256,), torch.float32)
        side = device.stream()
        side.wait_stream(device.current_stream())
        host.copy_(x)
        with device.use(side):
            x.copy_(host, non_blocking=True)
            x[:64].copy_(host[:64], non_blocking=True)
        assert device.card.bytes("d2h") == 1024
        assert device.card.bytes("h2d") == 1280
        assert device.card.bytes("h2d", side) == device.card.bytes("h2d", "stream 1") == 1280
        assert device.card.bytes("h2d", device.current_stream()) == 0
