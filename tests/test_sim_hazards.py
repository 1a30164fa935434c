"""The simulated card catches what a GPU would not forgive, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offload_llama.device.sim import (
    PlacementError,
    RaceError,
    SimError,
    SimulatedDevice,
    UseAfterFreeError,
    simulated,
)
from tests.helpers_sim import ORDERS, Slab, download, errors_of

N = 1024


def test_a_copy_out_that_does_not_wait_for_its_producer_is_a_race() -> None:
    """B02: keys and values copied out before the card finished writing them."""
    device = simulated()
    with device.scope():
        host = device.pinned_empty((N,), torch.float32)
        keys = torch.ones(N, device=device.torch_device) * 2
        with pytest.raises(RaceError, match=r"read .* d2h copy .* not ordered after the write"):
            download(device, keys, host, wait=False)


@pytest.mark.parametrize("order", ["copy_first", "random"])
def test_a_copy_out_that_does_not_wait_carries_wrong_values(order: str) -> None:
    """B02: where the copy runs as early as events allow, the host's bytes are not the keys."""
    wrong = False
    for seed in range(20):
        device = simulated(order=order, strict=False, seed=seed)
        with device.scope():
            host = device.pinned_empty((N,), torch.float32)
            keys = torch.ones(N, device=device.torch_device) * 2
            download(device, keys, host, wait=False)
            device.synchronize()
        assert "RaceError" in errors_of(device.card)
        wrong = wrong or not bool((host == 2).all())
    assert wrong


@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_out_behind_an_event_is_right_in_every_order(order: str) -> None:
    """B02 and B22, done right: wait before the copy, and before the host reads."""
    device = simulated(order=order)
    with device.scope():
        host = device.pinned_empty((N,), torch.float32)
        keys = torch.ones(N, device=device.torch_device) * 2
        _, landed = download(device, keys, host)
        landed.synchronize()
        assert bool((host == 2).all())
    assert device.card.errors == []


def test_the_host_may_not_read_a_copy_before_it_has_landed() -> None:
    """B22: the host's copy read before it has arrived."""
    device = simulated()
    with device.scope():
        host = device.pinned_empty((N,), torch.float32)
        download(device, torch.ones(N, device=device.torch_device), host)
        with pytest.raises(RaceError, match=r"read .* on the host"):
            host.sum()


def test_the_host_may_not_overwrite_what_is_still_being_sent() -> None:
    device = simulated()
    with device.scope():
        host = device.pinned_empty((N,), torch.float32)
        target = torch.empty(N, device=device.torch_device)
        target.copy_(host, non_blocking=True)
        with pytest.raises(RaceError, match=r"write .* by fill_ on the host"):
            host.fill_(1.0)


def test_the_host_may_read_what_is_being_sent_and_touch_other_bytes() -> None:
    device = simulated()
    with device.scope():
        host = device.pinned_empty((2 * N,), torch.float32)
        target = torch.empty(N, device=device.torch_device)
        target.copy_(host[:N], non_blocking=True)
        host[:N].sum()
        host[N:].fill_(1.0)
    assert device.card.errors == []


def test_writes_to_a_registered_slab_are_checked_by_address() -> None:
    device = simulated()
    slab = Slab(16 * 4096)
    with device.scope():
        device.register(slab.bytes)
        assert slab.floats(4096, N).is_pinned()
        source = torch.ones(N, device=device.torch_device)
        _, landed = download(device, source, slab.floats(4096, N))
        slab.floats(0, N).fill_(0.0)
        slab.floats(4096 + 4 * N, N).fill_(0.0)
        with pytest.raises(RaceError):
            slab.bytes[4096 + 4 * N - 1 : 4096 + 4 * N].fill_(0)
        landed.synchronize()
        slab.bytes.fill_(0)
        device.unregister(slab.bytes)
        assert not slab.bytes.is_pinned()


def test_registered_memory_may_not_be_given_back_under_a_copy() -> None:
    """B10: memory is unlocked while an asynchronous copy is still running."""
    device = simulated()
    slab = Slab(4096)
    with device.scope():
        device.register(slab.bytes)
        download(device, torch.ones(N, device=device.torch_device), slab.floats(0, N))
        with pytest.raises(UseAfterFreeError, match="unregistered before the host waited"):
            device.unregister(slab.bytes)


def overwrite_a_slot(device: SimulatedDevice, *, wait: bool) -> None:
    """Attention reads a slot; the next load overwrites it."""
    host = device.pinned_empty((N,), torch.float32)
    slot = torch.zeros(N, device=device.torch_device)
    load, consumed = device.stream(), device.event()
    (slot + 1).sum()
    consumed.record(device.current_stream())
    if wait:
        load.wait_event(consumed)
    with device.use(load):
        slot.copy_(host, non_blocking=True)


def test_a_slot_may_not_be_refilled_before_it_was_read() -> None:
    device = simulated()
    with device.scope(), pytest.raises(RaceError, match=r"write .* h2d copy"):
        overwrite_a_slot(device, wait=False)


def test_a_slot_may_be_refilled_behind_its_last_reader() -> None:
    device = simulated()
    with device.scope():
        overwrite_a_slot(device, wait=True)
    assert device.card.errors == []


