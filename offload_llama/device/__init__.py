"""The one hardware seam.

Engine code is plain torch (`dst.copy_(src, non_blocking=True)` under `with device.use(stream)`);
everything a card needs beyond that goes through the dozen methods of `Device`. `open_device`
turns a name into one: `cuda`, `cuda:1`, `xpu`, `cpu`, or a simulated card such as
`sim:rtx-3060-12gb`.
"""

from __future__ import annotations

from offload_llama.device.api import Device, DeviceMemory, Event, PinRefused, Stream
from offload_llama.device.open import open_device

__all__ = ["Device", "DeviceMemory", "Event", "PinRefused", "Stream", "open_device"]
