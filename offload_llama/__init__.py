"""Llama-family models on small GPUs, with the KV cache of the running sequence in host memory.

Importing this package stays light: torch is loaded when one of the names below is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offload_llama.config import ModelConfig, RopeScaling, SamplingParams
from offload_llama.errors import (
    CacheError,
    CapacityError,
    CheckpointError,
    ConfigError,
    DeviceError,
    DoesNotFit,
    OffloadLlamaError,
    OutOfMemory,
    PromptTooLong,
    RequestError,
    TokenizerError,
)

if TYPE_CHECKING:
    from offload_llama.conversation import Conversation
    from offload_llama.llama import Llama
    from offload_llama.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CacheError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Conversation",
    "DeviceError",
    "DoesNotFit",
    "Llama",
    "ModelConfig",
    "OffloadLlamaError",
    "OutOfMemory",
    "PromptTooLong",
    "RequestError",
    "RopeScaling",
    "SamplingParams",
    "TokenizerError",
]

_LAZY = {
    "Conversation": "offload_llama.conversation",
    "LLM": "offload_llama.llm",
    "Llama": "offload_llama.llama",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
