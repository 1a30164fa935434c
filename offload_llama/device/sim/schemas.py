"""What each ATen operation does to its arguments, read from its schema once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload_llama.device.sim.tensor import SimTensor

# Aliases that the schemas do not declare.
_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "detach", "alias", "lift_fresh"})
# Their result depends on values, so the host waits for them on a card.
_WAITING = frozenset(
    {
        "_local_scalar_dense",
        "equal",
        "allclose",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "multinomial",
        "bincount",
    }
)
# In-place operations that do not read what they overwrite.
_OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "set_"}
)

# (the mode, the operation, its arguments) -> its result
Handler = Callable[[Any, Any, Sequence[Any], dict[str, Any]], Any]


class OpInfo:
    """What the schema of one operation says about it, looked up once."""

    __slots__ = ("handler", "is_out", "is_view", "name", "overwrites", "waits", "writes")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name: str = schema.name.split("::")[1]
        self.handler: Handler | None = None
        self.writes = [
            (i, argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.is_out = any(a.is_out for a in schema.arguments)
        returns_alias = any(r.alias_info is not None for r in schema.returns)
        self.is_view = self.name in _VIEWS or (returns_alias and not self.writes)
        self.overwrites = self.name in _OVERWRITES or self.is_out
        self.waits = self.name in _WAITING


known_infos: dict[Any, OpInfo] = {}


def info_of(func: Any) -> OpInfo:
    """Return what is known about an operation."""
    info = known_infos.get(func)
    if info is None:
        info = known_infos[func] = OpInfo(func)
    return info


def handles(func: Any) -> Callable[[Handler], Handler]:
    """Register a function of its own for one operation."""

    def register(handler: Handler) -> Handler:
        info_of(func).handler = handler
        return handler

    return register


def unwrap(x: Any, sims: list[SimTensor], hosts: list[torch.Tensor]) -> Any:
    """Return an argument with the tensors behind, noting simulated and host tensors."""
    kind = type(x)
    if kind is SimTensor:
        sims.append(x)
        return x.raw
    if kind is list or kind is tuple:
        return kind([unwrap(y, sims, hosts) for y in x])
    if isinstance(x, torch.Tensor):
        hosts.append(x)
    return x
