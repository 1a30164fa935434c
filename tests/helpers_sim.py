"""Small pieces of engine code for the tests of the simulated card."""

from __future__ import annotations

import mmap
from typing import Any

import torch

from offload_llama.device.sim import Card, SimulatedDevice, simulated

ORDERS = ("inorder", "copy_last", "copy_first", "random")


def quiet_card(**overrides: Any) -> SimulatedDevice:
    """Return a card without fixed times, so that times are bytes over rates."""
    fixed: dict[str, Any] = {"launch_s": 0.0, "kernel_s": 0.0, "copy_latency_s": 0.0}
    return simulated("rtx-3060-12gb", **{**fixed, **overrides})


def errors_of(card: Card) -> list[str]:
    """Return the kinds of mistakes a card that is not strict has collected."""
    return [type(error).__name__ for error in card.errors]


class Slab:
    """Page-aligned host memory as the engine makes it: mmap and `torch.frombuffer`."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    def floats(self, start: int, n: int) -> torch.Tensor:
        """Return n float32 of the slab from a byte offset on."""
        return self.bytes[start : start + 4 * n].view(torch.float32)


def download(
    device: SimulatedDevice, source: torch.Tensor, target: torch.Tensor, *, wait: bool = True
) -> tuple[Any, Any]:
    """Copy to pinned memory on a stream of its own; return the stream and the landed event."""
    copy, landed = device.stream(), device.event()
    if wait:
        written = device.event()
        written.record(device.current_stream())
        copy.wait_event(written)
    with device.use(copy):
        target.copy_(source, non_blocking=True)
        landed.record(copy)
    return copy, landed
