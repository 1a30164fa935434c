"""What the engine may ask of a device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offload_llama.errors import DeviceError


class PinRefused(DeviceError):
    """The platform would not page-lock this memory (WSL, Windows and containers limit it)."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on the card: held by this process's tensors, their peak, free now, and all there is.

    `reserved_bytes` are what PyTorch has taken for tensors, used or not.
    """

    allocated_bytes: int
    peak_bytes: int
    free_bytes: int
    total_bytes: int
    reserved_bytes: int = 0


class Event(Protocol):
    """A point in a stream's work. Waiting on one that was never recorded is a no-op."""

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class Stream(Protocol):
    """A first-in, first-out queue of work on the device."""

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class Device(Protocol):
    """A card (real or simulated), or the CPU.

    `name` is how the user spelled it; `torch_device` is where its tensors live; `simulated` says
    that times and byte counts come from a model of a card; `offloads` is False where host and
    device memory are the same, so that offloading means nothing.
    """

    name: str
    torch_device: torch.device
    simulated: bool
    offloads: bool

    def scope(self) -> AbstractContextManager[Any]:
        """Everything that touches the device's tensors runs inside this; it may be entered twice.

        Never held across a `yield` to the caller. Nothing happens here on real hardware.
        """
        ...

    def stream(self) -> Stream:
        """Return a new stream."""
        ...

    def event(self) -> Event:
        """Return a new, unrecorded event."""
        ...

    def current_stream(self) -> Stream:
        """Return the stream that work is queued on now; look it up each time, never keep it."""
        ...

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue work on `stream` inside the context."""
        ...

    def register(self, memory: torch.Tensor) -> None:
        """Page-lock existing, page-aligned host memory exactly (no rounding, no copy).

        Args:
            memory: contiguous uint8 CPU tensor; must outlive the registration.

        Raises:
            PinRefused: the platform said no. The device's error state is clean again.
        """
        ...

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`; nothing in flight may still touch the memory."""
        ...

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised pinned host memory for small staging buffers.

        Raises:
            PinRefused: the platform said no.
        """
        ...

    def synchronize(self) -> None:
        """Wait on the host for everything queued on the device."""
        ...

    def memory(self) -> DeviceMemory:
        """Return the byte counters of the card."""
        ...

    def reset_peak(self) -> None:
        """Let `peak_bytes` start again from what is allocated now."""
        ...

    def clock(self) -> float:
        """Return seconds on the clock that this device's work is timed by (virtual if simulated).

        Call `synchronize` first where queued work is to be counted.
        """
        ...

    def close(self) -> None:
        """Give back what the device object itself holds."""
        ...
