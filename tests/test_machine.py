"""What the computer says of itself, read from made-up files and programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from offload_llama.machine import (
    Facts,
    Program,
    facts,
    gather,
    host_memory_for_cache,
    is_wsl,
    platform_name,
    processor_name,
    spill_warning,
    system,
)
from offload_llama.machine.reading import run_program

GIB, MIB = 2**30, 2**20


def have(monkeypatch: pytest.MonkeyPatch, available: int, total: int) -> None:
    """Let the machine have this much host memory."""
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=available, total=total)
    )


def in_a_group(root: Path, limit: int, used: int, cached: int = 0) -> None:
    """Put this process into a control group with a memory limit."""
    group = root / "sys/fs/cgroup/app"
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/app\n")
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"inactive_file {cached}\n")


# Host memory


def test_the_system_keeps_some_memory_of_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B52: 8 % of a large machine, 1 GiB of a small one."""
    have(monkeypatch, available=20 * GIB, total=32 * GIB)
    assert host_memory_for_cache(tmp_path) == 20 * GIB - round(0.08 * 32 * GIB)
    have(monkeypatch, available=5 * GIB, total=8 * GIB)
    assert host_memory_for_cache(tmp_path) == 4 * GIB


@pytest.mark.parametrize(
    ("available", "wanted"), [(GIB, 4 * GIB), (GIB, 900 * MIB), (900 * MIB, GIB)]
)
def test_memory_that_is_not_there_is_not_promised_to_a_cache(
    available: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B52: 4 GiB or 900 MiB of keys and values against 1 GiB, 1 GiB against 900 MiB."""
    have(monkeypatch, available, total=16 * GIB)
    assert 0 == host_memory_for_cache(tmp_path) < wanted


def test_a_container_s_limit_below_the_free_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B52: what the group leaves, its cached files counted as free, and a little kept back."""
    have(monkeypatch, available=20 * GIB, total=32 * GIB)
    in_a_group(tmp_path, limit=4 * GIB, used=2 * GIB, cached=GIB)
    assert host_memory_for_cache(tmp_path) == round(0.92 * 3 * GIB)


def test_a_limit_above_the_free_memory_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, available=5 * GIB, total=8 * GIB)
    in_a_group(tmp_path, limit=64 * GIB, used=0)
    assert host_memory_for_cache(tmp_path) == 4 * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, available=20 * GIB, total=32 * GIB)
    in_a_group(tmp_path, limit=GIB, used=2 * GIB)
    assert host_memory_for_cache(tmp_path) == 0


# The system


