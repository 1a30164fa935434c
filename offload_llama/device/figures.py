"""The figures of a device that is here: its preset, and what was measured on it."""

from __future__ import annotations

from typing import cast

import torch

from offload_llama.device.api import Device
from offload_llama.hardware import HardwareProfile
from offload_llama.profiles import apply, key_of, load_measured, profile_of_card


def card_title(device: Device) -> str:
    """Return the name that a device's driver gives it; a simulated one's is the user's own."""
    kind = device.torch_device.type
    if device.simulated or kind == "cpu":
        return device.name
    if kind == "cuda":
        return torch.cuda.get_device_name(device.torch_device)
    return str(torch.xpu.get_device_properties(device.torch_device).name)


def preset_of(device: Device) -> HardwareProfile | None:
    """Return what is presumed of a device, None for the CPU, which is no card."""
    if device.simulated:
        from offload_llama.device.sim.device import SimulatedDevice

        return cast(SimulatedDevice, device).card.profile
    if not device.offloads:
        return None
    return profile_of_card(card_title(device), device.memory().total_bytes)


def profile_of(device: Device) -> HardwareProfile | None:
    """Return what is known of a device: its preset, with the figures measured here if there are.

    A simulated card is what its profile says, whatever was measured on it.
    """
    preset = preset_of(device)
    if preset is None or device.simulated:
        return preset
    return apply(preset, load_measured(key_of(card_title(device))))
