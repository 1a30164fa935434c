"""What the computer itself says: host memory and its limits, the system, cards and their slots.

Nothing here imports torch, so that a plan answers at once and a broken torch can still be examined.
Every look is guarded: what cannot be read is None, or missing.
"""

from __future__ import annotations

from offload_llama.machine.cards import CardFacts, Program
from offload_llama.machine.facts import Facts, gather
from offload_llama.machine.memory import host_memory_available, host_memory_for_cache
from offload_llama.machine.slowdowns import findings
from offload_llama.machine.system import (
    SPILL_SETTING,
    is_wsl,
    platform_name,
    processor_name,
    spill_warning,
)

__all__ = [
    "SPILL_SETTING",
    "CardFacts",
    "Facts",
    "Program",
    "findings",
    "gather",
    "host_memory_available",
    "host_memory_for_cache",
    "is_wsl",
    "platform_name",
    "processor_name",
    "spill_warning",
]
