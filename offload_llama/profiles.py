"""Figures measured on this computer: kept as JSON, one file for each card.

`doctor --probe` writes them and `plan --learn` adds what runs took beyond their plan; both end up
in a `HardwareProfile` through `apply`. A file that cannot be used is left alone and reported by
`problems`; then the presets hold. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from offload_llama.errors import ConfigError
from offload_llama.hardware import GIB, HardwareProfile, format_bytes, presets, slug
from offload_llama.machine import platform_name, processor_name

CACHE_VARIABLE = "OFFLOAD_LLAMA_CACHE_DIR"
VERSION = 1
_FORMAT = "offload-llama measured profile"

RATES = (
    *("h2d_bytes_per_s", "d2h_bytes_per_s", "mem_bytes_per_s", "fp16_flops"),
    *("host_dram_bytes_per_s", "cpu_attention_bytes_per_s"),
)
PAGEABLE = ("pageable_h2d_bytes_per_s", "pageable_d2h_bytes_per_s")
SIZES = ("context_bytes", "max_pin_bytes", "learnt_bytes", "tried_pin_bytes")
NAMES = (*RATES, *PAGEABLE, "pageable_factor", *SIZES)
"""What can be measured: fields of `HardwareProfile`, the rates of pageable copies, and the largest
page-locked memory that was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value, the second it was taken (UTC, ISO 8601) and torch's version then."""

    value: float
    date: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured on one card in one computer, by name (see `NAMES`).

    Raises:
        ConfigError: a name is unknown, or a value is negative, not finite, or a rate of zero.
    """

    figures: Mapping[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, figure in self.figures.items():
            value = figure.value
            if name not in NAMES:
                raise ConfigError(f"{name} is nothing that is measured")
            if not math.isfinite(value) or value < 0 or (value == 0 and name not in SIZES):
                raise ConfigError(f"measured {name} cannot be {value}")

    def value(self, name: str) -> float | None:
        """Return one figure's value, None where it was not measured."""
        figure = self.figures.get(name)
        return None if figure is None else figure.value

    def values(self) -> dict[str, float]:
        """Return all values by name."""
        return {name: figure.value for name, figure in self.figures.items()}

    @property
    def learnt_bytes(self) -> int:
        """Device bytes that runs took beyond their plan."""
        return int(self.value("learnt_bytes") or 0)

    def age_s(self, now: datetime.datetime | None = None) -> float | None:
        """Return the seconds since the oldest rate was measured, None if none was."""
        dates = [figure.date for name, figure in self.figures.items() if name in RATES]
        if not dates:
            return None
        taken = datetime.datetime.fromisoformat(min(dates))
        return ((now or _now()) - taken).total_seconds()


def measured_now(values: Mapping[str, float]) -> Measured:
    """Return values as figures of this moment and this torch."""
    date, torch = _now().isoformat(timespec="seconds"), torch_version()
    return Measured(
        figures={name: Figure(value=v, date=date, torch=torch) for name, v in values.items()}
    )


def torch_version() -> str:
    """Return the version of the torch that is installed, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


# Where they are kept


def cache_folder() -> Path:
    """Return the folder of the measured figures, which may not exist yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("offload-llama", appauthor=False))


def key_of(title: str) -> str:
    """Return the key of a card in this computer.

    The computer is known by its system, processor and memory rather than its name, which a
    container changes at every start.
    """
    return f"{title} @ {_computer()}"


@functools.cache
def _computer() -> str:
    memory = round(psutil.virtual_memory().total / GIB)
    return f"{platform_name()}, {processor_name()}, {memory} GiB"


