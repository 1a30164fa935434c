"""The card's bytes: what tensors hold, their peak, and running out."""

from __future__ import annotations

import gc

import pytest
import torch

from offload_llama.device.sim import SimulatedDevice, simulated
from offload_llama.errors import ConfigError

MIB = 2**20


def small_card(vram_bytes: int = 4 * MIB, **kwargs: object) -> SimulatedDevice:
    return simulated("rtx-3060-12gb", vram_bytes=vram_bytes, context_bytes=0, **kwargs)  # type: ignore[arg-type]  # forwarded


def take(device: SimulatedDevice, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)


def test_more_bytes_than_the_card_has_are_out_of_memory() -> None:
    device = small_card()
    with device.scope():
        held = [take(device, MIB) for _ in range(4)]
        with pytest.raises(torch.OutOfMemoryError, match=r"1\.00 MiB.*test_sim_memory.py"):
            take(device, MIB)
        held.pop()
        take(device, MIB)
    assert device.memory().allocated_bytes == 3 * MIB
    assert device.memory().peak_bytes == 4 * MIB
    assert device.memory().free_bytes == MIB


@pytest.mark.parametrize("order", ["inorder", "copy_last"])
def test_a_failed_operation_takes_nothing(order: str) -> None:
    device = small_card(order=order)
    with device.scope():
        x = take(device, 3 * MIB)
        with pytest.raises(torch.OutOfMemoryError):
            x + 1
        assert device.memory().allocated_bytes == 3 * MIB
        x.add_(1)


def test_an_absurd_size_is_out_of_memory_too() -> None:
    device = simulated()
    with device.scope(), pytest.raises(torch.OutOfMemoryError):
        torch.zeros(2**50, device=device.torch_device)


def test_the_context_and_other_programs_take_their_share() -> None:
    device = simulated("rtx-3060-12gb?vram=2GiB&context=512MiB", values=False)
    assert device.memory().total_bytes == 2 * 2**30
    assert device.memory().free_bytes == 1536 * MIB
    with device.scope():
        take(device, 1400 * MIB)
        device.card.take_memory(1024 * MIB)
        assert device.memory().free_bytes == 512 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            take(device, 1400 * MIB)


def test_blocks_are_rounded_up_to_512_bytes() -> None:
    device = simulated()
    with device.scope():
        x = take(device, 1)
        y = take(device, 513)
        assert device.memory().allocated_bytes == 512 + 1024
        view = y[5:]
        del x, y
        assert device.memory().allocated_bytes == 1024
        assert view.numel() == 508
    del view
    assert device.memory().allocated_bytes == 0


def test_the_peak_can_start_again_from_what_is_held() -> None:
    device = simulated()
    with device.scope():
        x = take(device, MIB)
        take(device, 2 * MIB)
        device.reset_peak()
        assert device.memory().peak_bytes == MIB
        take(device, MIB)
        assert device.memory().peak_bytes == 2 * MIB
        del x


@pytest.mark.parametrize("order", ["inorder", "copy_last", "random"])
def test_temporaries_are_given_back_at_once_as_by_the_caching_allocator(order: str) -> None:
    device = simulated(order=order)
    with device.scope():
        x = torch.ones(MIB // 4, device=device.torch_device)
        for _ in range(10):
            x = x * 2 + 1
        gc.collect()
        assert device.memory().allocated_bytes == MIB
        assert device.memory().peak_bytes == 3 * MIB


def test_views_and_in_place_work_allocate_nothing() -> None:
    device = simulated()
    with device.scope():
        x = torch.zeros(8, 8, device=device.torch_device)
        host = device.pinned_empty((8, 8), torch.float32)
        device.card.forget()
        x[2:4].view(4, 4).T.add_(1)
        x.unflatten(1, (2, 4)).permute(1, 0, 2).mul_(2)
        x.copy_(host, non_blocking=True)
        host.copy_(x, non_blocking=True)
        assert device.card.n_allocs == 0 and device.card.allocations == []
        x + 1
        [allocation] = device.card.allocations
    assert allocation.nbytes == 512
    assert allocation.where.startswith("test_sim_memory.py:")


def test_fields_that_a_profile_does_not_have_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no field 'vram'.*vram_bytes"):
        simulated("rtx-4060", vram=3)