def test_waiting_for_an_event_that_was_recorded_too_early_does_not_help() -> None:
    device = simulated()
    with device.scope():
        host = device.pinned_empty((N,), torch.float32)
        slot = torch.zeros(N, device=device.torch_device)
        load, early = device.stream(), device.event()
        early.record(device.current_stream())
        slot.sum()
        load.wait_event(early)
        with device.use(load), pytest.raises(RaceError):
            slot.copy_(host, non_blocking=True)


def test_a_wait_takes_the_recording_that_was_last_when_it_was_queued() -> None:
    device = simulated()
    with device.scope():
        host = device.pinned_empty((N,), torch.float32)
        slot = torch.zeros(N, device=device.torch_device)
        load, event = device.stream(), device.event()
        event.record(device.current_stream())
        load.wait_event(event)
        slot.sum()
        event.record(device.current_stream())
        with device.use(load), pytest.raises(RaceError):
            slot.copy_(host, non_blocking=True)


def test_two_streams_may_read_the_same_bytes_and_write_different_ones() -> None:
    device = simulated()
    with device.scope():
        source = torch.ones(2 * N, device=device.torch_device)
        target = torch.empty(2 * N, device=device.torch_device)
        side, begin = device.stream(), device.event()
        begin.record(device.current_stream())
        side.wait_event(begin)
        target[:N].copy_(source[:N])
        with device.use(side):
            target[N:].copy_(source[:N])
    assert device.card.errors == []


def test_interleaved_strided_writes_do_not_touch_each_other() -> None:
    device = simulated()
    with device.scope():
        both = torch.empty(300, 2, 8, device=device.torch_device)
        side, begin = device.stream(), device.event()
        begin.record(device.current_stream())
        side.wait_event(begin)
        both[:, 0].fill_(1.0)
        with device.use(side):
            both[:, 1].fill_(2.0)
        assert device.card.errors == []
        with device.use(side), pytest.raises(RaceError):
            both[299, 0, 7:].fill_(3.0)


def test_order_is_handed_on_from_stream_to_stream() -> None:
    device = simulated()
    with device.scope():
        x = torch.zeros(N, device=device.torch_device)
        first, second = device.stream(), device.stream()
        for stream, before in ((first, device.current_stream()), (second, first)):
            event = device.event()
            event.record(before)
            stream.wait_event(event)
        with device.use(second):
            x.add_(1)
    assert device.card.errors == []


def test_what_the_host_waited_for_is_behind_every_stream() -> None:
    device = simulated()
    with device.scope():
        x = torch.zeros(N, device=device.torch_device)
        first, second = device.stream(), device.stream()
        first.synchronize()
        with device.use(second), pytest.raises(RaceError):
            x.add_(1)
        device.synchronize()
        with device.use(first):
            x.add_(1)
        device.synchronize()
        x.add_(1)
    assert len(device.card.errors) == 1


def test_a_card_that_is_not_strict_collects_what_it_sees() -> None:
    device = simulated(strict=False)
    with device.scope():
        overwrite_a_slot(device, wait=False)
        device.synchronize()
        overwrite_a_slot(device, wait=False)
    assert errors_of(device.card) == ["RaceError", "RaceError"]


@pytest.mark.parametrize(
    "mix",
    [
        lambda card, host: card @ host,
        lambda card, host: host @ card,
        lambda card, host: card.add_(host),
        lambda card, host: host.add_(card),
        lambda card, host: torch.cat([card, host]),
        lambda card, host: torch.nn.functional.scaled_dot_product_attention(
            card[None, None], host[None, None], host[None, None]
        ),
    ],
)
def test_an_operation_on_both_memories_is_refused(
    mix: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    device = simulated()
    with device.scope(), pytest.raises(PlacementError):
        mix(torch.ones(8, 8, device=device.torch_device), torch.ones(8, 8))


def test_host_scalars_may_join_an_operation() -> None:
    device = simulated()
    with device.scope():
        x = torch.ones(8, device=device.torch_device)
        assert (x * torch.tensor(3.0)).tolist() == [3.0] * 8
        x[2:4] = 5.0
        assert x.tolist() == [1, 1, 5, 5, 1, 1, 1, 1]


def test_a_tensor_of_the_card_cannot_be_used_outside_the_scope() -> None:
    device = simulated()
    with device.scope():
        x = torch.ones(8, device=device.torch_device)
    with pytest.raises(SimError, match=r"outside `with device.scope"):
        x + 1
    assert repr(x) == "SimTensor((8,), torch.float32, device='cuda:0')"


def test_streams_that_wait_for_each_other_in_vain_are_named_a_deadlock() -> None:
    device = simulated(order="copy_last")
    with device.scope():
        side, event = device.stream(), device.event()
        event.record(side)
        # An event recorded again behind a wait for that very recording cannot come about through
        # torch.cuda, so the queues are bent by hand.
        mark = device.card.clock.record(side.lane)
        side.lane.queue.appendleft((False, mark))
        with pytest.raises(SimError, match="deadlock"):
            side.synchronize()
