"""What slows a computer down is found in its facts, and each sentence names what helps."""

from __future__ import annotations

from typing import Any

import pytest

from offload_llama.hardware import card
from offload_llama.machine import CardFacts, Facts, Program, findings

GIB, MIB = 2**30, 2**20
CARD = CardFacts(
    title="NVIDIA GeForce RTX 3060",
    vendor="NVIDIA",
    driver="580.65",
    capability=(8, 6),
    total_bytes=12 * GIB,
    used_bytes=300 * MIB,
    width=16,
    width_max=16,
    generation_slot=4,
    generation_max=4,
    display=False,
)


def with_card(**changes: Any) -> Facts:
    """Return a Linux computer whose only card is an RTX 3060 with these differences."""
    values = {name: getattr(CARD, name) for name in CARD.__slots__}
    return Facts(system="Linux", cards=(CardFacts(**{**values, **changes}),))


def found(facts: Facts, **more: Any) -> list[str]:
    """Return the findings, on a torch that sees the card unless said otherwise."""
    return findings(facts, **{"build": "CUDA 13.0", "usable": True, **more})


def test_a_computer_as_it_should_be_has_no_findings() -> None:
    assert found(with_card()) == []
    assert found(Facts(system="Linux")) == []
    rates = {"h2d_bytes_per_s": 20e9, "d2h_bytes_per_s": 20e9, "host_dram_bytes_per_s": 35e9}
    assert found(with_card(), profile=card("rtx-3060-12gb"), measured=rates) == []


@pytest.mark.parametrize(
    ("changes", "build", "index"),
    [
        ({}, "CPU", "cu130"),
        ({"driver": "560.35"}, "CPU", "cu126"),
        ({"driver": "570.1", "capability": (12, 0)}, "CPU", "cu128"),
        ({"driver": "", "capability": None}, "CPU", "cu130"),
        ({"capability": (6, 1)}, "CPU", "cu126"),
        ({"vendor": "AMD", "title": "AMD card"}, "CUDA 13.0", "rocm"),
        ({"vendor": "Intel", "title": "Intel card"}, "CPU", "xpu"),
        ({}, "ROCm 7.0", "cu130"),
    ],
)
def test_a_card_that_this_torch_cannot_drive_gets_the_index_that_can(
    changes: dict[str, Any], build: str, index: str
) -> None:
    [finding] = found(with_card(**changes), build=build, usable=False)
    assert f"this torch is a {build} build" in finding
    assert f"PyTorch's {index} index" in finding and "://" not in finding


def test_a_driver_too_old_for_this_torch_is_named() -> None:
    [finding] = found(with_card(driver="535.183"), usable=False)
    assert "driver 535.183 is too old for this torch's CUDA 13.0" in finding
    assert "update the driver, or install torch from PyTorch's cu126 index" in finding


def test_a_hidden_card_is_not_blamed_on_the_wheel() -> None:
    for build in ("CUDA 13.0", "CUDA 12.8"):
        [finding] = found(with_card(), build=build, usable=False)
        assert "finds no card" in finding and "CUDA_VISIBLE_DEVICES" in finding


def test_the_wheel_is_no_matter_where_torch_is_missing_or_finds_a_card() -> None:
    assert found(with_card(), build=None, usable=False) == []
    assert found(with_card(), build="CPU", usable=True) == []


@pytest.mark.parametrize(("width", "share"), [(4, 25), (8, 50)])
def test_fewer_lanes_than_the_card_has_are_found(width: int, share: int) -> None:
    [finding] = found(with_card(width=width))
    assert f"runs on {width} of its 16 PCIe lanes" in finding and f"{share} %" in finding
    assert "slot next to the processor" in finding


def test_an_older_slot_is_found_but_an_idle_link_is_not() -> None:
    """The generation in use drops while a card idles, so only what is possible counts."""
    [finding] = found(with_card(generation_slot=3))
    assert "could use PCIe 4.0 but this slot allows 3.0" in finding and "firmware" in finding
    assert found(with_card(generation_slot=None)) == []
    assert found(with_card(width=None, width_max=None)) == []


