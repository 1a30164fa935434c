"""The operating system and the processor, and what that means for a card's memory."""

from __future__ import annotations

import contextlib
import platform
import re
from pathlib import Path

from offload_llama.hardware import format_bytes

SPILL_SETTING = "CUDA - Sysmem Fallback Policy"
_NEAR_LIMIT = 0.95


def is_wsl(release: str) -> bool:
    """Return whether a kernel's release name is that of Windows Subsystem for Linux."""
    return "microsoft" in release.lower()


def platform_name() -> str:
    """Return "Windows", "Darwin", "Linux", or "WSL" for Linux inside Windows."""
    return "WSL" if is_wsl(platform.release()) else platform.system()


def processor_name(root: Path = Path("/")) -> str:
    """Return the processor's name as its maker writes it."""
    with contextlib.suppress(OSError):
        text = (root / "proc/cpuinfo").read_text("utf-8", "replace")
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine()


def spill_warning(system: str, free_bytes: int, total_bytes: int, needed_bytes: int) -> str | None:
    """Return what to say where a driver would move device memory to host memory unasked.

    On Windows and WSL an allocation beyond the free memory does not fail; the driver moves some of
    it to host memory, and everything becomes many times slower.

    Args:
        system: from `platform_name`.
        free_bytes: free on the card.
        total_bytes: all the card has.
        needed_bytes: what a plan needs, its reserve included.
    """
    if system not in ("Windows", "WSL") or needed_bytes <= _NEAR_LIMIT * free_bytes:
        return None
    relation = "more than" if needed_bytes > free_bytes else "close to"
    setting = f'"{SPILL_SETTING}" to "Prefer No Sysmem Fallback" in the NVIDIA Control Panel'
    wsl = " of Windows, which WSL does not always follow" if system == "WSL" else ""
    return (
        f"{format_bytes(needed_bytes)} needed are {relation} the {format_bytes(free_bytes)} free "
        f"(of {format_bytes(total_bytes)}): {system}'s driver would move device memory to host "
        f"memory and slow down without an error; use a smaller --vram or --ctx, or set {setting}"
        f"{wsl}"
    )
