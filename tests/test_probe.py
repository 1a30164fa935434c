"""Measuring a simulated card gives back its figures; the CPU is measured as far as it goes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from offload_llama import probe as probe_module
from offload_llama.device import PinRefused, open_device
from offload_llama.device.cuda import CudaDevice
from offload_llama.device.figures import card_title, preset_of, profile_of
from offload_llama.device.sim import SimulatedDevice, simulated
from offload_llama.hardware import HardwareProfile, card
from offload_llama.probe import pin_attempts, pin_figures, probe, try_in_a_child
from offload_llama.profiles import RATES, apply, key_of, measured_now, save_measured

GIB, MIB = 2**30, 2**20
NO_CHILD = {"tried_pin_bytes": 3 * GIB}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("OFFLOAD_LLAMA_CACHE_DIR", str(tmp_path / "cache"))


def shapes_only(name: str) -> SimulatedDevice:
    """Return a card whose tensors cost no memory."""
    return simulated(name, values=False)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "rtx-3060-12gb",
        "rtx-2060",
        "rx-9060-xt-8gb",
        "rtx-3060-12gb?h2d=3e9&d2h=5e9&dram=21e9&cpu_attention=7e9&mem=100e9&pageable=0.9",
    ],
)
def test_the_figures_of_a_simulated_card_come_out_within_5_percent(name: str, quick: bool) -> None:
    device = shapes_only(name)
    measured, profile = probe(device, quick=quick), device.card.profile
    for field in (*RATES, "pageable_factor", "context_bytes"):
        value = measured.value(field)
        assert value == pytest.approx(getattr(profile, field), rel=0.05), field
    for way in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
        expected = getattr(profile, way) * profile.pageable_factor
        assert measured.value(f"pageable_{way}") == pytest.approx(expected, rel=0.05)
    assert measured.value("max_pin_bytes") is None
    device.close()


def test_a_card_with_values_measures_the_same_as_one_without() -> None:
    """The clock alone counts; a smaller card keeps the products small."""
    options: dict[str, Any] = {"vram_bytes": 900 * MIB, "context_bytes": 0}
    with_values = probe_link(simulated("rtx-3060-12gb", **options))
    assert with_values == pytest.approx(probe_link(shapes_only("rtx-3060-12gb")), rel=0.02)


def probe_link(device: SimulatedDevice) -> dict[str, float]:
    """Return the link's rates alone."""
    return probe_module._link(device, True, 1)


def test_nothing_is_left_behind_on_the_card_or_pinned() -> None:
    device = shapes_only("rtx-3060-12gb")
    probe(device, quick=True)
    assert device.memory().allocated_bytes == 0
    assert device.card.pinned_bytes == 0
    assert device.card.errors == []


def test_measured_figures_make_the_profile_they_came_from() -> None:
    device = shapes_only("rtx-3060-12gb?h2d=11e9&mem=300e9")
    changed = apply(card("rtx-3060-12gb"), probe(device, quick=True))
    assert changed.h2d_bytes_per_s == pytest.approx(11e9, rel=0.05)
    assert changed.mem_bytes_per_s == pytest.approx(300e9, rel=0.05)


def test_the_cpu_has_only_the_host_s_rates() -> None:
    values = probe(open_device("cpu"), quick=True).values()
    assert sorted(values) == ["cpu_attention_bytes_per_s", "host_dram_bytes_per_s"]
    assert all(1e7 < rate < 1e13 for rate in values.values())


def test_buffers_stay_small_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "host_memory_available", lambda: 64 * MIB)
    largest = 0
    real = torch.ones

    def ones(*size: Any, **options: Any) -> torch.Tensor:
        nonlocal largest
        made = real(*size, **options)
        largest = max(largest, made.nbytes)
        return made

    monkeypatch.setattr(torch, "ones", ones)
    assert "host_dram_bytes_per_s" in probe(open_device("cpu")).values()
    assert 0 < largest <= 8 * MIB


def test_a_computer_without_free_memory_is_still_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over no keys at all would kill the process."""
    monkeypatch.setattr(probe_module, "host_memory_available", lambda: 0)
    assert len(probe(shapes_only("rtx-3060-12gb"), quick=True).values()) > 8


def test_without_page_locking_the_pageable_rates_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    """B31: a platform that refuses every page-locked byte is still measured."""
    device = shapes_only("rtx-3060-12gb")
    device.card.refuse_pins_after(0, pinned_empty=True)
    values = probe(device, quick=True).values()
    assert "h2d_bytes_per_s" not in values and "pageable_factor" not in values
    assert values["pageable_h2d_bytes_per_s"] == pytest.approx(0.55 * 24e9, rel=0.05)
    assert values["max_pin_bytes"] == 0
    assert device.card.errors == []


def test_a_pinned_buffer_serves_where_existing_memory_is_refused() -> None:
    device = shapes_only("rtx-3060-12gb")
    device.card.refuse_pins_after(0)
    values = probe(device, quick=True).values()
    assert values["h2d_bytes_per_s"] == pytest.approx(24e9, rel=0.05)


# The largest page-locked memory


@pytest.mark.parametrize("limit_mib", [100, 700, 1500, 2048, 5000])
def test_the_largest_pin_is_found_to_an_eighth(limit_mib: int) -> None:
    device = shapes_only("rtx-3060-12gb")
    device.card.refuse_pins_after(limit_mib * MIB)
    found = pin_figures(pin_attempts(device, 16 * GIB))
    largest = found["max_pin_bytes"]
    assert largest <= limit_mib * MIB < largest + max(64 * MIB, largest / 8) + MIB
    assert found["tried_pin_bytes"] == largest
    assert device.card.pinned_bytes == 0


def test_more_than_the_limit_is_never_tried() -> None:
    device = shapes_only("rtx-3060-12gb")
    announced: list[int] = []
    sizes = [size for size, _ in pin_attempts(device, 300 * MIB, announced.append)]
    assert sizes == announced == [64 * MIB, 128 * MIB, 256 * MIB, 300 * MIB]
    assert pin_figures(pin_attempts(device, 300 * MIB)) == {"tried_pin_bytes": 300 * MIB}
    assert list(pin_attempts(device, 10 * MIB)) == []


def test_what_is_tried_is_a_share_of_the_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_module, "host_memory_for_cache", lambda: 600 * MIB)
    assert probe(shapes_only("rtx-3060-12gb")).value("tried_pin_bytes") == 300 * MIB


def test_a_second_process_tries_for_the_first() -> None:
    device = open_device("sim:rtx-3060-12gb")
    found = try_in_a_child(device, 200 * MIB, 120.0)
    assert found == {"context_bytes": 0, "tried_pin_bytes": 200 * MIB}


def run_as_child(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the second process run this instead."""
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr(probe_module.subprocess, "Popen", popen)


