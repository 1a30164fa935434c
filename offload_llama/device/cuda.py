"""A CUDA or ROCm card through `torch.cuda`: each method is one thin call."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from offload_llama.device.api import DeviceMemory, PinRefused
from offload_llama.errors import DeviceError


class CudaDevice:
    """The card that `torch.cuda` drives; on ROCm builds that is an AMD one.

    Raises:
        DeviceError: this PyTorch build has no code for the card.
    """

    simulated = False
    offloads = True

    def __init__(self, index: int = 0, name: str | None = None) -> None:
        self.name = name or f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        if torch.version.hip is None:
            check_architecture(
                f"{self.name} ({torch.cuda.get_device_name(self.torch_device)})",
                torch.cuda.get_device_capability(self.torch_device),
                torch.cuda.get_arch_list(),
            )

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def stream(self) -> Any:
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]  # untyped

    def event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.torch_device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def register(self, memory: torch.Tensor) -> None:
        size_bytes = memory.numel() * memory.element_size()
        code = int(_runtime().cudaHostRegister(memory.data_ptr(), size_bytes, 0))
        if code != 0:
            self._clear_error()
            raise PinRefused(
                f"{self.name}: the platform refused to page-lock {size_bytes} bytes of host memory "
                f"(CUDA error {code})"
            )

    def unregister(self, memory: torch.Tensor) -> None:
        code = int(_runtime().cudaHostUnregister(memory.data_ptr()))
        if code != 0:
            self._clear_error()
            raise DeviceError(
                f"{self.name}: host memory could not be unregistered (CUDA error {code})"
            )

    def _clear_error(self) -> None:
        # A refused runtime call leaves its code behind, and the next kernel launch would report
        # it as its own. PyTorch has no call that only clears it, so a tiny launch takes the blame.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.torch_device).add_(1)

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PinRefused(f"{self.name}: no pinned host memory: {reason}") from error

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def memory(self) -> DeviceMemory:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(
            allocated_bytes=torch.cuda.memory_allocated(self.torch_device),
            peak_bytes=torch.cuda.max_memory_allocated(self.torch_device),
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            reserved_bytes=torch.cuda.memory_reserved(self.torch_device),
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def clock(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        """Do nothing: the runtime owns what there is."""


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # untyped in torch


def check_architecture(card: str, capability: tuple[int, int], built_for: Sequence[str]) -> None:
    """Return if a PyTorch build has code that this card can run.

    Machine code ("sm_86") runs on the same major version from its own minor version on;
    intermediate code ("compute_90") is compiled at run time for anything newer.
    Source: CUDA C++ Programming Guide, "Binary compatibility" and "PTX compatibility".

    Raises:
        DeviceError: none of it fits; the message names the card, the build and the remedy.
    """
    versions: list[tuple[int, int]] = []
    for architecture in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", architecture)
        if match is None:
            return
        version = (int(match[2]), int(match[3]))
        same_major = version[0] == capability[0]
        if version <= capability and (same_major or match[1] == "compute"):
            return
        versions.append(version)
    if not versions:
        return
    newer = capability > max(versions)
    remedy = "a newer PyTorch, built for a newer CUDA" if newer else "an older CUDA's PyTorch build"
    raise DeviceError(
        f"{card} is sm_{capability[0]}{capability[1]}, but PyTorch {torch.__version__} was built "
        f"for {' '.join(built_for)}; install {remedy} (torch cu126 still knows sm_50 to sm_90, "
        "cu128 and later sm_75 to sm_120), or use --device cpu"
    )
