"""Any other accelerator PyTorch drives (Intel's XPU), through the generic `torch.accelerator`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from offload_llama.device.api import DeviceMemory, PinRefused


class AcceleratorDevice:
    """A card without a call of its own to page-lock existing memory; staging buffers still are."""

    simulated = False
    offloads = True

    def __init__(self, kind: str, index: int = 0, name: str | None = None) -> None:
        self.name = name or f"{kind}:{index}"
        self.torch_device = torch.device(kind, index)

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def stream(self) -> Any:
        return torch.Stream(device=self.torch_device)

    def event(self) -> Any:
        return torch.Event(device=self.torch_device)

    def current_stream(self) -> Any:
        return torch.accelerator.current_stream(self.torch_device)

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        # Not `with stream:`, which cannot be entered again while it is already current.
        previous = self.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(previous)

    def register(self, memory: torch.Tensor) -> None:
        raise PinRefused(f"{self.name}: PyTorch cannot page-lock existing memory for this device")

    def unregister(self, memory: torch.Tensor) -> None:
        """Do nothing: nothing could be registered."""

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PinRefused(f"{self.name}: no pinned host memory: {reason}") from error

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def memory(self) -> DeviceMemory:
        free_bytes, total_bytes = torch.accelerator.get_memory_info(self.torch_device)
        return DeviceMemory(
            allocated_bytes=torch.accelerator.memory_allocated(self.torch_device),
            peak_bytes=torch.accelerator.max_memory_allocated(self.torch_device),
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            reserved_bytes=torch.accelerator.memory_reserved(self.torch_device),
        )

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def clock(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        """Do nothing: the runtime owns what there is."""
