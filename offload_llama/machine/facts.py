"""What a computer is made of, gathered in one place."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from offload_llama.machine.cards import CardFacts, nvidia_cards, pci_cards
from offload_llama.machine.reading import Run, read_int, run_program
from offload_llama.machine.system import platform_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A computer: its system, its cards, and the sizes of its memory modules where readable."""

    system: str
    cards: tuple[CardFacts, ...] = ()
    module_bytes: tuple[int, ...] = ()


def gather(root: Path = Path("/"), run: Run | None = None) -> Facts:
    """Return the facts of this computer.

    Args:
        root: where `proc` and `sys` are, for tests.
        run: how programs are asked, for tests.
    """
    ask = run or run_program
    cards = nvidia_cards(root, ask)
    known = {card.address for card in cards}
    others = [card for card in pci_cards(root) if card.address not in known]
    if cards:  # the driver's tool lists every card of its own
        others = [card for card in others if card.vendor != "NVIDIA"]
    return Facts(
        system=platform_name(),
        cards=(*cards, *others),
        module_bytes=tuple(_memory_modules(root, ask)),
    )


_POWERSHELL = (
    "powershell",
    "-NoProfile",
    "-Command",
    "Get-CimInstance Win32_PhysicalMemory | Select-Object Capacity,Speed | ConvertTo-Json",
)


def _memory_modules(root: Path, run: Run) -> list[int]:
    """Return the bytes of each memory module, nothing where the system does not say."""
    if platform_name() == "Windows":
        return _modules_of_windows(run(_POWERSHELL) or "")
    if text := run(("dmidecode", "-t", "17")):  # which only the administrator may
        return _modules_of_firmware(text)
    sizes = [read_int(path) for path in root.glob("sys/devices/system/edac/mc/mc*/dimm*/size")]
    return [size * 2**20 for size in sizes if size]


def _modules_of_windows(text: str) -> list[int]:
    try:
        found = json.loads(text)
        modules = found if isinstance(found, list) else [found]
        return [int(each["Capacity"]) for each in modules if each["Speed"]]
    except (ValueError, KeyError, TypeError):
        return []


def _modules_of_firmware(text: str) -> list[int]:
    """Return the modules that `dmidecode` lists; those of virtual machines have no speed."""
    units = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
    sizes = []
    for block in text.split("\n\n"):
        size = re.search(r"^\s*Size: (\d+) ([KMGT]B)$", block, re.MULTILINE)
        if size and re.search(r"^\s*Speed: \d+ M", block, re.MULTILINE):
            sizes.append(int(size[1]) * units[size[2]])
    return sizes