READY = "import os, sys, time\nprint('ready', 7, flush=True)\nsys.stdin.readline()\n"
TRIES = "print('trying', 100, flush=True)\nprint('pinned', flush=True)\n"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("print('trying', 200, flush=True); os.abort()", {"tried": 100, "limit": 100}),
        ("print('trying', 200, flush=True); print('refused')", {"tried": 100, "limit": 100}),
        ("print('trying', 200, flush=True); time.sleep(600)", {"tried": 100}),
        ("", {"tried": 100}),
    ],
    ids=["dies", "is refused", "hangs", "ends"],
)
def test_a_child_that_dies_has_met_the_limit_and_one_that_hangs_has_not(
    end: str, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as_child(READY + TRIES + end, monkeypatch)
    found = try_in_a_child(open_device("sim:rtx-3060-12gb"), 2**20, 3.0)
    assert found["tried_pin_bytes"] == expected["tried"]
    assert found.get("max_pin_bytes") == expected.get("limit")


def test_a_child_that_never_starts_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as_child("raise SystemExit('no card')", monkeypatch)
    assert try_in_a_child(open_device("sim:rtx-3060-12gb"), 2**20, 20.0) == {}


def test_the_context_is_what_disappears_while_the_child_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Free memory falls from 1000 to 600 bytes, of which the child's allocator holds 7."""
    run_as_child(READY, monkeypatch)
    free: Iterator[int] = iter((1000, 600))
    device = SimpleNamespace(name="cuda:0", memory=lambda: SimpleNamespace(free_bytes=next(free)))
    assert try_in_a_child(device, 2**20, 20.0) == {"context_bytes": 393}  # type: ignore[arg-type]


def test_a_real_card_is_tried_in_a_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    device = shapes_only("rtx-3060-12gb")
    asked: list[tuple[int, float]] = []

    def child(device: Any, limit_bytes: int, patience_s: float) -> dict[str, float]:
        asked.append((limit_bytes, patience_s))
        return dict(NO_CHILD)

    monkeypatch.setattr(device, "simulated", False, raising=False)
    monkeypatch.setattr(probe_module, "try_in_a_child", child)
    monkeypatch.setattr(probe_module, "host_memory_for_cache", lambda: 64 * GIB)
    assert probe_module._context_and_pins(device, True) == NO_CHILD
    assert probe_module._context_and_pins(device, False) == NO_CHILD
    assert asked == [(GIB, 8.0), (16 * GIB, 30.0)]


# Whose figures they are


def test_a_device_is_called_by_its_driver_s_name_and_has_its_preset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = shapes_only("rtx-3060-12gb?vram=8GiB")
    assert card_title(device) == "sim:rtx-3060-12gb?vram=8GiB"
    assert preset_of(device) is device.card.profile is profile_of(device)
    cpu = open_device("cpu")
    assert card_title(cpu) == "cpu" and preset_of(cpu) is None and profile_of(cpu) is None


def test_a_real_card_s_profile_holds_what_was_measured_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    title = "NVIDIA GeForce RTX 3060"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: title)
    monkeypatch.setattr(
        CudaDevice, "memory", lambda self: SimpleNamespace(total_bytes=round(11.76 * GIB))
    )
    device = object.__new__(CudaDevice)
    device.name, device.torch_device = "cuda:0", torch.device("cuda", 0)
    preset: HardwareProfile | None = preset_of(device)
    assert preset == card("rtx-3060-12gb") == profile_of(device)
    save_measured(key_of(title), measured_now({"h2d_bytes_per_s": 6e9}))
    known = profile_of(device)
    assert known is not None and known.h2d_bytes_per_s == 6e9
    assert known.mem_bytes_per_s == preset.mem_bytes_per_s


def test_memory_that_the_system_cannot_even_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(fileno: int, size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(probe_module.mmap, "mmap", none_left)
    found = pin_figures(pin_attempts(shapes_only("rtx-3060-12gb"), GIB))
    assert found == {"tried_pin_bytes": 0, "max_pin_bytes": 0}


def test_a_card_that_can_page_lock_nothing_existing_has_a_limit_of_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with XPU cards, for which PyTorch has no such call."""
    device = shapes_only("rtx-3060-12gb")

    def refuse(memory: torch.Tensor) -> None:
        raise PinRefused("no call for it")

    monkeypatch.setattr(device, "register", refuse)
    assert pin_figures(pin_attempts(device, GIB))["max_pin_bytes"] == 0


def test_the_machine_s_memory_is_read_and_not_guessed() -> None:
    assert key_of("x").endswith(f"{round(psutil.virtual_memory().total / GIB)} GiB")
