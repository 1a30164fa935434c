"""The part of `torch.cuda` that a scope replaces, answered by one card.

Every function has the name and the parameters of the original (a test compares them).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from offload_llama.device.sim.attention_ops import scaled_dot_product_attention
from offload_llama.device.sim.card import Card
from offload_llama.device.sim.host_memory import SUCCESS
from offload_llama.device.sim.streams import SimStream, StreamScope

Patch = tuple[Any, str, Any]

# What a card that CUDA does not drive answers: the simulator runs it on the same path.
_OTHER_CAPABILITY = (8, 0)

_tensor, _as_tensor = torch.tensor, torch.as_tensor


class SimCudart:
    """The runtime calls that PyTorch shows as `torch.cuda.cudart()`."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        """Page-lock [ptr, ptr + size) and return the runtime's code; a failure leaves it behind."""
        return self._keep(self._card.host_memory.register(ptr, size))

    def cudaHostUnregister(self, ptr: int) -> int:
        """Undo `cudaHostRegister` and return the runtime's code."""
        code, in_flight = self._card.host_memory.unregister(ptr, self._card.host)
        if in_flight is not None:
            self._card.report(in_flight)
        return self._keep(code)

    def cudaMemGetInfo(self, device: Any) -> tuple[int, int]:
        """Return the card's free and total bytes."""
        return self._card.memory.free_bytes, self._card.memory.total_bytes

    def _keep(self, code: int) -> int:
        if code != SUCCESS:
            self._card.last_error = code
        return code


def _torch_functions() -> dict[str, Any]:
    """Return replacements for factories that never reach the dispatcher on a CPU build."""

    def tensor(
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        if device is None or torch.device(device).type != "cuda":
            made = _tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)
            return made.pin_memory() if pin_memory else made
        return _tensor(data, dtype=dtype).to(device).requires_grad_(requires_grad)

    def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            return data.to(device=device or data.device, dtype=dtype or data.dtype)
        if device is None or torch.device(device).type != "cuda":
            return _as_tensor(data, dtype=dtype, device=device)
        return _as_tensor(data, dtype=dtype).to(device)

    return {"tensor": tensor, "as_tensor": as_tensor}


def cuda_functions(card: Card) -> dict[str, Any]:
    """Return what stands in for the attributes of `torch.cuda`."""
    profile, memory = card.profile, card.memory
    capability = profile.capability or _OTHER_CAPABILITY
    architecture = f"sm_{capability[0]}{capability[1]}"

    def stream(stream: SimStream | None) -> StreamScope:
        return StreamScope(stream)

    def current_stream(device: Any = None) -> SimStream:
        return card.current

    def default_stream(device: Any = None) -> SimStream:
        return card.default

    def set_stream(stream: SimStream | None) -> None:
        if stream is not None:
            card.current = stream

    def synchronize(device: Any = None) -> None:
        card.synchronize()

    def memory_allocated(device: Any = None) -> int:
        return memory.live_bytes

    def max_memory_allocated(device: Any = None) -> int:
        return memory.peak_bytes

    def memory_reserved(device: Any = None) -> int:
        return memory.live_bytes

    def max_memory_reserved(device: Any = None) -> int:
        return memory.peak_bytes

    def reset_peak_memory_stats(device: Any = None) -> None:
        memory.peak_bytes = memory.live_bytes

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return memory.free_bytes, memory.total_bytes

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return capability

    def get_device_name(device: Any = None) -> str:
        return f"simulated {profile.vendor} {profile.name}"

    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=get_device_name(),
            major=capability[0],
            minor=capability[1],
            total_memory=memory.total_bytes,
        )

    def get_arch_list() -> list[str]:
        return [architecture]

    def is_available() -> bool:
        return True

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return profile.bf16 or including_emulation

    def device_count() -> int:
        return 1

    def current_device() -> int:
        return 0

    def empty_cache() -> None:
        return None

    cudart_module = SimCudart(card)

    def cudart() -> SimCudart:
        return cudart_module

    functions: dict[str, Any] = {
        f.__name__: f
        for f in (
            stream,
            current_stream,
            default_stream,
            set_stream,
            synchronize,
            memory_allocated,
            max_memory_allocated,
            memory_reserved,
            max_memory_reserved,
            reset_peak_memory_stats,
            mem_get_info,
            get_device_capability,
            get_device_name,
            get_device_properties,
            get_arch_list,
            is_available,
            is_bf16_supported,
            device_count,
            current_device,
            empty_cache,
            cudart,
        )
    }
    functions["Stream"], functions["Event"] = card.stream_type, card.event_type
    return functions


def generic_event(card: Card) -> type[Any]:
    """Return what stands in for `torch.Event`, which is told its device; a card has only one."""

    class Event(card.event_type):  # type: ignore[misc,name-defined]  # made for the card
        def __init__(self, device: Any = None, **settings: Any) -> None:
            super().__init__(**settings)

    return Event


def patches(card: Card, cuda_is_real: bool) -> list[Patch]:
    """Return (owner, attribute, replacement) for everything that a scope replaces."""
    found: list[Patch] = [(torch.cuda, name, f) for name, f in cuda_functions(card).items()]
    found += [(torch, name, f) for name, f in _torch_functions().items()]
    found += [(torch, "Stream", card.stream_type), (torch, "Event", generic_event(card))]
    found.append(
        (torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    )
    if not cuda_is_real:
        # Real initialisation would fail; where it works it must not be skipped.
        found.append((torch.cuda, "_lazy_init", lambda: None))
    return found