def path_of(key: str) -> Path:
    """Return the file of a key."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:10]
    return cache_folder() / "measured" / f"{slug(key.partition(' @ ')[0])[:60]}-{digest}.json"


def load_measured(key: str) -> Measured | None:
    """Return what was measured for a key, None if nothing was or the file cannot be used."""
    return _read(key)[0]


def problems(key: str) -> list[str]:
    """Return why the file of a key cannot be used, nothing where it can or is not there."""
    why = _read(key)[1]
    if why is None:
        return []
    return [
        f"the measured figures in {path_of(key)} are not used: {why}; measure again with "
        "offload-llama doctor --probe"
    ]


def _read(key: str) -> tuple[Measured | None, str | None]:
    try:
        data = json.loads(path_of(key).read_text("utf-8"))
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, error.strerror or str(error)
    except ValueError:
        return None, "the file is damaged"
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        return None, "the file is not one of ours"
    if data.get("version") != VERSION:
        return None, f"the file has version {data.get('version')}, and this is {VERSION}"
    if data.get("key") != key:
        return None, f"they are those of {data.get('key')}"
    try:
        figures = {name: _figure(value) for name, value in data["figures"].items()}
        return Measured(figures=figures), None
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        return None, f"the file is damaged ({str(error) or type(error).__name__})"


def _figure(data: Any) -> Figure:
    figure = Figure(value=float(data["value"]), date=str(data["date"]), torch=str(data["torch"]))
    if datetime.datetime.fromisoformat(figure.date).tzinfo is None:
        raise ValueError(f"date {figure.date} without a time zone")
    return figure


def save_measured(key: str, measured: Measured) -> Path:
    """Put figures into a key's file, beside those that are already there, and return its path.

    Another process sees the old file or the new one, never a part.

    Raises:
        ConfigError: the folder cannot be written.
    """
    before = load_measured(key) or Measured()
    figures = {**before.figures, **measured.figures}
    tried = measured.value("tried_pin_bytes")
    fresh_limit = "max_pin_bytes" in measured.figures
    if not fresh_limit and tried is not None and tried > (before.value("max_pin_bytes") or 0):
        figures.pop("max_pin_bytes", None)  # what was refused once works now
    data = {
        "format": _FORMAT,
        "version": VERSION,
        "key": key,
        "figures": {name: asdict(figure) for name, figure in sorted(figures.items())},
    }
    path = path_of(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(data, indent=1) + "\n")
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot write measured figures to {path.parent} ({error.strerror or error}); set "
            f"{CACHE_VARIABLE} to a folder that can be written"
        ) from error
    return path


def learn_overhead(key: str, n_bytes: int) -> Measured:
    """Keep the device bytes that a run took beyond its plan, and return all figures of the key.

    The largest run of one version of torch counts; another version starts again. A run that took
    less than its plan teaches nothing, and counts as 0.

    Raises:
        ConfigError: the folder cannot be written.
    """
    fresh = measured_now({"learnt_bytes": max(0, n_bytes)})
    known = (load_measured(key) or Measured()).figures.get("learnt_bytes")
    figure = fresh.figures["learnt_bytes"]
    if known is None or known.torch != figure.torch or known.value < figure.value:
        save_measured(key, fresh)
    return load_measured(key) or fresh


# Into profiles


def apply(profile: HardwareProfile, measured: Measured | None) -> HardwareProfile:
    """Return the profile with what was measured in place of what was presumed."""
    if measured is None:
        return profile
    values: dict[str, Any] = {}
    for name, value in measured.values().items():
        if name in RATES:
            values[name] = value
        elif name in ("max_pin_bytes", "learnt_bytes"):
            values[name] = int(value)
    if (factor := measured.value("pageable_factor")) is not None:
        values["pageable_factor"] = min(1.0, factor)
    if (context := measured.value("context_bytes")) is not None and context < profile.vram_bytes:
        values["context_bytes"] = int(context)
    return replace(profile, **values)


_WORDS = re.compile(
    r"\((?:R|TM)\)|\b(?:NVIDIA|GeForce|AMD|Radeon|Intel|Graphics|Laptop GPU|Mobile)\b",
    re.IGNORECASE,
)
_SAME_SIZE = 0.1


def profile_of_card(title: str, total_bytes: int | None = None) -> HardwareProfile | None:
    """Return the figures of a card by the name its driver gives it.

    Cards of one name in several sizes are told apart by their memory. A size of which there is no
    preset gets the figures of its nearest namesake; a card of no known name the slowest figures
    among cards of similar memory, as "unknown card". The name says so in both cases.

    Args:
        title: such as "NVIDIA GeForce RTX 3060" or "Intel(R) Arc(TM) B580 Graphics".
        total_bytes: its memory, which a driver gives as a little less than the nominal one.

    Returns:
        None where neither the name nor the memory is known.
    """
    wanted = _without_size(slug(_WORDS.sub(" ", title)))
    namesakes = [p for p in presets().values() if _without_size(p.slug) == wanted]
    size = re.search(r"(\d+)\s*GB\b", title)
    goal = total_bytes if total_bytes is not None else int(size[1]) * GIB if size else None
    if namesakes:
        if goal is None:
            return min(namesakes, key=lambda p: p.vram_bytes)
        nearest = min(namesakes, key=lambda p: abs(p.vram_bytes - goal))
        other_size = abs(nearest.vram_bytes - goal) > _SAME_SIZE * nearest.vram_bytes
        if not other_size and "laptop" not in title.lower():
            return nearest
        return replace(
            nearest,
            name=f"{title} with {format_bytes(goal)} (figures of the {nearest.name})",
            vram_bytes=goal if other_size else nearest.vram_bytes,
        )
    return None if total_bytes is None else _unknown_card(title, total_bytes)


def _without_size(name: str) -> str:
    return re.sub(r"-\d+gb$", "", name)


def _unknown_card(title: str, total_bytes: int) -> HardwareProfile:
    known = list(presets().values())
    distance = min(abs(p.vram_bytes - total_bytes) for p in known)
    similar = [p for p in known if abs(p.vram_bytes - total_bytes) == distance]
    slowest = {name: min(getattr(p, name) for p in similar) for name in (*RATES, "fp32_flops")}
    base = similar[0]
    return replace(
        base,
        name=f"unknown card {title}",
        slug="unknown-card",
        vendor="unknown",
        chip="unknown",
        capability=None,
        vram_bytes=total_bytes,
        context_bytes=min(base.context_bytes, total_bytes // 2),
        **slowest,
    )


def usual_host() -> HardwareProfile:
    """Return a profile whose host memory is that of most desktops, as beside every preset."""
    return next(iter(presets().values()))