def test_wsl_is_linux_with_a_kernel_of_microsoft_s(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_wsl("5.15.153.1-microsoft-standard-WSL2") and not is_wsl("6.8.0-45-generic")
    monkeypatch.setattr(system.platform, "release", lambda: "5.15.1-Microsoft-standard")
    assert platform_name() == "WSL"
    monkeypatch.setattr(system.platform, "release", lambda: "10")
    monkeypatch.setattr(system.platform, "system", lambda: "Windows")
    assert platform_name() == "Windows"


def test_the_processor_is_named_as_linux_names_it(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Ryzen 5 5600X \n")
    assert processor_name(tmp_path) == "Ryzen 5 5600X"
    assert processor_name(tmp_path / "nowhere")


SPILL = {"free_bytes": round(10.9 * GIB), "total_bytes": 12 * GIB}


@pytest.mark.parametrize("where", ["Windows", "WSL"])
def test_a_plan_near_the_free_memory_is_warned_of_on_windows(where: str) -> None:
    """B65: total 12, free 10.9; 11.2 is too much, 10.8 is near, 9 is neither."""
    over = spill_warning(where, needed_bytes=round(11.2 * GIB), **SPILL)
    near = spill_warning(where, needed_bytes=round(10.8 * GIB), **SPILL)
    assert over is not None and "11.20 GiB needed are more than the 10.90 GiB free" in over
    assert near is not None and "10.80 GiB needed are close to the 10.90 GiB free" in near
    for text in (over, near):
        assert "CUDA - Sysmem Fallback Policy" in text and "of 12 GiB" in text
        assert ("WSL does not always follow" in text) == (where == "WSL")
        assert "\n" not in text
    assert spill_warning(where, needed_bytes=9 * GIB, **SPILL) is None


def test_no_spill_is_feared_where_an_allocation_fails_instead() -> None:
    assert spill_warning("Linux", needed_bytes=12 * GIB, **SPILL) is None


# Programs that are asked

SMI_ROW = (
    "NVIDIA GeForce RTX 3060, 00000000:01:00.0, 560.35.03, 12288, 1400, Enabled, 4, 8, 3, 4, 8.6\n"
)
APPS = (
    "00000000:01:00.0, C:\\Program Files\\game.exe, 900\n"
    "00000000:01:00.0, /usr/bin/blender, [N/A]\n"
    "00000000:02:00.0, other, 5\n"
)


def programs(answers: dict[str, str | None]) -> Callable[[Sequence[str]], str | None]:
    """Return what runs programs, answering by the first key that is found in a command."""

    def run(command: Sequence[str]) -> str | None:
        line = " ".join(command)
        return next((answer for key, answer in answers.items() if key in line), None)

    return run


def test_the_driver_s_tool_is_read_whole(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "max_link_width").write_text("16\n")
    run = programs({"--query-compute-apps": APPS, "nvidia-smi --query-gpu": SMI_ROW})
    [card] = gather(tmp_path, run).cards
    assert (card.title, card.vendor, card.address) == (
        *("NVIDIA GeForce RTX 3060", "NVIDIA", "0000:01:00.0"),
    )
    assert (card.driver, card.capability) == ("560.35.03", (8, 6))
    assert (card.total_bytes, card.used_bytes) == (12 * GIB, 1400 * MIB)
    assert (card.width, card.width_max) == (4, 16)  # 8 is what the slot allows
    assert (card.generation_slot, card.generation_max) == (3, 4)
    assert card.display is True
    assert card.programs == (
        Program(name="game.exe", held_bytes=900 * MIB),
        Program(name="blender", held_bytes=None),
    )


def test_an_older_driver_is_asked_for_less(tmp_path: Path) -> None:
    row = "Tesla T4, 00000000:00:04.0, 470.1, 15360, 0, [N/A], [Not Supported], 16, 3\n"
    [card] = gather(
        tmp_path, programs({"gpumax": None, "compute-apps": None, "nvidia-smi": row})
    ).cards
    assert card.title == "Tesla T4" and card.capability is None and card.programs == ()
    assert card.width is None and card.width_max == 16
    assert card.generation_slot == 3 and card.generation_max is None
    assert card.display is None


def test_wsl_s_driver_is_found_in_its_own_folder(tmp_path: Path) -> None:
    run = programs({"/usr/lib/wsl/lib/nvidia-smi --query-gpu": SMI_ROW})

    def only_there(command: Sequence[str]) -> str | None:
        return run(command) if command[0].startswith("/usr") else None

    [card] = gather(tmp_path, only_there).cards
    assert card.title == "NVIDIA GeForce RTX 3060"


def test_output_that_makes_no_sense_gives_no_more_than_a_card(tmp_path: Path) -> None:
    [card] = gather(tmp_path, programs({"nvidia-smi": "what?\n"})).cards
    assert card.title == "what?" and card.total_bytes is None and card.width is None


# Files that are read


def pci(root: Path, address: str, **files: str) -> Path:
    """Put a display controller on the bus."""
    device = root / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    for name, text in {"class": "0x030000", **files}.items():
        (device / name).write_text(f"{text}\n")
    return device


def nothing(command: Sequence[str]) -> None:
    """No program is here."""


def test_a_card_is_seen_on_the_bus_without_any_tool(tmp_path: Path) -> None:
    pci(tmp_path, "0000:01:00.0", vendor="0x10de", max_link_width="16", current_link_width="8")
    about = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    about.mkdir(parents=True)
    (about / "information").write_text("Model: \t NVIDIA GeForce GTX 1080\nIRQ: 5\n")
    [card] = gather(tmp_path, nothing).cards
    assert (card.title, card.width, card.width_max) == ("NVIDIA GeForce GTX 1080", 8, 16)


def test_a_card_behind_its_own_switch_is_as_fast_as_the_slot(tmp_path: Path) -> None:
    """AMD's cards show full width at the chip, whatever the slot gives."""
    slot = tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    chip = slot / "0000:01:00.0/0000:02:00.0/0000:03:00.0"
    chip.mkdir(parents=True)
    for folder, width, speed in ((slot, 4, "8.0"), (chip, 16, "16.0")):
        (folder / "current_link_width").write_text(f"{width}\n")
        (folder / "max_link_speed").write_text(f"{speed} GT/s PCIe\n")
    (chip / "max_link_width").write_text("16\n")
    (chip / "class").write_text("0x030000\n")
    (chip / "vendor").write_text("0x1002\n")
    (chip / "mem_info_vram_total").write_text(f"{12 * GIB}\n")
    (chip / "mem_info_vram_used").write_text(f"{GIB}\n")
    (chip / "drm/card0/card0-DP-1").mkdir(parents=True)
    (chip / "drm/card0/card0-DP-1/status").write_text("connected\n")
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:03:00.0").symlink_to(chip)
    [card] = gather(tmp_path, nothing).cards
    assert (card.vendor, card.width, card.width_max) == ("AMD", 4, 16)
    assert (card.generation_slot, card.generation_max) == (3, 4)
    assert (card.total_bytes, card.used_bytes, card.display) == (12 * GIB, GIB, True)


def test_graphics_inside_the_processor_is_no_card(tmp_path: Path) -> None:
    pci(tmp_path, "0000:00:02.0", vendor="0x8086")
    pci(tmp_path, "0000:05:00.0", vendor="0x1002", mem_info_vram_total=str(512 * MIB))
    pci(tmp_path, "0000:06:00.0", vendor="0x1af4")
    pci(tmp_path, "0000:07:00.0", vendor="0x10de", **{"class": "0x040300"})
    assert gather(tmp_path, nothing).cards == ()


def test_one_card_is_not_seen_twice(tmp_path: Path) -> None:
    pci(tmp_path, "0000:01:00.0", vendor="0x10de")
    assert len(gather(tmp_path, programs({"nvidia-smi --query-gpu": SMI_ROW})).cards) == 1


# Memory modules

FIRMWARE = """Memory Device
\tSize: 16 GB
\tLocator: DIMM_A2
\tSpeed: 3200 MT/s

Memory Device
\tSize: No Module Installed
\tSpeed: Unknown

Memory Device
\tSize: 8192 MB
\tSpeed: Unknown
"""


def test_memory_modules_are_read_from_the_firmware(tmp_path: Path) -> None:
    """A virtual machine's module has no speed and says nothing."""
    assert gather(tmp_path, programs({"dmidecode": FIRMWARE})).module_bytes == (16 * GIB,)


def test_memory_modules_are_read_from_the_kernel_s_error_counters(tmp_path: Path) -> None:
    for name, size in (("dimm0", 16384), ("dimm1", 0), ("dimm2", 16384)):
        folder = tmp_path / "sys/devices/system/edac/mc/mc0" / name
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    assert gather(tmp_path, nothing).module_bytes == (16 * GIB, 16 * GIB)


@pytest.mark.parametrize(
    ("printed", "sizes"),
    [
        ('{"Capacity": 17179869184, "Speed": 3200}', (16 * GIB,)),
        ('[{"Capacity": 8589934592, "Speed": 2666}, {"Capacity": 8589934592, "Speed": 2666}]', 2),
        ('{"Capacity": 17179869184, "Speed": 0}', ()),
        ("Get-CimInstance : not here", ()),
        ("[1]", ()),
    ],
)
def test_memory_modules_are_read_from_windows(
    printed: str, sizes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "platform_name", lambda: "Windows")
    found = gather(tmp_path, programs({"Win32_PhysicalMemory": printed})).module_bytes
    assert found == ((8 * GIB,) * 2 if sizes == 2 else sizes)


def test_nothing_to_be_read_is_no_error(tmp_path: Path) -> None:
    assert gather(tmp_path, nothing) == Facts(system=platform_name())
    assert gather().system == platform_name()


def test_a_program_that_is_missing_or_fails_says_nothing() -> None:
    assert run_program(("no-such-program-here",)) is None
    assert run_program((sys.executable, "-c", "print(1); raise SystemExit(3)")) is None
    assert run_program((sys.executable, "-c", "print(1)")) == "1\n"
