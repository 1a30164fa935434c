"""The real `CudaDevice` runs on the simulated card, behind signatures equal to `torch.cuda`'s."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import offload_llama.device.cuda
import offload_llama.device.sim
from offload_llama.device import Device
from offload_llama.device.cuda import CudaDevice
from offload_llama.device.sim import SimError, simulated
from offload_llama.device.sim.cuda_api import cuda_functions, patches
from offload_llama.errors import DeviceError
from tests.helpers_sim import Slab

SIM = Path(offload_llama.device.sim.__file__).parent


def exercise(device: Device) -> None:
    """Call every method of the seam."""
    slab = Slab(4096)
    with device.scope():
        stream, event = device.stream(), device.event()
        event.record(device.current_stream())
        stream.wait_event(event)
        device.register(slab.bytes)
        host = device.pinned_empty((16,), torch.float32)
        with device.use(stream):
            assert device.current_stream() is stream
            torch.ones(16, device=device.torch_device)
            host.fill_(0.0)
        device.synchronize()
        device.unregister(slab.bytes)
    assert device.memory().peak_bytes == 512
    device.reset_peak()
    assert device.memory().peak_bytes == 0
    assert device.clock() > 0
    device.close()


def test_every_method_of_the_cuda_seam_runs_on_the_simulator() -> None:
    """The lines of `CudaDevice` are executed, not those of a stand-in for it."""
    source = Path(offload_llama.device.cuda.__file__)
    [device_class] = [
        node
        for node in ast.parse(source.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "CudaDevice"
    ]
    # `scope` and `clock` are what a simulated card answers itself.
    methods = {
        node.name
        for node in device_class.body
        if isinstance(node, ast.FunctionDef) and node.name not in ("scope", "clock")
    }
    ran: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code.co_filename == str(source):
            ran.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        device = simulated()
        exercise(device)
        device.card.refuse_pins_after(0)
        with pytest.raises(DeviceError):
            device.register(Slab(4096).bytes)
    finally:
        sys.setprofile(None)
    assert methods - ran == set()
    assert isinstance(device, CudaDevice)


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_replaced_functions_take_what_the_originals_take() -> None:
    for name, replacement in cuda_functions(simulated().card).items():
        original = getattr(torch.cuda, name)
        if inspect.isclass(original):
            continue
        assert parameters(replacement) == parameters(original), name


@pytest.mark.parametrize("kind", ["Stream", "Event"])
def test_streams_and_events_have_the_methods_of_the_originals(kind: str) -> None:
    replacement = cuda_functions(simulated().card)[kind]
    original = getattr(torch.cuda, kind)
    assert parameters(replacement) == parameters(original.__new__)[1:]
    for name, method in inspect.getmembers(replacement, inspect.isfunction):
        if not name.startswith("_"):
            ours, theirs = parameters(method), parameters(getattr(original, name))
            assert [p for p, _ in ours] == [p for p, _ in theirs], name


def test_outside_the_scope_nothing_of_torch_is_replaced() -> None:
    device = simulated()
    replaced = [(owner, name) for owner, name, _ in patches(device.card, False)]
    before = [getattr(owner, name) for owner, name in replaced]
    with device.scope():
        inside = [getattr(owner, name) for owner, name in replaced]
        with device.scope():
            assert [getattr(owner, name) for owner, name in replaced] == inside
        assert [getattr(owner, name) for owner, name in replaced] == inside
    assert [getattr(owner, name) for owner, name in replaced] == before
    assert not any(new is old for new, old in zip(inside, before, strict=True))


@pytest.mark.parametrize("arguments", ["order='copy_last'", "values=False"])
def test_what_torch_imports_inside_a_scope_keeps_nothing_of_the_card(arguments: str) -> None:
    """The first shape inference imports modules that keep the stream and event classes."""
    program = f"""
import torch
from offload_llama.device.sim import simulated
device = simulated({arguments})
with device.scope():
    rotation = torch.arange(4, device=device.torch_device)[:, None] * torch.ones(2, device="cuda")
    class Derived(torch.Event): pass
    Derived("cuda", enable_timing=True).record()
from torch._dynamo.device_interface import CudaInterface
assert CudaInterface.Event is torch.cuda.Event and rotation.shape == (4, 2)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_scope_ends_with_an_exception_too() -> None:
    device = simulated()
    before = torch.cuda.current_stream
    with pytest.raises(KeyError), device.scope(), device.scope():
        raise KeyError
    assert torch.cuda.current_stream is before
    x = torch.ones(2)
    assert (x + x).tolist() == [2.0, 2.0]


def test_cards_may_follow_one_another_but_not_nest() -> None:
    first, second = simulated("rtx-3060-12gb"), simulated("rtx-4060")
    for device, capability in ((first, (8, 6)), (second, (8, 9)), (first, (8, 6))):
        with device.scope():
            assert torch.cuda.get_device_capability() == capability
            torch.ones(2, device=device.torch_device)
    assert (first.memory().allocated_bytes, second.memory().allocated_bytes) == (0, 0)
    with first.scope(), pytest.raises(SimError, match="inside that of another"):
        second.synchronize()


def test_a_tensor_of_one_card_is_refused_on_another() -> None:
    first, second = simulated(), simulated()
    with first.scope():
        x = torch.ones(2, device=first.torch_device)
    with second.scope(), pytest.raises(SimError, match="another simulated card"):
        x + 1


def test_another_thread_waits_until_the_scope_ends() -> None:
    device = simulated()
    seen: list[int] = []
    reader = threading.Thread(target=lambda: seen.append(device.memory().allocated_bytes))
    with device.scope():
        x = torch.ones(2, device=device.torch_device)
        reader.start()
        reader.join(0.1)
        assert reader.is_alive()
        del x
    reader.join(10)
    assert seen == [0]


def test_a_card_says_that_it_is_simulated() -> None:
    device = simulated("rtx-4060-ti-8gb")
    assert device.simulated and device.offloads
    assert device.name == "sim:rtx-4060-ti-8gb"
    with device.scope():
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert torch.cuda.get_device_name() == "simulated NVIDIA RTX 4060 Ti 8 GB"
        assert torch.cuda.get_device_properties(0).total_memory == 8 * 2**30
        x = torch.ones(2, device="cuda")
        assert x.is_cuda and x.device == torch.device("cuda:0")


def test_cards_that_cuda_does_not_drive_run_on_the_same_path() -> None:
    device = simulated("arc-b580")
    with device.scope():
        assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.ones(3, device=device.torch_device).sum().item() == 3


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_simulator_knows_the_hardware_and_none_of_our_plans() -> None:
    """Its times and bytes must not come from the model that they are to check."""
    allowed = (
        "offload_llama.device",
        "offload_llama.hardware",
        "offload_llama.errors",
    )
    files = sorted(SIM.glob("*.py"))
    assert len(files) > 10
    for path in files:
        ours = {name for name in imports_of(path) if name.startswith("offload_llama.")}
        assert {name for name in ours if not name.startswith(allowed)} == set(), path.name


def test_running_on_a_simulated_card_does_not_load_pytorchs_compiler() -> None:
    code = """
import sys, torch
from offload_llama.device import open_device
device = open_device("sim:rtx-3060-12gb")
with device.scope(), torch.no_grad():
    x = torch.ones(4, 4, device=device.torch_device)
    assert (x @ x + 1).sum().item() == 80
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
