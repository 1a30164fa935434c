"""What the simulated card reports: mistakes that a real one would not forgive.

    SimError                 an engine mistake, or something the simulator cannot do
    ├── RaceError            two accesses to the same bytes that nothing orders
    ├── UseAfterFreeError    memory given back while queued work may still touch it
    ├── SlowCopyError        a copy meant to be asynchronous that would block the host
    └── PlacementError       an operation on tensors of different devices

They are no `RuntimeError`s, so code that survives a card's refusals does not swallow them.
"""

from __future__ import annotations


class SimError(Exception):
    """An engine mistake, or something the simulator cannot do."""


class RaceError(SimError):
    """Two accesses to the same bytes, at least one a write, that nothing orders."""


class UseAfterFreeError(SimError):
    """Memory was given back while queued work may still touch it."""


class SlowCopyError(SimError):
    """A copy with `non_blocking=True` that PyTorch would carry out as a blocking one."""


class PlacementError(SimError):
    """An operation on tensors of different devices."""