def test_a_slot_better_than_the_card_is_no_finding() -> None:
    assert found(with_card(generation_slot=5, generation_max=4, width=16, width_max=8)) == []


def test_memory_of_other_programs_is_named_with_them() -> None:
    programs = (Program(name="game.exe", held_bytes=GIB), Program(name="blender"))
    [finding] = found(with_card(used_bytes=3 * GIB, programs=programs))
    assert "other programs hold 3 GiB of NVIDIA GeForce RTX 3060" in finding
    assert "among them game.exe (1 GiB), blender; close them" in finding
    [finding] = found(with_card(used_bytes=601 * MIB))
    assert "601 MiB" in finding and "among" not in finding
    assert found(with_card(used_bytes=600 * MIB)) == []
    assert found(with_card(used_bytes=None)) == []


def test_a_display_on_the_card_is_found() -> None:
    [finding] = found(with_card(display=True))
    assert "a display is attached to" in finding and "processor's own graphics" in finding
    assert found(with_card(display=None)) == []


@pytest.mark.parametrize("system", ["Windows", "WSL"])
def test_a_driver_that_spills_is_told_by_its_setting(system: str) -> None:
    """B65."""
    [finding] = found(Facts(system=system, cards=(CARD,)))
    assert '"CUDA - Sysmem Fallback Policy" to "Prefer No Sysmem Fallback"' in finding
    assert f"on {system}" in finding
    assert found(Facts(system=system)) == []


def test_one_memory_module_is_found() -> None:
    [finding] = found(Facts(system="Linux", module_bytes=(16 * GIB,)))
    assert "one memory module of 16 GiB" in finding and "add a second one" in finding
    assert found(Facts(system="Linux", module_bytes=(8 * GIB, 8 * GIB))) == []


def test_one_module_is_also_told_by_its_speed() -> None:
    """Where nobody says what is in the slots: below 60 % of what two modules reach (43 GB/s)."""
    expected = card("rtx-3060-12gb")
    for rate, n in ((25.7e9, 1), (25.9e9, 0)):
        rates = {"host_dram_bytes_per_s": rate}
        assert len(found(Facts(system="Linux"), profile=expected, measured=rates)) == n
    [finding] = found(
        Facts(system="Linux", module_bytes=(16 * GIB,)),
        profile=expected,
        measured={"host_dram_bytes_per_s": 20e9},
    )
    assert "one memory module" in finding
    [finding] = found(
        Facts(system="Linux"), profile=expected, measured={"host_dram_bytes_per_s": 20e9}
    )
    assert "20.0 GB/s where two modules reach about 43" in finding and "XMP" in finding


@pytest.mark.parametrize(
    ("h2d", "d2h", "way"),
    [(16.7e9, 24e9, "to the card reach 16.7"), (24e9, 16.7e9, "from the card reach 16.7")],
)
def test_a_link_below_70_percent_of_the_preset_s_is_found(h2d: float, d2h: float, way: str) -> None:
    expected = card("rtx-3060-12gb")
    rates = {"h2d_bytes_per_s": h2d, "d2h_bytes_per_s": d2h}
    [finding] = found(with_card(), profile=expected, measured=rates)
    assert f"copies {way} GB/s where RTX 3060 12 GB allows about 24" in finding
    assert "slot" in finding
    rates = dict.fromkeys(rates, 16.9e9)
    assert found(with_card(), profile=expected, measured=rates) == []


def test_a_link_slow_in_both_directions_is_one_finding() -> None:
    rates = {"h2d_bytes_per_s": 6e9, "d2h_bytes_per_s": 6e9}
    assert len(found(with_card(), profile=card("rtx-3060-12gb"), measured=rates)) == 1


def test_every_sentence_is_one_line() -> None:
    facts = with_card(width=4, generation_slot=3, used_bytes=2 * GIB, display=True)
    facts = Facts(system="WSL", cards=facts.cards, module_bytes=(GIB,))
    sentences = found(facts, build="CPU", usable=False)
    assert len(sentences) == 7
    assert all("\n" not in text and not text.endswith(".") for text in sentences)
