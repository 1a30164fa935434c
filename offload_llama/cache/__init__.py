"""The KV cache: stores on the card and on the host, and the ring between them."""

from __future__ import annotations

from offload_llama.cache.kv import CacheStats, KVCache
from offload_llama.cache.step import Step
from offload_llama.geometry import Geometry

__all__ = ["CacheStats", "Geometry", "KVCache", "Step"]
