"""The CPU as a device: one memory, so streams, events and pinning mean nothing."""

from __future__ import annotations

import contextlib
import re
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

from offload_llama.device.api import DeviceMemory


class NullEvent:
    """An event of a device that has done everything before the call returns."""

    def record(self, stream: Any = None) -> None:
        """Do nothing: there is nothing to mark."""

    def synchronize(self) -> None:
        """Do nothing: the work is done."""

    def query(self) -> bool:
        """Return True: the work is done."""
        return True


class NullStream:
    """The order in which the program runs."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: what the event marks is done."""

    def synchronize(self) -> None:
        """Do nothing: the work is done."""


class CpuDevice:
    """Tensors in host memory; `memory` gives the process's figures."""

    simulated = False
    offloads = False

    def __init__(self) -> None:
        self.name = "cpu"
        self.torch_device = torch.device("cpu")
        self._process = psutil.Process()
        self._peak_bytes = 0

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def stream(self) -> NullStream:
        return NullStream()

    def event(self) -> NullEvent:
        return NullEvent()

    def current_stream(self) -> NullStream:
        return NullStream()

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def register(self, memory: torch.Tensor) -> None:
        """Do nothing: nothing copies from here asynchronously."""

    def unregister(self, memory: torch.Tensor) -> None:
        """Do nothing, as `register`."""

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def synchronize(self) -> None:
        """Do nothing: the work is done."""

    def memory(self) -> DeviceMemory:
        """Return this process's resident bytes and the machine's memory.

        The peak is the system's own where it keeps one that can be reset (Linux), elsewhere the
        largest figure seen by a call of this method.
        """
        resident_bytes = self._process.memory_info().rss
        self._peak_bytes = max(self._peak_bytes, resident_bytes, _high_water_bytes())
        machine = psutil.virtual_memory()
        return DeviceMemory(
            allocated_bytes=resident_bytes,
            peak_bytes=self._peak_bytes,
            free_bytes=machine.available,
            total_bytes=machine.total,
            reserved_bytes=resident_bytes,
        )

    def reset_peak(self) -> None:
        # 5 asks the kernel to start the high-water mark again. Source: proc(5), clear_refs.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._peak_bytes = 0

    def clock(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        """Do nothing: nothing is held."""


def _high_water_bytes() -> int:
    """Return the system's high-water mark of this process, 0 where it keeps none."""
    try:
        status = Path("/proc/self/status").read_text("ascii", "replace")
    except OSError:
        return 0
    match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
