"""Carries out PyTorch's operations on the simulated card.

Inside a scope every ATen operation comes through `CardMode`. One that touches the card is sized
from its operands, checked against everything queued before, put on the clock, and computed by the
CPU's kernel on the tensors behind. Operations on host tensors run as they are, after a check of
the pinned memory they touch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload_llama.device.sim.card import Card
from offload_llama.device.sim.errors import PlacementError, SimError
from offload_llama.device.sim.schemas import OpInfo, info_of, known_infos, unwrap
from offload_llama.device.sim.shapes import infer, tensors_in
from offload_llama.device.sim.site import Site, caller
from offload_llama.device.sim.spans import Span, span_of
from offload_llama.device.sim.tensor import SimTensor
from offload_llama.device.sim.timing import (
    ATTENTION,
    GATHERS,
    SCATTERS,
    copy_seconds,
    host_attention_seconds,
    kernel_seconds,
)

aten = torch.ops.aten


def _poison(raw: torch.Tensor) -> None:
    if raw.dtype.is_floating_point:
        raw.fill_(float("nan"))
    elif raw.dtype is not torch.bool and not raw.dtype.is_complex:
        raw.fill_(torch.iinfo(raw.dtype).max // 2)


class CardMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Sends operations to one card while it is the innermost mode."""

    def __init__(self, card: Card) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.card = card

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info = known_infos.get(func) or info_of(func)
        if info.handler is not None:
            return info.handler(self, func, args, kwargs)
        sims: list[SimTensor] = []
        hosts: list[torch.Tensor] = []
        raw_args = [unwrap(x, sims, hosts) for x in args]
        raw_kwargs = {k: unwrap(x, sims, hosts) for k, x in kwargs.items()}
        device = raw_kwargs.get("device")
        if device is not None and torch.device(device).type != "cuda":
            return self.on_host(func, info, raw_args, raw_kwargs, hosts)
        if not sims and device is None:
            return self.on_host(func, info, raw_args, raw_kwargs, hosts)
        if device is not None:
            raw_kwargs["device"] = "cpu" if self.card.values else "meta"
            raw_kwargs.pop("pin_memory", None)
            if not sims:
                return self._create(func, info, raw_args, raw_kwargs)
        for x in sims:
            if x.block.memory is not self.card.memory:
                raise PlacementError(f"{info.name} on a tensor of another simulated card")
        if hosts:
            self._place(info, sims, hosts)
        if info.is_view:
            return self._view(func(*raw_args, **raw_kwargs), sims[0])
        if info.waits or self._has_mask(info, raw_args):
            return self._wait_for(func, info, raw_args, raw_kwargs, sims)
        if info.writes:
            self._write(func, info, raw_args, raw_kwargs, sims, args, kwargs)
            targets = [args[i] if i < len(args) else kwargs[name] for i, name in info.writes]
            return targets[0] if len(targets) == 1 else tuple(targets)
        return self.compute(func, info.name, raw_args, raw_kwargs, sims)

    # Out of place

    def compute(
        self,
        call: Callable[..., Any],
        name: str,
        raw_args: Sequence[Any],
        raw_kwargs: dict[str, Any],
        sims: Sequence[SimTensor],
    ) -> Any:
        """Queue an operation that makes new tensors, and return them."""
        card, site = self.card, caller()
        action: Callable[[], object] | None = None
        if not card.values:
            results = self.new_from(infer(call, raw_args, raw_kwargs), site)
        elif not card.executor.lazy:
            results = self.new_from(call(*raw_args, **raw_kwargs), site)
        else:
            results = self.new_like(infer(call, raw_args, raw_kwargs), site)
            # Only the memory behind is kept until then: the blocks may be freed before.
            raws = [x.raw for x in tensors_in(results) if isinstance(x, SimTensor)]

            def action() -> None:
                for raw, value in zip(raws, tensors_in(call(*raw_args, **raw_kwargs)), strict=True):
                    raw.copy_(value)

        outs = [x for x in tensors_in(results) if isinstance(x, SimTensor)]
        spans = [x.span for x in outs]
        in_spans = [x.span for x in sims]
        card.launch(
            name,
            "compute",
            kernel_seconds(
                card.profile, name, raw_args, in_spans, spans, outs[0] if outs else None
            ),
            [(x.block, x.span) for x in sims],
            [(x.block, x.span) for x in outs],
            action,
            sum([span.nbytes for span in spans]),
            site,
        )
        return results

    def new_from(self, raws: Any, site: Site) -> Any:
        """Return tensors on the card around results, each in a block of its own."""
        if isinstance(raws, torch.Tensor):
            span = span_of(raws)
            return SimTensor(
                raws, self.card.memory.allocate(span.hi, self.card.current.actor, site), span
            )
        if isinstance(raws, (list, tuple)):
            return tuple([self.new_from(x, site) for x in raws])
        return raws

    def new_like(self, shapes: Any, site: Site) -> Any:
        """Return uninitialised tensors on the card, as the meta tensors (or nests of them) say."""
        if isinstance(shapes, (list, tuple)):
            return tuple([self.new_like(x, site) for x in shapes])
        if not isinstance(shapes, torch.Tensor):
            return shapes
        card, span = self.card, span_of(shapes)
        block = card.memory.allocate(span.hi, card.current.actor, site)
        size, stride, dtype = shapes.size(), shapes.stride(), shapes.dtype
        if not card.values:
            raw = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        elif not card.executor.lazy:
            raw = torch.empty_strided(size, stride, dtype=dtype)
            _poison(raw)
        else:
            with torch.inference_mode(False):
                flat = card.memory.flat_memory(block)
                n_bytes = span.hi // dtype.itemsize * dtype.itemsize
                raw = flat[:n_bytes].view(dtype).as_strided(size, stride)
            if not any(a.freed for a in block.log):
                # Else someone may still read it, and only the engine's own writes may hurt.
                card.executor.add(card.current.queue, lambda: _poison(raw))
        return SimTensor(raw, block, span)

    def _create(
        self, func: Any, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> SimTensor:
        """Return a new tensor of a factory; its size is known before its memory is taken."""
        card, site = self.card, caller()
        on_meta = {**kwargs, "device": "meta"}
        if "generator" in on_meta:
            on_meta["generator"] = None
        result: SimTensor = self.new_like(func(*args, **on_meta), site)
        if not info.name.startswith("empty"):
            raw, n_bytes = result.raw, result.span.nbytes
            card.launch(
                info.name,
                "compute",
                kernel_seconds(card.profile, info.name, (), [], [result.span], None),
                [],
                [(result.block, result.span)],
                (lambda: raw.copy_(func(*args, **kwargs))) if card.values else None,
                n_bytes,
                site,
            )
        return result

    def _view(self, raws: Any, base: SimTensor) -> Any:
        if torch.is_inference_mode_enabled() and not base.is_inference():
            # PyTorch wants views of ordinary tensors to be ordinary ones.
            with torch.inference_mode(False):
                return self._view(raws, base)
        if isinstance(raws, torch.Tensor):
            return SimTensor(raws, base.block)
        return tuple([SimTensor(raw, base.block) for raw in raws])

    # In place

    def _write(
        self,
        func: Any,
        info: OpInfo,
        raw_args: Sequence[Any],
        raw_kwargs: dict[str, Any],
        sims: Sequence[SimTensor],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        targets: list[Any] = []
        for i, name in info.writes:
            target = args[i] if i < len(args) else kwargs[name]
            targets += target if isinstance(target, (list, tuple)) else [target]
        for target in targets:
            if not isinstance(target, SimTensor):
                raise PlacementError(f"{info.name} would write to a host tensor ({caller()})")
        if info.name in ("set_", "resize_"):
            raise SimError(f"{info.name} changes a tensor's memory, which is not simulated")
        ids = {id(target) for target in targets}
        reads = [x for x in sims if not (info.overwrites and id(x) in ids)]
        sizes = [target.raw.size() for target in targets]
        written = [(x.block, x.span) for x in targets]
        seconds = kernel_seconds(
            self.card.profile,
            info.name,
            raw_args,
            [x.span for x in reads],
            [x.span for x in targets],
            targets[0],
        )
        self.card.launch(
            info.name,
            "compute",
            seconds,
            [(x.block, x.span) for x in reads],
            written,
            (lambda: func(*raw_args, **raw_kwargs)) if self.card.values else None,
            sum(x.span.nbytes for x in targets),
            caller(),
        )
        if info.is_out and [target.raw.size() for target in targets] != sizes:
            raise SimError(f"{info.name} would resize its out= tensor ({caller()})")

    # Results the host needs

    def _has_mask(self, info: OpInfo, raw_args: Sequence[Any]) -> bool:
        return info.name in ("index", "index_put_", "index_put") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in raw_args[1]
        )

    def _wait_for(
        self,
        func: Any,
        info: OpInfo,
        raw_args: Sequence[Any],
        raw_kwargs: dict[str, Any],
        sims: Sequence[SimTensor],
    ) -> Any:
        card, site = self.card, caller()
        reads = [(x.block, x.span) for x in sims]
        seconds = kernel_seconds(
            card.profile, info.name, raw_args, [x.span for x in sims], [], None
        )
        writes = reads[:1] if info.writes else []
        card.launch(info.name, "compute", seconds, reads, writes, None, 0, site)
        card.drain(info.name, site)
        if card.values:
            result = func(*raw_args, **raw_kwargs)
            return sims[0] if info.writes else self.new_from(result, site)
        if info.name == "_local_scalar_dense":
            return torch.zeros((), dtype=sims[0].dtype).item()
        if info.name in ("equal", "allclose", "is_nonzero"):
            return info.name != "is_nonzero"
        raise SimError(f"{info.name} needs values, but this card keeps only shapes ({site})")

    def _place(self, info: OpInfo, sims: list[SimTensor], hosts: list[torch.Tensor]) -> None:
        """Accept host scalars, and host indices (which a card fetches first, waiting)."""
        site = caller()
        for host in hosts:
            if host.dim() == 0:
                continue
            if info.name not in GATHERS and info.name not in SCATTERS and info.name != "index_put":
                raise PlacementError(
                    f"{info.name} mixes the card with a host tensor of shape {tuple(host.shape)} "
                    f"({site})"
                )
            n_bytes = host.numel() * host.element_size()
            seconds = copy_seconds(self.card.profile, "h2d", n_bytes, pinned=False)
            self.card.launch("copy of indices", "h2d", seconds, [], [], None, n_bytes, site)
            self.card.drain("copy of indices", site)

    # On the host

    def on_host(
        self,
        func: Any,
        info: OpInfo,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        hosts: Sequence[torch.Tensor],
    ) -> Any:
        """Run an operation on host tensors, after a check of the pinned ones."""
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
            return self.new_pinned(func(*args, **kwargs))
        memory = self.card.host_memory
        if memory and not info.is_view:
            written = {id(args[i] if i < len(args) else kwargs[n]) for i, n in info.writes}
            for host in hosts:
                found = memory.find(host)
                if found is not None:
                    self.card.host_access(*found, id(host) in written, info.name)
        if info.name in ATTENTION:
            if args[1].shape[-2] == 0:
                raise SimError(f"attention over no keys would kill the process ({caller()})")
            spans: list[Span] = [span_of(x) for x in args[:3]]
            self.card.clock.host_s += host_attention_seconds(self.card.profile, spans)
        return func(*args, **kwargs)

    def new_pinned(self, values: torch.Tensor) -> torch.Tensor:
        """Return a contiguous pinned copy of a host tensor.

        Raises:
            torch.AcceleratorError: the platform refuses to pin it.
        """
        flat = self.card.host_memory.pinned_empty(values.numel() * values.element_size())
        if flat is None:
            raise torch.AcceleratorError("CUDA error: out of memory")
        pinned = flat.view(values.dtype).view(values.shape)
        return pinned.copy_(values) if self.card.values else pinned


# The base class would wrap this to keep torch.compile out, which imports its compiler (seconds)
# and costs a few microseconds an operation; nothing here is ever compiled.
CardMode.__torch_dispatch__ = CardMode.dispatch  # type: ignore[method-assign, assignment]  # see above
