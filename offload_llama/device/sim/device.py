"""The simulated card as a device: `CudaDevice` itself, run inside the card's scope."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import torch

from offload_llama import hardware
from offload_llama.device.api import DeviceMemory
from offload_llama.device.cuda import CudaDevice
from offload_llama.device.sim.card import Card
from offload_llama.device.sim.scope import Scope
from offload_llama.errors import ConfigError


class SimulatedDevice(CudaDevice):
    """A `CudaDevice` whose `torch.cuda` is a simulated card.

    Each method enters the scope by itself, so counters can be read anywhere; operations on tensors
    need the caller's own `with device.scope():`. Accesses that bypass PyTorch's dispatcher (a
    pinned tensor's `.numpy()`, `memoryview`) are not seen.
    """

    simulated = True

    def __init__(self, card: Card, name: str) -> None:
        self.card = card
        self._scope = Scope(card)
        with self._scope:
            super().__init__(0, name)

    def scope(self) -> AbstractContextManager[Any]:
        return self._scope

    def stream(self) -> Any:
        with self._scope:
            return super().stream()

    def event(self) -> Any:
        with self._scope:
            return super().event()

    def current_stream(self) -> Any:
        with self._scope:
            return super().current_stream()

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        with self._scope:
            return super().use(stream)

    def register(self, memory: torch.Tensor) -> None:
        with self._scope:
            super().register(memory)

    def unregister(self, memory: torch.Tensor) -> None:
        with self._scope:
            super().unregister(memory)

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with self._scope:
            return super().pinned_empty(shape, dtype)

    def synchronize(self) -> None:
        with self._scope:
            super().synchronize()

    def memory(self) -> DeviceMemory:
        with self._scope:
            return super().memory()

    def reset_peak(self) -> None:
        with self._scope:
            super().reset_peak()

    def clock(self) -> float:
        """Return the host's virtual time."""
        return self.card.now()


def simulated(
    name: str = "rtx-3060-12gb",
    *,
    values: bool = True,
    order: str = "inorder",
    strict: bool = True,
    seed: int = 0,
    **profile_overrides: Any,
) -> SimulatedDevice:
    """Return a new simulated card as a device.

    Args:
        name: a preset, with overrides behind `?`, as `hardware.card` takes it.
        values: False keeps shapes only: large models cost neither time nor memory, and reading a
            value gives zero.
        order: when queued work computes its values: inorder, copy_last, copy_first or random.
        strict: raise mistakes where they happen; otherwise they are collected in `card.errors`.
        seed: of the random order.
        **profile_overrides: fields of `HardwareProfile`.

    Raises:
        ConfigError: an unknown card, setting, field or order.
        DeviceError: this platform's PyTorch cannot hold simulated tensors.
    """
    profile = hardware.simulated_card(name)
    known = {field.name for field in dataclasses.fields(profile)}
    for field in profile_overrides:
        if field not in known:
            raise ConfigError(
                f"a hardware profile has no field {field!r}; it has {', '.join(sorted(known))}"
            )
    profile = dataclasses.replace(profile, **profile_overrides)
    card = Card(profile, values=values, order=order, strict=strict, seed=seed)
    return SimulatedDevice(card, f"sim:{name}")
