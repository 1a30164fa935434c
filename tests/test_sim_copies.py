"""Copies over the link: which are asynchronous, what is pinned, and where the host waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_llama.device import PinRefused
from offload_llama.device.sim import SimulatedDevice, SlowCopyError, simulated
from offload_llama.errors import DeviceError
from tests.helpers_sim import Slab

Case = Callable[[SimulatedDevice], tuple[torch.Tensor, torch.Tensor]]


def on_card(device: SimulatedDevice, *shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.empty(*shape, device=device.torch_device, **kwargs)


SLOW: dict[str, Case] = {
    "pageable": lambda d: (on_card(d, 8), torch.empty(8)),
    "pageable, to the host": lambda d: (torch.empty(8), on_card(d, 8)),
    "the dtypes differ": lambda d: (
        on_card(d, 8, dtype=torch.float16),
        d.pinned_empty((8,), torch.float32),
    ),
    "the shapes differ": lambda d: (on_card(d, 4, 8), d.pinned_empty((1, 8), torch.float32)),
    "the layouts differ": lambda d: (on_card(d, 8, 4), d.pinned_empty((4, 8), torch.float32).T),
    "a prefix of every head": lambda d: (
        on_card(d, 2, 8, 16)[:, :4],
        d.pinned_empty((2, 8, 16), torch.float32)[:, :4],
    ),
    "one side has gaps": lambda d: (
        on_card(d, 2, 4, 16),
        d.pinned_empty((2, 8, 16), torch.float32)[:, :4],
    ),
}

FAST: dict[str, Case] = {
    "contiguous": lambda d: (on_card(d, 4, 8), d.pinned_empty((4, 8), torch.float32)),
    "to the host": lambda d: (d.pinned_empty((4, 8), torch.float32), on_card(d, 4, 8)),
    "a prefix of the rows": lambda d: (
        on_card(d, 16, 2, 8)[:4],
        d.pinned_empty((16, 2, 8), torch.float32)[4:8],
    ),
    "the same transposition": lambda d: (
        on_card(d, 4, 8).T,
        d.pinned_empty((4, 8), torch.float32).T,
    ),
    "one row in a larger pitch": lambda d: (
        on_card(d, 4, 8)[:1, :4],
        d.pinned_empty((4, 8), torch.float32)[2:3, :4],
    ),
    "nothing": lambda d: (on_card(d, 0), torch.empty(0)),
}


@pytest.mark.parametrize("case", SLOW.values(), ids=SLOW.keys())
def test_a_copy_that_would_silently_block_is_an_error(case: Case) -> None:
    device = simulated()
    with device.scope():
        target, source = case(device)
        with pytest.raises(SlowCopyError, match="would block the host"):
            target.copy_(source, non_blocking=True)


@pytest.mark.parametrize("case", SLOW.values(), ids=SLOW.keys())
def test_the_same_copy_without_non_blocking_is_a_wait_of_the_host(case: Case) -> None:
    device = simulated()
    with device.scope():
        target, source = case(device)
        target.copy_(source)
        [wait] = device.card.syncs
        assert wait.op.endswith(" copy")
        assert wait.where.startswith("test_sim_copies.py")
        assert wait.waited_s > 0


@pytest.mark.parametrize("case", FAST.values(), ids=FAST.keys())
def test_one_transfer_between_pinned_and_device_memory_is_asynchronous(case: Case) -> None:
    device = simulated()
    with device.scope():
        target, source = case(device)
        target.copy_(source, non_blocking=True)
        assert not device.card.syncs
    assert device.card.errors == []


def test_moving_a_tensor_follows_the_same_rules() -> None:
    device = simulated()
    with device.scope():
        host = torch.arange(6.0).view(2, 3)
        card = host.to(device.torch_device)
        assert [wait.op for wait in device.card.syncs] == ["h2d copy"]
        with pytest.raises(SlowCopyError, match="pageable"):
            host.to(device.torch_device, non_blocking=True)
        device.card.forget()
        again = host.pin_memory().to(device.torch_device, non_blocking=True)
        back = again.to("cpu", non_blocking=True)
        assert back.is_pinned() and not device.card.syncs
        device.synchronize()
        assert torch.equal(back, host)
        assert torch.equal(card.T.cpu(), host.T)
        assert torch.equal(card.to(device.torch_device, torch.float64).cpu(), host.double())


def test_every_wait_of_the_host_is_listed_with_its_line() -> None:
    device = simulated()
    with device.scope():
        x = torch.ones(4, device=device.torch_device)
        event = device.event()
        event.record()
        (x + 1).mul_(2).narrow(0, 1, 2).clone()
        assert not device.card.syncs
        x.sum().item()
        x.tolist()
        bool(x[0] > 0)
        x[x > 0]
        x.nonzero()
        x[torch.tensor([0, 1])]
        event.synchronize()
        device.current_stream().synchronize()
        device.synchronize()
        torch.multinomial(x, 1)
    waits = [wait.op for wait in device.card.syncs]
    assert waits == [
        "_local_scalar_dense",
        "d2h copy",
        "_local_scalar_dense",
        "index",
        "nonzero",
        "copy of indices",
        "event.synchronize",
        "stream.synchronize",
        "device.synchronize",
        "multinomial",
    ]
    assert all(wait.where.startswith("test_sim_copies.py:") for wait in device.card.syncs)


def test_registration_pins_exactly_the_bytes_it_is_given() -> None:
    """B14: a 5 MiB buffer pins 5 MiB when registered, and 8 MiB from PyTorch's allocator."""
    device = simulated()
    slab = Slab(5 * 2**20)
    device.register(slab.bytes)
    assert device.card.pinned_bytes == 5 * 2**20
    device.unregister(slab.bytes)
    assert device.card.pinned_bytes == 0
    staging = device.pinned_empty((5 * 2**20,), torch.uint8)
    assert device.card.pinned_bytes == 8 * 2**20
    view = staging[:100]
    del staging
    assert device.card.pinned_bytes == 8 * 2**20
    del view
    assert device.card.pinned_bytes == 0


