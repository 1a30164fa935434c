"""Bytes, operations and seconds of a run as pure functions of shapes and a card's figures."""

from __future__ import annotations

from offload_llama.cost.setup import (
    KV_BITS,
    LOSSY,
    RUNNABLE_KV,
    RUNNABLE_WEIGHTS,
    SHORT_NAMES,
    WEIGHT_BITS,
    Setup,
    n_parameters,
)
from offload_llama.cost.time import decode_seconds, prefill_seconds

__all__ = [
    "KV_BITS",
    "LOSSY",
    "RUNNABLE_KV",
    "RUNNABLE_WEIGHTS",
    "SHORT_NAMES",
    "WEIGHT_BITS",
    "Setup",
    "decode_seconds",
    "n_parameters",
    "prefill_seconds",
]
