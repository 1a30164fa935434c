"""Where a simulated card stands in for `torch.cuda`."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from offload_llama.device.sim import copies, packed_ops
from offload_llama.device.sim.card import Card
from offload_llama.device.sim.cuda_api import patches
from offload_llama.device.sim.dispatch import CardMode
from offload_llama.device.sim.errors import SimError
from offload_llama.device.sim.guard import install_device_guard

# Registers their handlers; the names are used so that the imports are not mistaken for idle.
_HANDLERS = copies.copy_, packed_ops.product

# `torch.cuda` is one for the whole process, so one thread at a time, and one card, has it.
_lock = threading.RLock()
_active: list[Scope] = []


class Scope:
    """Inside, `torch.cuda` is the card and operations go to it; entered again, nothing changes.

    Outside nothing of torch is replaced. Another thread that enters waits.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        if card.executor.lazy or not card.values:
            # The first shape inference makes torch import this, which keeps `torch.cuda.Event` and
            # derives from `torch.Event`: it must meet the real ones.
            importlib.import_module("torch._dynamo.device_interface")
        self._patches = patches(card, install_device_guard())
        self._originals: list[Any] = []
        self._depth = 0
        self._mode = CardMode(card)
        self._leave_mode: Callable[..., None] = self._mode.__exit__

    def __enter__(self) -> Card:
        _lock.acquire()
        if _active and _active[-1] is not self:
            _lock.release()
            raise SimError("a scope of one simulated card was entered inside that of another")
        self._depth += 1
        if self._depth == 1:
            _active.append(self)
            self._originals = [getattr(owner, name) for owner, name, _ in self._patches]
            for owner, name, replacement in self._patches:
                setattr(owner, name, replacement)
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self._card

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._leave_mode(exc_type, exc_value, traceback)
            for (owner, name, _), original in zip(self._patches, self._originals, strict=True):
                setattr(owner, name, original)
            self._originals = []
            _active.pop()
        _lock.release()
