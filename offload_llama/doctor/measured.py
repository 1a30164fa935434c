"""The figures measured on a device, beside those expected of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from offload_llama.errors import OffloadLlamaError
from offload_llama.hardware import HardwareProfile
from offload_llama.profiles import Measured, path_of, save_measured

if TYPE_CHECKING:
    from offload_llama.device.api import Device


def measure(device: Device, key: str, quick: bool) -> str | None:
    """Measure a device and keep the figures; return what stopped it, None if nothing did."""
    from offload_llama.probe import probe

    target = device
    if device.simulated:
        from offload_llama.device.sim import simulated

        # Shapes are enough for its clock, and cost neither time nor memory.
        target = simulated(device.name.removeprefix("sim:"), values=False)
    try:
        save_measured(key, probe(target, quick=quick))
    except (RuntimeError, OSError, OffloadLlamaError) as error:
        reason = str(error).partition("\n")[0]
        return f"measuring {device.name} stopped: {reason}"
    finally:
        if target is not device:
            target.close()
    return None


def figures_of(
    device: Device, key: str, expected: HardwareProfile, measured: Measured
) -> dict[str, Any]:
    """Return measured figures beside the expected ones as plain data, empty if there are none."""
    if not measured.figures:
        return {}
    return {
        "key": key,
        "path": str(path_of(key)),
        "age_s": measured.age_s(),
        "expected_of": expected.name if device.offloads else "a usual desktop",
        "figures": {
            name: asdict(figure) | {"expected": _expected(expected, name)}
            for name, figure in measured.figures.items()
        },
    }


def _expected(profile: HardwareProfile, name: str) -> float | None:
    """Return what a preset has for a measured figure, None where presets have none."""
    if name.startswith("pageable_") and name != "pageable_factor":
        pinned: float = getattr(profile, name.removeprefix("pageable_"))
        return pinned * profile.pageable_factor
    value: float | None = getattr(profile, name, None)
    return value
