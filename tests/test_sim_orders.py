"""Adversarial orders: right programs give the same bits, wrong ones do not."""

from __future__ import annotations

import pytest
import torch

from offload_llama.device.sim import SimulatedDevice, simulated
from offload_llama.errors import ConfigError
from tests.helpers_sim import ORDERS, errors_of

LAYERS, ROWS, DIM, SLOTS = 6, 64, 16, 2
WAITS = (
    "load waits for its slot",
    "compute waits for the load",
    "flush waits for compute",
    "load waits for the flush",
)


def stream_layers(device: SimulatedDevice, leave_out: str = "") -> torch.Tensor:
    """Run products over matrices that stream through two slots, and write a row of each back.

    A model of the ring, with a stream for each direction; any of its waits can be left out.
    """
    generator = torch.Generator().manual_seed(0)
    with device.scope():
        host = [device.pinned_empty((ROWS, DIM), torch.float32) for _ in range(LAYERS)]
        for layer in host:
            layer.copy_(torch.randn(ROWS, DIM, generator=generator))
        slots = [torch.empty(ROWS, DIM, device=device.torch_device) for _ in range(SLOTS)]
        up, down = device.stream(), device.stream()
        up.wait_stream(device.current_stream())
        consumed = [device.event() for _ in range(SLOTS)]
        landed = [device.event() for _ in range(LAYERS)]
        x = torch.ones(DIM, ROWS, device=device.torch_device)
        kept = []
        for _ in range(2):
            for i, layer in enumerate(host):
                slot, ready, written = slots[i % SLOTS], device.event(), device.event()
                with device.use(up):
                    if leave_out != WAITS[0]:
                        up.wait_event(consumed[i % SLOTS])
                    if leave_out != WAITS[3]:
                        up.wait_event(landed[i])
                    slot.copy_(layer, non_blocking=True)
                    ready.record(up)
                if leave_out != WAITS[1]:
                    device.current_stream().wait_event(ready)
                x = torch.tanh(x @ slot @ slot.T)
                consumed[i % SLOTS].record(device.current_stream())
                row = x[0, :DIM].clone()
                kept.append(row)
                written.record(device.current_stream())
                with device.use(down):
                    if leave_out != WAITS[2]:
                        down.wait_event(written)
                    layer[0].copy_(row, non_blocking=True)
                    landed[i].record(down)
        device.synchronize()
        return torch.cat([x.flatten().cpu(), *[layer[0] for layer in host]])


def run(order: str, leave_out: str = "", seed: int = 0) -> tuple[torch.Tensor, SimulatedDevice]:
    device = simulated(order=order, strict=False, seed=seed)
    return stream_layers(device, leave_out), device


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_right_program_gives_the_same_bits_in_every_order(order: str, seed: int) -> None:
    expected, _ = run("inorder")
    values, device = run(order, seed=seed)
    assert torch.equal(values, expected)
    assert device.card.errors == []


@pytest.mark.parametrize("leave_out", WAITS)
def test_each_missing_wait_is_reported_and_gives_wrong_values(leave_out: str) -> None:
    expected, _ = run("inorder")
    wrong = []
    for order in ORDERS:
        values, device = run(order, leave_out)
        assert "RaceError" in errors_of(device.card)
        wrong.append(not torch.equal(values, expected))
    assert any(wrong[1:])


def test_the_time_does_not_depend_on_when_values_are_computed() -> None:
    times = {run(order)[1].clock() for order in ORDERS}
    assert len(times) == 1


def test_orders_agree_on_launches_and_allocations() -> None:
    cards = [run(order)[1].card for order in ORDERS]
    assert len({(card.n_launches, card.n_allocs, card.peak_bytes) for card in cards}) == 1


def test_device_memory_is_poisoned_until_it_is_written() -> None:
    for order in ORDERS:
        device = simulated(order=order)
        with device.scope():
            x = torch.empty(4, device=device.torch_device)
            i = torch.empty(4, dtype=torch.int64, device=device.torch_device)
            assert x.isnan().all().item()
            assert (i > 2**60).all().item()


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="inorder, copy_last"):
        simulated(order="sideways")
