"""Measured figures: kept, damaged, merged, and put in place of presets."""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offload_llama import profiles
from offload_llama.errors import ConfigError
from offload_llama.hardware import card, presets
from offload_llama.profiles import (
    Figure,
    Measured,
    apply,
    cache_folder,
    key_of,
    learn_overhead,
    load_measured,
    measured_now,
    path_of,
    problems,
    profile_of_card,
    save_measured,
)

GIB = 2**30
KEY = "NVIDIA GeForce RTX 3060 @ Linux, Ryzen 5, 32 GiB"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("OFFLOAD_LLAMA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Kept


def test_what_is_saved_is_loaded_again_with_date_and_torch() -> None:
    assert load_measured(KEY) is None
    path = save_measured(KEY, measured_now({"h2d_bytes_per_s": 21.5e9, "fp16_flops": 2e13}))
    loaded = load_measured(KEY)
    assert loaded is not None
    assert loaded.values() == {"h2d_bytes_per_s": 21.5e9, "fp16_flops": 2e13}
    figure = loaded.figures["h2d_bytes_per_s"]
    assert figure.torch == profiles.torch_version()
    age_s = loaded.age_s()
    assert age_s is not None and age_s < 60
    assert path == path_of(KEY) and path.name.startswith("nvidia-geforce-rtx-3060-")
    assert problems(KEY) == []


def test_a_key_is_the_card_and_the_computer() -> None:
    assert key_of("RTX 3060").startswith("RTX 3060 @ ")
    assert key_of("RTX 3060") != key_of("RTX 3070")
    assert path_of("RTX 3060 @ here") != path_of("RTX 3060 @ there")


def test_new_figures_stand_beside_those_of_before() -> None:
    save_measured(KEY, measured_now({"h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 2e9}))
    save_measured(KEY, measured_now({"h2d_bytes_per_s": 3e9}))
    loaded = load_measured(KEY)
    assert loaded is not None
    assert loaded.values() == {"h2d_bytes_per_s": 3e9, "d2h_bytes_per_s": 2e9}


def test_a_limit_of_page_locking_is_forgotten_once_more_works() -> None:
    save_measured(KEY, measured_now({"tried_pin_bytes": 2 * GIB, "max_pin_bytes": 2 * GIB}))
    save_measured(KEY, measured_now({"tried_pin_bytes": GIB}))
    assert (load_measured(KEY) or Measured()).value("max_pin_bytes") == 2 * GIB
    save_measured(KEY, measured_now({"tried_pin_bytes": 3 * GIB}))
    assert (load_measured(KEY) or Measured()).value("max_pin_bytes") is None


def test_a_save_that_fails_leaves_the_old_file_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save_measured(KEY, measured_now({"h2d_bytes_per_s": 1e9}))
    before = path.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*OFFLOAD_LLAMA_CACHE_DIR"):
        save_measured(KEY, measured_now({"h2d_bytes_per_s": 2e9}))
    assert [each.read_bytes() for each in path.parent.iterdir()] == [before]


def test_a_folder_that_cannot_be_made_is_one_line(folder: Path) -> None:
    folder.write_text("in the way")
    with pytest.raises(ConfigError, match="set OFFLOAD_LLAMA_CACHE_DIR to a folder") as caught:
        save_measured(KEY, measured_now({"h2d_bytes_per_s": 2e9}))
    assert "\n" not in str(caught.value)


def test_the_usual_folder_is_the_system_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_LLAMA_CACHE_DIR")
    assert cache_folder().name in ("offload-llama", "Cache")


# Damaged and foreign files

GOOD = {"value": 1e9, "date": "2026-01-02T03:04:05+00:00", "torch": "2.13.0"}


def written(**changes: Any) -> str:
    data = {
        "format": "offload-llama measured profile",
        "version": 1,
        "key": KEY,
        "figures": {"h2d_bytes_per_s": GOOD},
    }
    return json.dumps({**data, **changes})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "damaged"),
        (written()[:60], "damaged"),
        ("[]", "not one of ours"),
        ('{"gpus": []}', "not one of ours"),
        (written(version=2), "has version 2"),
        (written(key="RTX 4090 @ elsewhere"), "those of RTX 4090 @ elsewhere"),
        (written(figures=None), "damaged"),
        (written(figures={"h2d_bytes_per_s": 1e9}), "damaged"),
        (written(figures={"h2d_bytes_per_s": {**GOOD, "value": -1}}), "cannot be -1"),
        (written(figures={"h2d_bytes_per_s": {**GOOD, "value": 0}}), "cannot be 0"),
        (written(figures={"h2d_bytes_per_s": {**GOOD, "value": "NaN"}}), "cannot be nan"),
        (written(figures={"h2d_bytes_per_s": {**GOOD, "date": "today"}}), "damaged"),
        (written(figures={"h2d_bytes_per_s": {**GOOD, "date": "2026-01-02"}}), "time zone"),
        (written(figures={"speed": GOOD}), "speed is nothing that is measured"),
    ],
)
def test_a_file_that_cannot_be_used_is_reported_and_not_used(text: str, why: str) -> None:
    path_of(KEY).parent.mkdir(parents=True)
    path_of(KEY).write_text(text)
    assert load_measured(KEY) is None
    [finding] = problems(KEY)
    assert why in finding and "--probe" in finding and "\n" not in finding
    save_measured(KEY, measured_now({"h2d_bytes_per_s": 5e9}))
    assert (load_measured(KEY) or Measured()).values() == {"h2d_bytes_per_s": 5e9}


def test_a_good_file_written_by_hand_is_read() -> None:
    path_of(KEY).parent.mkdir(parents=True)
    path_of(KEY).write_text(written())
    assert load_measured(KEY) == Measured(figures={"h2d_bytes_per_s": Figure(**GOOD)})


def test_a_folder_in_place_of_the_file_is_reported() -> None:
    path_of(KEY).mkdir(parents=True)
    assert load_measured(KEY) is None and len(problems(KEY)) == 1


def test_age_is_that_of_the_oldest_rate() -> None:
    figures = {
        "h2d_bytes_per_s": Figure(**{**GOOD, "date": "2026-01-01T00:00:00+00:00"}),
        "fp16_flops": Figure(**{**GOOD, "date": "2026-01-03T00:00:00+00:00"}),
        "learnt_bytes": Figure(**{**GOOD, "date": "2020-01-01T00:00:00+00:00"}),
    }
    now = datetime.datetime(2026, 1, 4, tzinfo=datetime.UTC)
    assert Measured(figures=figures).age_s(now) == 3 * 86400
    assert Measured().age_s(now) is None


# Learnt from runs


def test_the_largest_overshoot_is_kept_and_never_a_negative_one() -> None:
    assert learn_overhead(KEY, -5).learnt_bytes == 0
    assert learn_overhead(KEY, 1000).learnt_bytes == 1000
    assert learn_overhead(KEY, 600).learnt_bytes == 1000
    assert learn_overhead(KEY, 2000).learnt_bytes == 2000
    assert (load_measured(KEY) or Measured()).learnt_bytes == 2000


def test_another_torch_starts_to_learn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    learn_overhead(KEY, 5000)
    monkeypatch.setattr(profiles, "torch_version", lambda: "9.0.0")
    assert learn_overhead(KEY, 10).learnt_bytes == 10


def test_learning_keeps_what_was_measured() -> None:
    save_measured(KEY, measured_now({"h2d_bytes_per_s": 5e9}))
    assert learn_overhead(KEY, 7).values() == {"h2d_bytes_per_s": 5e9, "learnt_bytes": 7}


# Into profiles


def test_measured_figures_replace_the_presumed_ones_and_no_other() -> None:
    preset = card("rtx-3060-12gb")
    measured = measured_now(
        {
            "h2d_bytes_per_s": 11e9,
            "d2h_bytes_per_s": 12e9,
            "mem_bytes_per_s": 330e9,
            "fp16_flops": 24e12,
            "host_dram_bytes_per_s": 30e9,
            "cpu_attention_bytes_per_s": 20e9,
            "pageable_factor": 0.4,
            "pageable_h2d_bytes_per_s": 4.4e9,
            "context_bytes": 300 * 2**20,
            "max_pin_bytes": 4 * GIB,
            "tried_pin_bytes": 4 * GIB,
            "learnt_bytes": 12345,
        }
    )
    assert apply(preset, measured) == dataclasses.replace(
        preset,
        h2d_bytes_per_s=11e9,
        d2h_bytes_per_s=12e9,
        mem_bytes_per_s=330e9,
        fp16_flops=24e12,
        host_dram_bytes_per_s=30e9,
        cpu_attention_bytes_per_s=20e9,
        pageable_factor=0.4,
        context_bytes=300 * 2**20,
        max_pin_bytes=4 * GIB,
        learnt_bytes=12345,
    )


def test_nothing_measured_changes_nothing() -> None:
    preset = card("rtx-3060-12gb")
    assert apply(preset, None) is preset
    assert apply(preset, Measured()) == preset


def test_figures_that_a_profile_cannot_hold_are_bent_into_it() -> None:
    """Pageable copies a little faster than pinned ones, and a context larger than a small card."""
    small = card("rtx-3060-12gb?vram=1GiB")
    changed = apply(small, measured_now({"pageable_factor": 1.02, "context_bytes": 2 * GIB}))
    assert changed.pageable_factor == 1.0
    assert changed.context_bytes == small.context_bytes


# Cards by their drivers' names


@pytest.mark.parametrize(
    ("title", "total_gib", "name"),
    [
        ("NVIDIA GeForce RTX 3060", 11.76, "RTX 3060 12 GB"),
        ("NVIDIA GeForce RTX 3060", 7.8, "RTX 3060 8 GB"),
        ("NVIDIA GeForce RTX 3060 Ti", 7.8, "RTX 3060 Ti"),
        ("NVIDIA GeForce RTX 4060 Ti", 7.75, "RTX 4060 Ti 8 GB"),
        ("NVIDIA GeForce RTX 2060", 5.8, "RTX 2060"),
        ("NVIDIA GeForce RTX 2060", 11.8, "RTX 2060 12 GB"),
        ("NVIDIA GeForce RTX 3080", 9.8, "RTX 3080"),
        ("NVIDIA GeForce RTX 4070 SUPER", 11.7, "RTX 4070 SUPER"),
        ("AMD Radeon RX 7600", 7.98, "RX 7600"),
        ("Intel(R) Arc(TM) B580 Graphics", 11.6, "Arc B580"),
        ("RTX 3060 12 GB", None, "RTX 3060 12 GB"),
        ("NVIDIA GeForce RTX 3060", None, "RTX 3060 8 GB"),
    ],
)
def test_a_driver_s_name_leads_to_the_preset(
    title: str, total_gib: float | None, name: str
) -> None:
    total_bytes = None if total_gib is None else round(total_gib * GIB)
    found = profile_of_card(title, total_bytes)
    assert found is not None and found == card(name)


def test_every_preset_is_found_by_its_own_name() -> None:
    for profile in presets().values():
        assert profile_of_card(f"{profile.vendor} {profile.name}", profile.vram_bytes) == profile


def test_another_size_takes_the_namesake_s_figures_and_says_so() -> None:
    found = profile_of_card("NVIDIA GeForce RTX 4060 Ti", 16 * GIB)
    assert found is not None
    assert found.vram_bytes == 16 * GIB
    assert found.mem_bytes_per_s == card("rtx-4060-ti-8gb").mem_bytes_per_s
    assert "16 GiB (figures of the RTX 4060 Ti 8 GB)" in found.name


def test_a_laptop_s_card_takes_the_desktop_s_figures_and_says_so() -> None:
    found = profile_of_card("NVIDIA GeForce RTX 4060 Laptop GPU", round(7.8 * GIB))
    assert found is not None and "figures of the RTX 4060)" in found.name
    assert found.h2d_bytes_per_s == card("rtx-4060").h2d_bytes_per_s


def test_an_unknown_card_is_taken_for_the_slowest_of_its_size() -> None:
    found = profile_of_card("NVIDIA Example 9", 8 * GIB)
    assert found is not None
    assert found.name == "unknown card NVIDIA Example 9"
    assert found.vram_bytes == 8 * GIB and found.capability is None
    same = [p for p in presets().values() if p.vram_bytes == 8 * GIB]
    assert len(same) > 5
    for name in ("mem_bytes_per_s", "h2d_bytes_per_s", "fp16_flops"):
        assert getattr(found, name) == min(getattr(p, name) for p in same)


@pytest.mark.parametrize("total_bytes", [2**28, 2 * GIB, 140 * GIB])
def test_an_unknown_card_of_any_size_has_a_profile(total_bytes: int) -> None:
    found = profile_of_card("NVIDIA H200", total_bytes)
    assert found is not None and found.vram_bytes == total_bytes


def test_without_name_and_memory_nothing_is_known() -> None:
    assert profile_of_card("NVIDIA Example 9") is None


def test_figures_are_read_without_torch() -> None:
    code = (
        "import sys, offload_llama.profiles as p; p.load_measured(p.key_of('x'))\n"
        "p.profile_of_card('NVIDIA GeForce RTX 3060', 12 * 2**30)\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
