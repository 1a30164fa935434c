"""Devices by name, the CPU device, and the checks before a card is used."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch

from offload_llama.device import Device, PinRefused, open_device
from offload_llama.device.accelerator import AcceleratorDevice
from offload_llama.device.cpu import CpuDevice
from offload_llama.device.cuda import CudaDevice, check_architecture
from offload_llama.errors import ConfigError, DeviceError

no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real card here")


@no_card
def test_auto_is_the_cpu_where_there_is_no_card() -> None:
    """B55: without CUDA everything still has a device."""
    assert open_device("auto").name == "cpu"


@no_card
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "xpu"])
def test_an_explicit_card_that_is_not_here_fails_in_one_line(name: str) -> None:
    """B55: `--device cuda` on a machine without one."""
    with pytest.raises(DeviceError, match=f"--device {name}: no .* use --device cpu") as caught:
        open_device(name)
    assert "\n" not in str(caught.value)


def test_a_card_beyond_the_last_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="there are 1 cuda cards here, cuda:0 to cuda:0"):
        open_device("cuda:7")


@pytest.mark.parametrize("name", ["cud", "gpu", "cuda:-1", "cuda:x", "", "mps"])
def test_an_unknown_device_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="sim:rtx-3060-12gb"):
        open_device(name)


def test_a_simulated_card_opens_by_name_with_overrides() -> None:
    device = open_device("sim:rtx-3060-12gb?vram=8GiB&h2d=12e9")
    assert device.name == "sim:rtx-3060-12gb?vram=8GiB&h2d=12e9"
    assert device.simulated and device.offloads
    assert device.memory().total_bytes == 8 * 2**30


def test_an_unknown_simulated_card_is_met_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="rtx-4060"):
        open_device("sim:rtx-4061")


@no_card
def test_a_stale_launcher_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """B46: RANK and WORLD_SIZE of some launcher are not read, and no process group is made."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert open_device("auto").torch_device == torch.device("cpu")
    assert open_device("sim:rtx-4060").torch_device == torch.device("cuda", 0)
    assert not torch.distributed.is_initialized()


def test_opening_a_real_device_does_not_import_the_simulator() -> None:
    code = (
        "import sys; from offload_llama.device import open_device; open_device('cpu'); "
        "sys.exit('offload_llama.device.sim' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_cpu_device_keeps_the_contract_without_streams() -> None:
    device: Device = CpuDevice()
    assert not device.offloads and not device.simulated
    stream, event = device.stream(), device.event()
    memory = device.pinned_empty((2, 3), torch.float16)
    with device.scope(), device.use(stream):
        event.record(stream)
        device.current_stream().wait_event(event)
        device.register(memory)
        device.unregister(memory)
    event.synchronize()
    stream.synchronize()
    device.synchronize()
    device.close()
    assert event.query()
    assert memory.shape == (2, 3) and memory.dtype == torch.float16
    assert device.clock() <= device.clock()


def test_the_cpus_memory_is_the_processes_and_its_peak_can_start_again() -> None:
    device = CpuDevice()
    gc.collect()  # models of earlier tests would go meanwhile
    before = device.memory()
    assert 0 < before.allocated_bytes <= before.peak_bytes < before.total_bytes
    # Other memory of this process may be given back meanwhile, so half of it must show.
    big = torch.ones(256 * 2**20, dtype=torch.uint8)
    assert device.memory().peak_bytes >= before.allocated_bytes + 128 * 2**20
    del big
    device.reset_peak()
    if sys.platform == "linux":
        assert device.memory().peak_bytes < before.allocated_bytes + 128 * 2**20


@pytest.mark.parametrize(
    ("capability", "built_for"),
    [
        ((8, 6), ["sm_80", "sm_90"]),
        ((8, 6), ["sm_86"]),
        ((12, 0), ["sm_80", "compute_90"]),
        ((9, 0), ["sm_90a"]),
        ((12, 0), ["sm_120"]),
        ((8, 6), []),
        ((8, 6), ["gfx1100"]),
    ],
)
def test_a_build_that_has_code_for_the_card_is_accepted(
    capability: tuple[int, int], built_for: list[str]
) -> None:
    check_architecture("card", capability, built_for)


@pytest.mark.parametrize(
    ("capability", "remedy"),
    [((12, 0), "a newer PyTorch"), ((6, 0), "older CUDA's PyTorch"), ((8, 0), "older CUDA's")],
)
def test_a_build_without_code_for_the_card_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], remedy: str
) -> None:
    """B68: a card newer or older than the PyTorch build is named when it is opened."""
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device: "RTX Test",
        "get_device_capability": lambda device: capability,
        "get_arch_list": lambda: ["sm_86", "sm_90"],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with pytest.raises(DeviceError, match=remedy) as caught:
        open_device("cuda")
    message = str(caught.value)
    assert "RTX Test" in message and "sm_86 sm_90" in message and "\n" not in message
    assert f"sm_{capability[0]}{capability[1]}" in message


def test_an_accelerator_without_registration_says_so() -> None:
    device = AcceleratorDevice("xpu")
    with pytest.raises(PinRefused, match="cannot page-lock"):
        device.register(torch.empty(4096, dtype=torch.uint8))
    device.unregister(torch.empty(4096, dtype=torch.uint8))


@no_card
@pytest.mark.parametrize("make", [lambda: AcceleratorDevice("xpu"), None])
def test_refused_staging_memory_is_a_pin_refusal(make: Any) -> None:
    device = make() if make else CudaDevice.__new__(CudaDevice)
    device.name = "cuda:0"
    with pytest.raises(PinRefused, match="no pinned host memory"):
        device.pinned_empty((4,), torch.float32)


def test_the_generic_device_makes_one_torch_call_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of `AcceleratorDevice` run against a recorded `torch.accelerator`."""
    calls: list[str] = []

    def recorder(name: str, result: Any = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return result

        return call

    for name, result in (
        ("current_stream", "before"),
        ("set_stream", None),
        ("synchronize", None),
        ("get_memory_info", (1, 2)),
        ("memory_allocated", 3),
        ("max_memory_allocated", 4),
        ("memory_reserved", 5),
        ("reset_peak_memory_stats", None),
    ):
        monkeypatch.setattr(torch.accelerator, name, recorder(name, result))
    monkeypatch.setattr(torch, "Stream", recorder("Stream", "stream"))
    monkeypatch.setattr(torch, "Event", recorder("Event", "event"))
    device: Device = AcceleratorDevice("xpu", 1)
    assert device.stream() == "stream" and device.event() == "event"
    with device.scope(), device.use("other"):
        calls.append("body")
    device.synchronize()
    memory = device.memory()
    device.reset_peak()
    device.close()
    assert (memory.free_bytes, memory.total_bytes) == (1, 2)
    assert (memory.allocated_bytes, memory.peak_bytes, memory.reserved_bytes) == (3, 4, 5)
    assert device.clock() > 0
    assert calls == [
        "Stream",
        "Event",
        "current_stream",
        "set_stream",
        "body",
        "set_stream",
        "synchronize",
        "get_memory_info",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "reset_peak_memory_stats",
    ]
