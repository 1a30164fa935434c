"""What is here: Python, torch, cards, memory, page-locking, number formats, the default model.

Every look is guarded: what cannot be had becomes a finding with the remedy, never an error.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from offload_llama import __version__
from offload_llama.config import DTYPES
from offload_llama.doctor.measured import figures_of, measure
from offload_llama.errors import DeviceError, OffloadLlamaError
from offload_llama.hardware import HardwareProfile
from offload_llama.machine import CardFacts, Facts, findings, gather, is_wsl
from offload_llama.profiles import (
    Measured,
    key_of,
    load_measured,
    problems,
    usual_host,
)

if TYPE_CHECKING:
    from offload_llama.device.api import Device

PIN_TEST_BYTES = 64 * 2**20
DEFAULT_MODEL = "smollm2-135m"
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(slots=True, kw_only=True)
class Report:
    """What was found. `findings` are sentences: what is not as it could be, and what helps."""

    offload_llama: str = __version__
    python: str = platform.python_version()
    platform: str = ""
    wsl: bool = False
    memory: dict[str, int] = field(default_factory=dict)
    torch: dict[str, Any] = field(default_factory=dict)
    cards: list[dict[str, Any]] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)
    pinning: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    default_model: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)


def examine(
    device_name: str = "auto",
    probe: bool = False,
    *,
    quick: bool = False,
    facts: Facts | None = None,
) -> dict[str, Any]:
    """Return a report on this machine as plain data.

    Args:
        device_name: the device to try page-locking and number formats on.
        probe: measure it too, and keep the figures for later plans; without, those of an earlier
            time are shown.
        quick: measure in about 10 seconds instead of up to 60.
        facts: what the computer says of itself; gathered where None.

    Raises:
        ConfigError: the device name means nothing.
    """
    # Before torch opens a context on the card, which would count as used memory.
    facts = gather() if facts is None else facts
    report = Report(
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        wsl=is_wsl(platform.release()),
        memory=host_memory(),
        machine=asdict(facts),
    )
    expected, measured = usual_host(), Measured()
    _look_at_torch(report)
    if report.torch["version"] is not None:
        _look_at_cards(report, facts)
        expected, measured = _look_at_device(report, device_name, probe, quick)
        _look_at_model(report)
    if report.wsl:
        report.findings.append(
            "this is WSL: it limits how much memory can be page-locked; watch for the warning "
            "about refused page-locking in long runs"
        )
    report.findings += findings(
        facts if facts.cards else replace(facts, cards=_cards_of_torch(report, expected)),
        build=report.torch["build"],
        usable=bool(report.cards),
        profile=expected,
        measured=measured.values(),
    )
    return asdict(report)


def _cards_of_torch(report: Report, expected: HardwareProfile) -> tuple[CardFacts, ...]:
    """Return torch's cards as facts, for systems that say nothing of theirs."""
    return tuple(
        CardFacts(
            title=card["title"],
            vendor="",
            total_bytes=card["total_bytes"],
            used_bytes=max(0, card["total_bytes"] - card["free_bytes"] - expected.context_bytes),
        )
        for card in report.cards
        if "free_bytes" in card
    )


def host_memory(limits: tuple[Path, ...] = _CGROUP_LIMITS) -> dict[str, int]:
    """Return the bytes of host memory in all and free, and the container's limit if there is one.

    Args:
        limits: files in which Linux may state a limit.
    """
    machine = psutil.virtual_memory()
    found = {"total_bytes": machine.total, "available_bytes": machine.available}
    for path in limits:
        with contextlib.suppress(OSError, ValueError):
            limit = int(path.read_text("ascii"))
            if limit < machine.total:
                found["limit_bytes"] = limit
            break
    return found


def _look_at_torch(report: Report) -> None:
    try:
        import torch
    except Exception as error:  # a broken install fails in many ways, and all are findings
        report.torch = {"version": None, "build": None}
        report.findings.append(
            f"torch cannot be imported ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            "; install it: pip install torch==2.13.0"
        )
        return
    report.torch = {"version": str(torch.__version__), "build": torch_build(torch)}