def test_buffers_that_share_a_page_cannot_both_be_registered() -> None:
    device = simulated()
    slab = Slab(4 * 4096)
    device.register(slab.bytes[: 4096 + 100])
    with pytest.raises(PinRefused, match="CUDA error 712"):
        device.register(slab.bytes[4096 + 200 : 3 * 4096])
    device.register(slab.bytes[2 * 4096 : 3 * 4096])
    with pytest.raises(PinRefused):
        device.register(slab.bytes[:4096])


def test_memory_that_was_never_registered_cannot_be_unregistered() -> None:
    device = simulated()
    with pytest.raises(DeviceError, match="CUDA error 713"):
        device.unregister(torch.empty(4096, dtype=torch.uint8))


def test_a_refused_registration_is_survived_and_leaves_no_error_behind() -> None:
    """B31: page-locked memory is limited by the platform; the refusal must not abort the run."""
    device = simulated()
    device.card.refuse_pins_after(2**20)
    small, big = Slab(2**20), Slab(2**20)
    device.register(small.bytes)
    with pytest.raises(PinRefused, match=r"refused to page-lock 1048576 bytes .*CUDA error 2"):
        device.register(big.bytes)
    with device.scope():
        assert not big.bytes.is_pinned()
        # The next kernel must not inherit the refusal.
        assert torch.ones(2, device=device.torch_device).add_(1).tolist() == [2.0, 2.0]
        # Small staging buffers are another call, which is not limited here.
        assert device.pinned_empty((4,), torch.float32).is_pinned()


def test_an_error_nobody_cleared_hits_the_next_kernel() -> None:
    """B31: what `CudaDevice.register` must clean up after."""
    device = simulated()
    device.card.refuse_pins_after(0)
    with device.scope():
        runtime: Any = torch.cuda.cudart()
        assert runtime.cudaHostRegister(4096, 4096, 0) == 2
        x = torch.empty(4, device=device.torch_device)
        with pytest.raises(torch.AcceleratorError, match="CUDA error 2"):
            x.add_(1)
        x.zero_()


def test_staging_memory_can_be_refused_too() -> None:
    """B31: containers that allow no pinned memory at all."""
    device = simulated()
    device.card.refuse_pins_after(0, pinned_empty=True)
    with pytest.raises(PinRefused, match="no pinned host memory"):
        device.pinned_empty((4,), torch.float32)
    with device.scope():
        host = torch.ones(4)
        x = torch.empty(4, device=device.torch_device).copy_(host)
        assert x.tolist() == [1.0] * 4
    assert device.card.errors == []


def test_a_copy_that_leaves_the_pinned_range_is_pageable() -> None:
    device = simulated()
    slab = Slab(2 * 4096)
    device.register(slab.bytes[:4096])
    with device.scope():
        x = torch.empty(4096, dtype=torch.uint8, device=device.torch_device)
        assert slab.bytes[:4096].is_pinned()
        assert not slab.bytes[100:4196].is_pinned()
        with pytest.raises(SlowCopyError, match="pageable"):
            x.copy_(slab.bytes[100:4196], non_blocking=True)
