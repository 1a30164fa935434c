"""Tensors that say they are on the card, and hold their values (or only shapes) on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload_llama.device.sim.device_memory import Block
from offload_llama.device.sim.errors import SimError
from offload_llama.device.sim.spans import Span, span_of

CUDA0 = torch.device("cuda", 0)


class SimTensor(torch.Tensor):
    """A tensor on the simulated card.

    `raw` is the CPU tensor of the same geometry behind it (a meta tensor where only shapes are
    kept), `block` the device memory it lies in, `span` its bytes in that block.
    """

    raw: torch.Tensor
    block: Block
    span: Span

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # C

    @staticmethod
    def __new__(cls, raw: torch.Tensor, block: Block, span: Span | None = None) -> SimTensor:
        tensor: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=CUDA0,
        )
        tensor.raw, tensor.block = raw, block
        tensor.span = span_of(raw) if span is None else span
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub omits `func`
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise SimError(f"{func} on a tensor of a simulated card, outside `with device.scope()`")

    def __repr__(self) -> str:  # type: ignore[override]  # torch adds an argument for itself
        return f"SimTensor({tuple(self.shape)}, {self.dtype}, device='cuda:0')"

    def tolist(self) -> Any:
        """Return the values as nested lists, copied to the host first."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse as a CUDA tensor does, unless forced to copy to the host."""
        if force:
            return self.cpu().numpy()
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )

    def new_tensor(  # type: ignore[override]  # the two arguments that mean something here
        self, data: Any, *, dtype: torch.dtype | None = None, device: Any = None
    ) -> torch.Tensor:
        """Return new values on the card (unless another device is named), of the same dtype."""
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or CUDA0)

    def record_stream(self, s: Any) -> None:
        """Let the allocator wait for this stream's work before it reuses the memory."""
        self.block.recorded.add(s.actor.actor_id)
