"""Attention of one token over keys and values in host memory, by a small native kernel."""

from offload_llama.native.api import HostAttention, Run
from offload_llama.native.attention import NativeAttention, TorchAttention, choose

__all__ = ["HostAttention", "NativeAttention", "Run", "TorchAttention", "choose"]
