"""Cards' figures: presets, names, sizes and overrides."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from offload_llama.errors import ConfigError
from offload_llama.hardware import card, format_bytes, parse_bytes, presets, slug


def test_a_preset_carries_the_data_sheets_figures() -> None:
    rtx = card("rtx-3060-12gb")
    assert rtx.name == "RTX 3060 12 GB"
    assert rtx.vram_bytes == 12 * 2**30
    assert rtx.mem_bytes_per_s == 360e9
    assert rtx.h2d_bytes_per_s == 24e9
    assert rtx.fp16_flops == 25.5e12
    assert rtx.fp32_flops == 12.75e12
    assert rtx.capability == (8, 6)
    assert rtx.duplex_factor == 0.83


def test_the_rate_of_fp32_products_follows_the_architecture() -> None:
    assert card("rtx-2060").fp32_flops == pytest.approx(6.45e12)
    assert card("rtx-4060").fp32_flops == pytest.approx(15.1e12)
    assert card("arc-b580").fp32_flops == pytest.approx(13.7e12, rel=0.01)


def test_every_preset_loads_under_a_name_of_its_own() -> None:
    assert len(presets()) == 34
    for name, profile in presets().items():
        assert card(profile.name) == profile
        assert profile.slug == name


def test_cards_without_cuda_have_no_capability() -> None:
    assert card("arc-b580").capability is None
    assert card("rx-7600").capability is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RTX 3060 12 GB", "rtx-3060-12gb"),
        ("RTX 4060", "rtx-4060"),
        ("RTX 4060 Ti 8 GB", "rtx-4060-ti-8gb"),
        ("  Arc B580 ", "arc-b580"),
        ("rtx-3060-12gb", "rtx-3060-12gb"),
    ],
)
def test_names_become_slugs(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_a_misspelt_card_is_met_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*rtx-3060-12gb"):
        card("rtx-3060-12")


def test_a_card_like_no_other_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known: rtx-2060"):
        card("zzz")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("1.5MiB", 1572864),
        ("1048576", 1048576),
        ("12e9", 12 * 10**9),
        ("3B", 3),
    ],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "8 GiBs", "-1", "8,5GB", "8GiB2", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (17, "17 B"),
        (2**20, "1 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (512 * 2**20, "512 MiB"),
        (-(2**10), "-1 KiB"),
        (0, "0 B"),
    ],
)
def test_sizes_are_printed(n_bytes: int, expected: str) -> None:
    assert format_bytes(n_bytes) == expected


def test_overrides_change_the_fields_they_name() -> None:
    changed = card("rtx-3060-12gb?vram=8GiB&h2d=12e9&launch=0")
    plain = card("rtx-3060-12gb")
    expected = dataclasses.replace(
        plain, vram_bytes=8 * 2**30, h2d_bytes_per_s=12 * 10**9, launch_s=0.0
    )
    assert changed == expected


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("vrm=8GiB", "unknown card setting 'vrm=8GiB'; use vram, context"),
        ("vram", "unknown card setting"),
        ("vram=8GiB&vram=9GiB", "given twice"),
        ("vram=much", "cannot read 'much' as a size"),
        ("duplex=x", "needs a number"),
        ("duplex=2", "at most 1"),
        ("h2d=0", "must be positive"),
        ("launch=nan", "must be positive"),
        ("vram=64MiB", "add context=0"),
    ],
)
def test_overrides_that_make_no_sense_are_refused_by_name(query: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        card(f"rtx-3060-12gb?{query}")


def test_hardware_imports_no_torch() -> None:
    code = "import sys, offload_llama.hardware as h; h.presets(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_card_without_its_size_is_answered_with_the_sizes_there_are() -> None:
    with pytest.raises(ConfigError, match="did you mean rtx-3060-8gb or rtx-3060-12gb or"):
        card("rtx-3060")