def torch_build(torch: Any) -> str:
    """Return what kind of card a torch build can drive: "CUDA 13.0", "ROCm 7.0", "XPU", "CPU"."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return "XPU" if getattr(torch.version, "xpu", None) else "CPU"


def _look_at_cards(report: Report, facts: Facts) -> None:
    import torch

    from offload_llama.device.cuda import check_architecture

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = torch.cuda.get_device_capability(index)
        title = torch.cuda.get_device_name(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        card = {
            "name": f"cuda:{index}",
            "title": title,
            "capability": f"{capability[0]}.{capability[1]}",
            "built_for": torch.cuda.get_arch_list(),
            "usable": True,
            "free_bytes": free_bytes,
            "total_bytes": total_bytes,
        }
        if torch.version.hip is None:
            try:
                check_architecture(title, capability, torch.cuda.get_arch_list())
            except DeviceError as error:
                card["usable"] = False
                report.findings.append(str(error))
        report.cards.append(card)
    for index in range(torch.xpu.device_count() if torch.xpu.is_available() else 0):
        properties = torch.xpu.get_device_properties(index)
        report.cards.append(
            {
                "name": f"xpu:{index}",
                "title": properties.name,
                "usable": True,
                "total_bytes": properties.total_memory,
            }
        )
    if not report.cards and not facts.cards:
        build = report.torch["build"]
        report.findings.append(
            "no card: this torch is a CPU build; a build for your card lets it be used"
            if build == "CPU"
            else f"no card: this torch is built for {build} but finds no card; is the driver there?"
        )


def _look_at_device(
    report: Report, name: str, probe: bool, quick: bool
) -> tuple[HardwareProfile, Measured]:
    """Try a device; return what is expected of it and what was measured on it."""
    from offload_llama.device import open_device
    from offload_llama.device.figures import card_title, preset_of
    from offload_llama.weights import backends

    try:
        device = open_device(name)
    except DeviceError as error:
        report.device = {"name": name, "usable": False}
        report.findings.append(str(error))
        return usual_host(), Measured()
    try:
        with device.scope():
            memory = device.memory()
        report.device = {
            "name": device.name,
            "usable": True,
            "simulated": device.simulated,
            "free_bytes": memory.free_bytes,
            "total_bytes": memory.total_bytes,
        }
        report.dtypes = {dtype: _try_dtype(device, dtype) for dtype in DTYPES}
        with device.scope():
            report.weights = backends(device.torch_device)
        report.pinning = pin_test(device)
        expected = preset_of(device) or usual_host()
        key = key_of(card_title(device))
        if probe and (stopped := measure(device, key, quick)) is not None:
            report.findings.append(stopped)
        measured = load_measured(key) or Measured()
        report.measured = figures_of(device, key, expected, measured)
    finally:
        device.close()
    for dtype, answer in report.dtypes.items():
        if answer != "yes":
            report.findings.append(f"{dtype} does not work on {device.name}: {answer}")
    if report.pinning["tested"] and not report.pinning["accepted"]:
        report.findings.append(f"{report.pinning['reason']}; {report.pinning['cost']}")
    report.findings += problems(key)
    return expected, measured


def _try_dtype(device: Device, dtype: str) -> str:
    """Return "yes" if a small product and attention work in this dtype, else why not."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    try:
        with device.scope(), torch.no_grad():
            x = torch.ones(1, 1, 16, 16, dtype=getattr(torch, dtype), device=device.torch_device)
            scaled_dot_product_attention(x @ x, x, x)
            device.synchronize()
    except (RuntimeError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
    return "yes"


def pin_test(device: Device, size_bytes: int = PIN_TEST_BYTES) -> dict[str, Any]:
    """Return whether the device page-locks `size_bytes` of host memory exactly as they lie."""
    from offload_llama.device import PinRefused

    if not device.offloads:
        return {"tested": False, "reason": "host and device memory are the same here"}
    began_s = time.perf_counter()
    try:
        with device.scope():
            _register_once(device, size_bytes)
    except PinRefused as error:
        return {
            "tested": True,
            "bytes": size_bytes,
            "accepted": False,
            "reason": str(error),
            "cost": "offloaded layers are copied through a small staging buffer instead, at about "
            "half the link's speed and at the cost of host time",
        }
    seconds = time.perf_counter() - began_s
    return {"tested": True, "bytes": size_bytes, "accepted": True, "seconds": seconds}


def _register_once(device: Device, size_bytes: int) -> None:
    """Page-lock fresh, page-aligned memory and let it go; the mapping ends with its tensor."""
    import torch

    tensor = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
    device.register(tensor)
    device.unregister(tensor)


def _look_at_model(report: Report) -> None:
    from offload_llama.checkpoint.open import open_checkpoint

    try:
        checkpoint = open_checkpoint(DEFAULT_MODEL)
    except OffloadLlamaError as error:
        report.default_model = {"name": DEFAULT_MODEL, "path": None}
        report.findings.append(str(error))
        return
    report.default_model = {
        "name": DEFAULT_MODEL,
        "path": str(checkpoint.path),
        "bytes": checkpoint.n_bytes(),
    }
    checkpoint.close()
