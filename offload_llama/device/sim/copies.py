"""Copies, above all those over the link, by the rules of ATen's `copy_`.

Source: aten/src/ATen/native/cuda/Copy.cu. A copy between host and card is one asynchronous
transfer only if both sides have the same dtype and lie densely in memory in the same order, and
the host's side is pinned. Everything else goes through temporaries and blocks the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload_llama.device.sim.dispatch import CardMode, aten
from offload_llama.device.sim.errors import SlowCopyError
from offload_llama.device.sim.schemas import handles, info_of
from offload_llama.device.sim.site import caller
from offload_llama.device.sim.spans import span_of
from offload_llama.device.sim.tensor import SimTensor
from offload_llama.device.sim.timing import copy_seconds, host_copy_seconds, kernel_seconds


@handles(aten.copy_.default)
def copy_(mode: CardMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Copy between any two tensors; the target is returned."""
    target, source = args[0], args[1]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    to_card, from_card = isinstance(target, SimTensor), isinstance(source, SimTensor)
    if to_card and from_card:
        _within_card(mode, target, source)
    elif to_card or from_card:
        _over_link(mode, target, source, non_blocking)
    else:
        mode.on_host(func, info_of(func), args, kwargs, [target, source])
        mode.card.clock.host_s += host_copy_seconds(mode.card.profile, span_of(target).nbytes)
    return target


@handles(aten._to_copy.default)
def to_copy(mode: CardMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a copy on another device, or of another dtype."""
    source = args[0]
    kwargs = dict(kwargs)
    device = kwargs.get("device")
    kind = source.device.type if device is None else torch.device(device).type
    from_card = isinstance(source, SimTensor)
    if kind != "cuda" and not from_card:
        return mode.on_host(func, info_of(func), args, kwargs, [source])
    kwargs.pop("device", None)
    non_blocking = kwargs.pop("non_blocking", False)
    if kind == "cuda" and from_card:
        return mode.compute(func, "_to_copy", [source.raw], kwargs, [source])
    dtype = kwargs.get("dtype") or source.dtype
    shape = torch.empty_like(
        torch.empty_strided(source.size(), source.stride(), dtype=dtype, device="meta"),
        memory_format=kwargs.get("memory_format") or torch.preserve_format,
    )
    if kind == "cuda":
        target = mode.new_like(shape, caller())
    else:
        make = torch.empty_strided if mode.card.values else _zeros_strided
        target = make(shape.size(), shape.stride(), dtype=dtype)
        if non_blocking:
            # PyTorch pins the result of such a copy.
            target = mode.new_pinned(target)
    _over_link(mode, target, source, non_blocking)
    return target


@handles(aten.is_pinned.default)
def is_pinned(mode: CardMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a tensor lies in page-locked host memory."""
    tensor = args[0]
    return not isinstance(tensor, SimTensor) and mode.card.host_memory.find(tensor) is not None


@handles(aten._pin_memory.default)
def pin_memory(mode: CardMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a pinned copy of a host tensor."""
    return mode.new_pinned(args[0])


def _zeros_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype).zero_()


def _within_card(mode: CardMode, target: SimTensor, source: SimTensor) -> None:
    to_raw, from_raw = target.raw, source.raw
    seconds = kernel_seconds(mode.card.profile, "copy_", (), [source.span], [target.span], target)
    mode.card.launch(
        "copy_",
        "compute",
        seconds,
        [(source.block, source.span)],
        [(target.block, target.span)],
        (lambda: to_raw.copy_(from_raw)) if mode.card.values else None,
        target.span.nbytes,
        caller(),
    )


def _over_link(mode: CardMode, target: Any, source: Any, non_blocking: bool) -> None:
    card, site = mode.card, caller()
    n_bytes = target.numel() * target.element_size()
    if n_bytes == 0:
        return
    up = isinstance(target, SimTensor)
    kind, host, device = ("h2d", source, target) if up else ("d2h", target, source)
    region = card.host_memory.find(host)
    slow = _why_slow(host, device, region is not None)
    if non_blocking and slow:
        card.report(
            SlowCopyError(
                f"{kind} copy of shape {tuple(target.shape)} with non_blocking=True would block "
                f"the host: {', '.join(slow)} ({site})"
            )
        )
    on_card, on_host = [(device.block, device.span)], [region] if region is not None else []
    if up:
        to_raw, from_raw = target.raw, source
    else:
        to_raw, from_raw = target, source.raw
    card.launch(
        f"{kind} copy",
        kind,
        copy_seconds(card.profile, kind, n_bytes, pinned=not slow),
        on_host if up else on_card,
        on_card if up else on_host,
        (lambda: to_raw.copy_(from_raw)) if card.values else None,
        n_bytes,
        site,
    )
    if slow or not non_blocking:
        card.drain(f"{kind} copy", site)


def _why_slow(host: torch.Tensor, device: torch.Tensor, pinned: bool) -> list[str]:
    """Return what keeps a copy from being one asynchronous transfer, empty if nothing does."""
    reasons = []
    if not pinned:
        reasons.append("the host's side is pageable")
    if host.dtype != device.dtype:
        reasons.append(f"the dtypes differ ({host.dtype} and {device.dtype})")
    if host.shape != device.shape:
        reasons.append("the shapes differ")
    elif not (host.is_contiguous() and device.is_contiguous()):
        strides = [
            [stride for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1]
            for x in (host, device)
        ]
        if strides[0] != strides[1]:
            reasons.append("the layouts differ")
        elif span_of(host).dims or 0 in strides[0]:
            reasons.append("the bytes are not contiguous")
    return reasons
