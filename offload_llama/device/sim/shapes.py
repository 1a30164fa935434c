"""The shapes an operation's results will have, inferred once for each geometry of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# Enough for a long generation, whose attention shapes change every step.
_MAX_KNOWN = 50_000

_known: dict[Any, Any] = {}


def tensors_in(x: Any) -> list[torch.Tensor]:
    """Return the tensors of a result, which may be a nest of tuples."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in tensors_in(y)]
    return []


def infer(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a call would give, as meta tensors. They are shared: never change them.

    Args:
        call: an operation or a module's function, one whose result's shape depends on nothing
            but its arguments.
        args: tensors with values or without, lists of them, and plain values.
        kwargs: plain values, or tensors.
    """
    key = (call, _geometry(tuple(args)), _geometry(tuple(kwargs.items())))
    found = _known.get(key, _known)
    if found is _known:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        with torch.inference_mode(False), torch.no_grad():
            found = call(*_as_meta(args), **{k: _as_meta(v) for k, v in kwargs.items()})
        _known[key] = found
    return found


def _geometry(x: Any) -> Any:
    kind = type(x)
    if kind is tuple or kind is list:
        return tuple([_geometry(y) for y in x])
    if isinstance(x, torch.Tensor):
        return x.size(), x.stride(), x.dtype
    # 1, 1.0 and True are equal, but give results of different dtypes.
    return kind, x


def _as_meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, (list, tuple)):
        return type(x)([_as_meta(y) for y in x])
    return x
