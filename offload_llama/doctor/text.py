"""A report as lines for a person."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from offload_llama.hardware import format_bytes


def render(report: dict[str, Any]) -> str:
    """Return a report as lines for a person."""
    return "".join(
        f"{label:<12}{text}\n" for label, draw in _ROWS for text in draw(report) if text
    ) + "".join(f"note        {finding}\n" for finding in report["findings"])


def _memory_text(report: dict[str, Any]) -> list[str]:
    memory = report["memory"]
    text = (
        f"{format_bytes(memory['available_bytes'])} free of {format_bytes(memory['total_bytes'])}"
    )
    if "limit_bytes" in memory:
        text += f", of which this container may use {format_bytes(memory['limit_bytes'])}"
    return [text]


def _torch_text(report: dict[str, Any]) -> list[str]:
    torch = report["torch"]
    return [f"{torch['version']} ({torch['build']} build)" if torch["version"] else "not here"]


def _card_text(report: dict[str, Any]) -> list[str]:
    lines = []
    for card in report["cards"]:
        line = f"{card['name']}: {card['title']}"
        if "capability" in card:
            line += f", compute capability {card['capability']}"
        if "free_bytes" in card:
            line += f", {format_bytes(card['free_bytes'])} free"
        line += f" of {format_bytes(card['total_bytes'])}"
        lines.append(line if card["usable"] else f"{line}, not usable")
    return lines or ["none"]


def _device_text(report: dict[str, Any]) -> list[str]:
    device = report["device"]
    if not device.get("usable"):
        return [f"{device['name']}: not usable"] if device else []
    sizes = f"{format_bytes(device['free_bytes'])} free of {format_bytes(device['total_bytes'])}"
    return [f"{device['name']}: {sizes}{' [simulated]' if device['simulated'] else ''}"]


def _pinning_text(report: dict[str, Any]) -> list[str]:
    pinning = report["pinning"]
    if not pinning:
        return []
    if not pinning["tested"]:
        return [f"not tested: {pinning['reason']}"]
    return [f"{format_bytes(pinning['bytes'])} {'works' if pinning['accepted'] else 'refused'}"]


def _dtype_text(report: dict[str, Any]) -> list[str]:
    return [", ".join(f"{name} {answer}" for name, answer in report["dtypes"].items())]


def _weights_text(report: dict[str, Any]) -> list[str]:
    return [", ".join(f"{name} by {kernel}" for name, kernel in report["weights"].items())]


_FIGURES = (
    ("h2d_bytes_per_s", "host to card"),
    ("d2h_bytes_per_s", "card to host"),
    ("pageable_h2d_bytes_per_s", "host to card, pageable"),
    ("pageable_d2h_bytes_per_s", "card to host, pageable"),
    ("mem_bytes_per_s", "card's memory"),
    ("fp16_flops", "matrix products"),
    ("host_dram_bytes_per_s", "host memory, copying"),
    ("cpu_attention_bytes_per_s", "attention on the CPU"),
    ("context_bytes", "driver's context"),
    ("learnt_bytes", "beyond plans so far"),
)


def _measured_text(report: dict[str, Any]) -> list[str]:
    measured = report["measured"]
    if not measured:
        return ["nothing yet: offload-llama doctor --probe"] if report["device"] else []
    figures = measured["figures"]
    taken = {figure["torch"] for figure in figures.values()}
    age = "" if measured["age_s"] is None else f" {_age(measured['age_s'])} ago"
    lines = [f"{'':<24}{'here':>14}{'expected':>14}"]
    for name, label in _FIGURES:
        if name in figures:
            here, expected = (_amount(name, figures[name][key]) for key in ("value", "expected"))
            lines.append(f"{label:<24}{here:>14}{expected:>14}".rstrip())
    if "tried_pin_bytes" in figures:
        size = format_bytes(figures["tried_pin_bytes"]["value"])
        more = ", more is refused" if "max_pin_bytes" in figures else ", no more was tried"
        lines.append(f"{'page-locked at once':<24}{size:>14}{more}")
    lines.append(
        f"taken{age} with torch {', '.join(sorted(taken))}; expected of {measured['expected_of']}"
    )
    return lines


def _amount(name: str, value: float | None) -> str:
    if value is None or (value == 0 and name == "learnt_bytes"):
        return ""
    if name == "fp16_flops":
        return f"{value / 1e12:.1f} TFLOP/s"
    if name.endswith("_per_s"):
        return f"{value / 1e9:.1f} GB/s"
    return format_bytes(value)


def _age(seconds: float) -> str:
    for unit, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length_s:
            n = int(seconds // length_s)
            return f"{n} {unit}{'s' if n > 1 else ''}"
    return "less than a minute"


def _model_text(report: dict[str, Any]) -> list[str]:
    model = report["default_model"]
    if not model:
        return []
    found = f"{model['path']} ({format_bytes(model['bytes'])})" if model["path"] else "not here"
    return [f"{model['name']}: {found}"]


_ROWS: tuple[tuple[str, Callable[[dict[str, Any]], list[str]]], ...] = (
    ("version", lambda report: [report["offload_llama"]]),
    ("python", lambda report: [f"{report['python']} at {sys.prefix}"]),
    ("system", lambda report: [report["platform"] + (" (WSL)" if report["wsl"] else "")]),
    ("memory", _memory_text),
    ("torch", _torch_text),
    ("card", _card_text),
    ("device", _device_text),
    ("page-lock", _pinning_text),
    ("dtypes", _dtype_text),
    ("weights", _weights_text),
    ("model", _model_text),
    ("measured", _measured_text),
)
