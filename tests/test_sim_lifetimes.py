"""Memory that is given back, and to whom it may go next."""

from __future__ import annotations

import pytest
import torch

from offload_llama.device.sim import RaceError, SimulatedDevice, UseAfterFreeError, simulated
from tests.helpers_sim import ORDERS, download, errors_of

N = 1024


def free_under_a_copy(device: SimulatedDevice, protect: str) -> torch.Tensor:
    """Drop a tensor whose copy to the host may still run, allocate, and overwrite."""
    host = device.pinned_empty((N,), torch.float32)
    keys = torch.ones(N, device=device.torch_device) * 7
    copy, landed = download(device, keys, host)
    if protect == "record_stream":
        keys.record_stream(copy)
    kept = keys if protect == "kept alive" else None
    del keys
    if protect == "waits before the allocation":
        device.current_stream().wait_event(landed)
    fresh = torch.empty(N, device=device.torch_device)
    if protect == "waits before the first write":
        device.current_stream().wait_event(landed)
    fresh.fill_(777.0)
    device.synchronize()
    del kept
    return host


@pytest.mark.parametrize("order", ["copy_last", "inorder"])
def test_memory_freed_under_a_copy_and_taken_again_is_caught(order: str) -> None:
    """B10: a buffer is recycled while an asynchronous copy is still running."""
    device = simulated(order=order, strict=False)
    with device.scope():
        host = free_under_a_copy(device, protect="nothing")
    assert errors_of(device.card) == ["UseAfterFreeError"]
    assert "copy" in str(device.card.errors[0])
    expected = 777.0 if order == "copy_last" else 7.0
    assert bool((host == expected).all())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "protect",
    [
        "kept alive",
        "record_stream",
        "waits before the allocation",
        "waits before the first write",
    ],
)
def test_memory_freed_early_but_protected_is_no_error(order: str, protect: str) -> None:
    """B10, done right, in each of the ways there are."""
    device = simulated(order=order)
    with device.scope():
        host = free_under_a_copy(device, protect)
        assert bool((host == 7.0).all())
    assert device.card.errors == []


def test_freed_memory_may_become_part_of_a_block_of_another_size() -> None:
    device = simulated()
    with device.scope():
        host = device.pinned_empty((N,), torch.float32)
        keys = torch.ones(N, device=device.torch_device)
        download(device, keys, host)
        del keys
        with pytest.raises(UseAfterFreeError):
            torch.zeros(3 * N, device=device.torch_device)


def test_small_and_large_blocks_come_from_different_pools() -> None:
    device = simulated()
    with device.scope():
        host = device.pinned_empty((N,), torch.float32)
        keys = torch.ones(N, device=device.torch_device)
        download(device, keys, host)
        del keys
        torch.zeros(2**20, device=device.torch_device)
    assert device.card.errors == []


def test_a_fresh_block_first_used_on_another_stream_must_wait_for_its_own() -> None:
    device = simulated()
    with device.scope():
        host = device.pinned_empty((N,), torch.float32)
        torch.ones(N, device=device.torch_device).mul_(2)
        slot = torch.empty(N, device=device.torch_device)
        load = device.stream()
        with device.use(load), pytest.raises(RaceError, match="the allocation"):
            slot.copy_(host, non_blocking=True)


def test_a_fresh_block_may_be_used_on_another_stream_that_waited() -> None:
    device = simulated()
    with device.scope():
        host = device.pinned_empty((N,), torch.float32)
        torch.ones(N, device=device.torch_device).mul_(2)
        slot = torch.empty(N, device=device.torch_device)
        load = device.stream()
        load.wait_stream(device.current_stream())
        with device.use(load):
            slot.copy_(host, non_blocking=True)
    assert device.card.errors == []


def test_an_upload_from_a_dropped_staging_buffer_is_safe_as_in_pytorch() -> None:
    """B10, mirrored: PyTorch's own pinned blocks outlive the copies made from them."""
    device = simulated(order="copy_last")
    with device.scope():
        target = torch.empty(N, device=device.torch_device)
        staging = device.pinned_empty((N,), torch.float32)
        staging.fill_(5.0)
        target.copy_(staging, non_blocking=True)
        del staging
        device.pinned_empty((N,), torch.float32).fill_(777.0)
        assert target.tolist() == [5.0] * N
    assert device.card.errors == []
