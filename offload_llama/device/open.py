"""From a name as the user types it to a device."""

from __future__ import annotations

import difflib
import re

import torch

from offload_llama.device.accelerator import AcceleratorDevice
from offload_llama.device.api import Device
from offload_llama.device.cpu import CpuDevice
from offload_llama.device.cuda import CudaDevice
from offload_llama.errors import ConfigError, DeviceError

DEVICE_HELP = "auto, cuda, cuda:N, xpu, cpu, or a simulated card such as sim:rtx-3060-12gb"


def open_device(name: str) -> Device:
    """Return the device a name means; "auto" takes a CUDA card, else an XPU, else the CPU.

    No launcher's environment (RANK, WORLD_SIZE) is read: one process drives one device.

    Raises:
        ConfigError: the name means nothing, or names an unknown simulated card or setting.
        DeviceError: the device is not here, or this PyTorch build cannot run on it.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return CudaDevice()
        return AcceleratorDevice("xpu") if torch.xpu.is_available() else CpuDevice()
    if name == "cpu":
        return CpuDevice()
    if name.startswith("sim:"):
        # The simulator costs an import that real devices should not pay.
        from offload_llama.device.sim import simulated

        return simulated(name.removeprefix("sim:"))
    match = re.fullmatch(r"(cuda|xpu)(?::(\d+))?", name, re.ASCII)
    if match is None:
        kinds = ("auto", "cuda", "xpu", "cpu", "sim:rtx-3060-12gb")
        close = difflib.get_close_matches(name, kinds, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"unknown device {name!r}; {hint}use {DEVICE_HELP}")
    kind, index = match[1], int(match[2] or 0)
    module = torch.cuda if kind == "cuda" else torch.xpu
    count = module.device_count() if module.is_available() else 0
    if count == 0:
        raise DeviceError(
            f"--device {name}: no {kind} card can be used here (PyTorch {torch.__version__}); "
            f"use --device cpu, or try one with --device sim:rtx-3060-12gb"
        )
    if index >= count:
        raise DeviceError(
            f"--device {name}: there are {count} {kind} cards here, {kind}:0 to {kind}:{count - 1}"
        )
    return CudaDevice(index, name) if kind == "cuda" else AcceleratorDevice(kind, index, name)
