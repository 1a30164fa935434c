"""Cards as their driver and the system see them, whatever torch can do with them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload_llama.hardware import GIB
from offload_llama.machine.reading import Run, as_int, as_mib, read, read_int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that holds memory of a card; `held_bytes` is None where the driver hides it."""

    name: str
    held_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """A card as driver and system describe it, whatever torch can do with it.

    `width_max` and `generation_max` are what the card itself can do, `generation_slot` what card
    and slot can do together. The generation in use now is not here: idle links save power.
    """

    title: str
    vendor: str
    address: str = ""
    driver: str = ""
    capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    width: int | None = None
    width_max: int | None = None
    generation_slot: int | None = None
    generation_max: int | None = None
    display: bool | None = None
    programs: tuple[Program, ...] = ()


_SMI_PLACES = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
_SMI_FIELDS = (
    *("name", "pci.bus_id", "driver_version", "memory.total", "memory.used", "display_active"),
    *("pcie.link.width.current", "pcie.link.width.max", "pcie.link.gen.max"),
)
# Older drivers refuse the whole question because of these.
_SMI_NEWER_FIELDS = ("pcie.link.gen.gpumax", "compute_cap")


def nvidia_cards(root: Path, run: Run) -> list[CardFacts]:
    for tool in _SMI_PLACES:
        for fields in ((*_SMI_FIELDS, *_SMI_NEWER_FIELDS), _SMI_FIELDS):
            text = run((tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"))
            if text is not None:
                apps = run(
                    (
                        tool,
                        "--query-compute-apps=gpu_bus_id,process_name,used_memory",
                        "--format=csv,noheader,nounits",
                    )
                )
                rows = [dict(zip(fields, row, strict=False)) for row in _rows(text)]
                return [_nvidia_card(row, _rows(apps or ""), root) for row in rows]
    return []


def _rows(text: str) -> list[list[str]]:
    lines = csv.reader(text.splitlines(), skipinitialspace=True)
    return [[cell.strip() for cell in row] for row in lines if row]


def _nvidia_card(row: dict[str, str], apps: list[list[str]], root: Path) -> CardFacts:
    bus = row.get("pci.bus_id", "")
    address = _address(bus)
    programs = tuple(
        Program(name=re.split(r"[\\/]", name)[-1], held_bytes=as_mib(held))
        for card, name, held in (app for app in apps if len(app) == 3)
        if card == bus
    )
    widths = [as_int(row.get("pcie.link.width.max"))]
    # The driver's figure is that of the slot where the slot is the narrower one.
    widths.append(read_int(root / "sys/bus/pci/devices" / address / "max_link_width"))
    display = row.get("display_active", "")
    capability = re.fullmatch(r"(\d+)\.(\d+)", row.get("compute_cap", ""))
    return CardFacts(
        title=row.get("name", "NVIDIA card"),
        vendor="NVIDIA",
        address=address,
        driver=row.get("driver_version", ""),
        capability=(int(capability[1]), int(capability[2])) if capability else None,
        total_bytes=as_mib(row.get("memory.total")),
        used_bytes=as_mib(row.get("memory.used")),
        width=as_int(row.get("pcie.link.width.current")),
        width_max=max((w for w in widths if w), default=None),
        generation_slot=as_int(row.get("pcie.link.gen.max")),
        generation_max=as_int(row.get("pcie.link.gen.gpumax")),
        display={"Enabled": True, "Disabled": False}.get(display),
        programs=programs,
    )


def _address(bus: str) -> str:
    """Return the kernel's name of a card that the driver calls "00000000:01:00.0"."""
    return bus[-12:].lower()


_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
# Processors with graphics inside set some host memory apart for them, seldom this much.
_LEAST_OWN_MEMORY = 3 * GIB


def pci_cards(root: Path) -> Iterator[CardFacts]:
    """Yield the cards on the bus that are not part of the processor (Linux only)."""
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor = _VENDORS.get(read(device / "vendor"))
        # Class 3 is "display controller". Source: the PCI Code and ID Assignment Specification.
        if vendor is None or not read(device / "class").startswith("0x03"):
            continue
        total = read_int(device / "mem_info_vram_total")
        inside = device.name.startswith("0000:00:")  # on the processor's own bus
        if vendor != "NVIDIA" and (inside or (total or _LEAST_OWN_MEMORY) < _LEAST_OWN_MEMORY):
            continue
        way = [path for path in (device.resolve(), *device.resolve().parents) if _width(path)]
        yield CardFacts(
            title=_card_title(root, device, vendor),
            vendor=vendor,
            address=device.name,
            total_bytes=total,
            used_bytes=read_int(device / "mem_info_vram_used"),
            # The narrowest link on the way: cards may have a switch of their own at full width.
            width=min((_width(path) or 0 for path in way), default=None),
            width_max=read_int(device / "max_link_width"),
            generation_slot=min((g for p in way if (g := _generation(p))), default=None),
            generation_max=_generation(device),
            display=_has_display(device),
        )


def _card_title(root: Path, device: Path, vendor: str) -> str:
    about = read(root / "proc/driver/nvidia/gpus" / device.name / "information")
    match = re.search(r"^Model:\s*(.+)$", about, re.MULTILINE)
    return match[1].strip() if match else f"{vendor} card at {device.name}"


def _width(path: Path) -> int | None:
    return read_int(path / "current_link_width")


def _generation(path: Path) -> int | None:
    return _GENERATIONS.get(read(path / "max_link_speed").partition(" ")[0])


def _has_display(device: Path) -> bool | None:
    states = [read(path) for path in device.glob("drm/card*/card*-*/status")]
    return "connected" in states if states else None
