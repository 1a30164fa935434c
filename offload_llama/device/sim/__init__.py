"""A simulated CUDA card on the CPU.

It runs the engine's CUDA path itself, with real numbers, and checks what a GPU would not forgive:
races between streams or with the host, memory freed too early, copies that would silently block,
mixed devices, more bytes than the card has. A virtual clock says when each operation would have
run on a card with the figures of a hardware profile.

Not modelled: kernels that run side by side, library workspaces, fragmentation, CUDA graphs, more
than one card at a time, and accesses to host memory that bypass PyTorch (`.numpy()`).
"""

from __future__ import annotations

from offload_llama.device.sim.card import Card
from offload_llama.device.sim.device import SimulatedDevice, simulated
from offload_llama.device.sim.errors import (
    PlacementError,
    RaceError,
    SimError,
    SlowCopyError,
    UseAfterFreeError,
)

__all__ = [
    "Card",
    "PlacementError",
    "RaceError",
    "SimError",
    "SimulatedDevice",
    "SlowCopyError",
    "UseAfterFreeError",
    "simulated",
]
