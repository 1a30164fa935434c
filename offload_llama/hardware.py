"""What a card, its link and its host can do: presets and their overrides.

Presets are read from the tables in `offload_llama/data`; nothing here measures anything and
nothing imports torch. Sizes are bytes, rates bytes or operations per second.
"""

from __future__ import annotations

import csv
import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any

from offload_llama.errors import ConfigError

GIB = 2**30

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as "8GiB", "8GB" (8e9) or "1048576" names.

    Raises:
        ConfigError: the text is not a number with one of the known units.
    """
    match = _AMOUNT.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigError(f"cannot read {text!r} as a size; write for example 8GiB, 512MiB or 8GB")
    return round(float(match[1]) * _UNITS[unit])


def format_bytes(n_bytes: float) -> str:
    """Return a size as people read it: "1.50 GiB", "512 MiB", "17 B"."""
    size, sign = abs(n_bytes), "-" if n_bytes < 0 else ""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            value = size / scale
            shown = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"
            return f"{sign}{shown} {unit}"
    return f"{sign}{size:.0f} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One card in one computer.

    `mem_bytes_per_s`, `fp16_flops` (matrix products with fp32 accumulation) and `fp32_flops` are
    the data sheet's peaks. `h2d_bytes_per_s` and `d2h_bytes_per_s` are what large pinned copies
    reach; `pageable_factor` is the share that pageable ones do, `duplex_factor` the share each
    direction keeps while both run. `copy_latency_s` and `kernel_s` are the least a copy and a
    kernel take, `launch_s` what queueing one costs the host. `context_bytes` is what the driver
    and the runtime keep for themselves, `workspace_bytes` what their matrix products do.
    `capability` is CUDA's, None where there is no such thing.

    Raises:
        ConfigError: a figure is not positive, or the context leaves no memory.
    """

    name: str
    slug: str
    vendor: str
    chip: str
    capability: tuple[int, int] | None
    vram_bytes: int
    mem_bytes_per_s: float
    fp16_flops: float
    fp32_flops: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    host_dram_bytes_per_s: float
    cpu_attention_bytes_per_s: float
    duplex_factor: float = 0.83
    pageable_factor: float = 0.55
    # A 1 MiB copy reaches 94 % of the link's rate and a 2 MiB one 97 %: 2.7 us at 24 GB/s.
    copy_latency_s: float = 2.7e-6
    kernel_s: float = 2e-6
    launch_s: float = 4e-6
    # Recalled: 300 to 500 MB are gone from a desktop card once a PyTorch process has touched it.
    context_bytes: int = 400 * 2**20
    # cuBLAS's scratch memory on one stream. Source: PyTorch's CUDA notes, CUBLAS_WORKSPACE_CONFIG,
    # default ":4096:2:16:8" (two of 4096 KiB, eight of 16 KiB).
    workspace_bytes: int = 8320 * 2**10
    # Device bytes that runs on this computer took beyond their plan, and the most host memory that
    # it page-locks (None where no limit was met): both known only once measured.
    learnt_bytes: int = 0
    max_pin_bytes: int | None = None
    flash_attention: bool = True
    bf16: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            least_ok = value >= 0 if field.name in _MAY_BE_ZERO else value > 0
            if not least_ok or not math.isfinite(value):
                raise ConfigError(f"{field.name} of {self.name} must be positive, got {value}")
        for name in ("duplex_factor", "pageable_factor"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name} of {self.name} must be at most 1")
        if self.context_bytes >= self.vram_bytes:
            raise ConfigError(
                f"{self.name}: {format_bytes(self.vram_bytes)} of memory leave nothing beside the "
                f"{format_bytes(self.context_bytes)} of the driver's context; add context=0"
            )


_MAY_BE_ZERO = frozenset(
    {
        "context_bytes",
        "workspace_bytes",
        "copy_latency_s",
        "kernel_s",
        "launch_s",
        "learnt_bytes",
        "max_pin_bytes",
    }
)

# What a user may write behind `?`, the field it sets and how it is read.
_OVERRIDES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "vram": ("vram_bytes", parse_bytes),
    "context": ("context_bytes", parse_bytes),
    "workspace": ("workspace_bytes", parse_bytes),
    "mem": ("mem_bytes_per_s", parse_bytes),
    "h2d": ("h2d_bytes_per_s", parse_bytes),
    "d2h": ("d2h_bytes_per_s", parse_bytes),
    "dram": ("host_dram_bytes_per_s", parse_bytes),
    "cpu_attention": ("cpu_attention_bytes_per_s", parse_bytes),
    "fp16_flops": ("fp16_flops", float),
    "fp32_flops": ("fp32_flops", float),
    "duplex": ("duplex_factor", float),
    "pageable": ("pageable_factor", float),
    "copy_latency": ("copy_latency_s", float),
    "kernel": ("kernel_s", float),
    "launch": ("launch_s", float),
}


def slug(name: str) -> str:
    """Return a card's name as users type it: "RTX 3060 12 GB" becomes "rtx-3060-12gb"."""
    joined = re.sub(r"(\d) (GB)\b", r"\1\2", name.strip())
    return re.sub(r"[^a-z0-9]+", "-", joined.lower()).strip("-")


def _table(file_name: str) -> list[dict[str, str]]:
    text = (resources.files("offload_llama") / "data" / file_name).read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


# Shader fp32 rate as a share of the fp16 matrix rate, by CUDA capability or, for the others, by
# chip family. Source: the vendors' data sheets (RTX 2060: 6.45 of 25.8, RTX 3060: 12.7 of 25.5,
# RTX 4060: 15.1 of 30.2, Arc B580: 13.7 of 109, RX 7600: 21.8 of 43.5, RX 9060 XT: 25.6 of 103).
_FP32_SHARE = {"7.5": 0.25, "xe": 0.125, "gfx1200": 0.25}


def _profile(row: Mapping[str, str], links: list[dict[str, str]]) -> HardwareProfile:
    kind = row["cc_or_gfx"]
    capability: tuple[int, int] | None = None
    if re.fullmatch(r"\d+\.\d+", kind):
        major, minor = kind.split(".")
        capability = (int(major), int(minor))
    named = {link["name"]: link for link in links}
    # The host beside a preset: the commonest two-module memory of desktop boards.
    dram = named["DDR4-3200 x2"]
    link = float(row["h2d_pinned_usable_gbs"]) * 1e9
    fp16 = float(row["fp16_matrix_tflops_fp32acc"]) * 1e12
    return HardwareProfile(
        name=row["name"],
        slug=slug(row["name"]),
        vendor=row["vendor"],
        chip=row["chip"],
        capability=capability,
        vram_bytes=round(float(row["vram_gb"]) * GIB),
        mem_bytes_per_s=float(row["mem_bw_gbs"]) * 1e9,
        fp16_flops=fp16,
        fp32_flops=fp16 * _FP32_SHARE.get(kind, 0.5),
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        host_dram_bytes_per_s=float(dram["usable_gbs"]) * 1e9,
        cpu_attention_bytes_per_s=float(dram["cpu_attention_default_gbs"]) * 1e9,
        duplex_factor=float(named["full_duplex_per_direction"]["usable_gbs"]),
        pageable_factor=float(named["pageable_over_pinned_h2d"]["usable_gbs"]),
        flash_attention=row["flash_attn2"] != "0",
        bf16=row["bf16_native"] == "1",
    )


@functools.cache
def presets() -> Mapping[str, HardwareProfile]:
    """Return every card we have figures for, by slug."""
    links = _table("host_link_presets.csv")
    found = (_profile(row, links) for row in _table("gpu_presets.csv"))
    return {profile.slug: profile for profile in found}


def card(name: str) -> HardwareProfile:
    """Return a preset, with overrides: "rtx-3060-12gb" or "rtx-3060-12gb?vram=8GiB&h2d=12e9".

    Raises:
        ConfigError: the card or an override is unknown, or a value cannot be read.
    """
    base, mark, query = name.partition("?")
    known = presets()
    wanted = slug(base)
    if wanted not in known:
        # Cards of one name in several sizes come before cards of a similar name.
        close = [each for each in known if each.startswith(f"{wanted}-")]
        close = close or difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
        raise ConfigError(f"no figures for a card named {base!r}; {hint}")
    profile = known[wanted]
    return replace(profile, **parse_overrides(query)) if mark else profile


def simulated_card(name: str) -> HardwareProfile:
    """Return a card as the simulator counts it: tensors and nothing beside them.

    Its matrix products need no scratch memory, unless the name says so ("?workspace=8MiB").

    Raises:
        ConfigError: as for `card`.
    """
    query = name.partition("?")[2]
    given = parse_overrides(query) if query else {}
    return replace(card(name), workspace_bytes=given.get("workspace_bytes", 0))


def parse_overrides(query: str) -> dict[str, Any]:
    """Return the profile fields that a text such as "vram=8GiB&h2d=12e9" sets.

    Raises:
        ConfigError: a key is unknown or given twice, or its value cannot be read.
    """
    values: dict[str, Any] = {}
    for item in query.split("&"):
        key, equals, text = item.partition("=")
        if key not in _OVERRIDES or not equals:
            raise ConfigError(f"unknown card setting {item!r}; use {', '.join(_OVERRIDES)}")
        field, read = _OVERRIDES[key]
        if field in values:
            raise ConfigError(f"card setting {key!r} is given twice")
        try:
            values[field] = read(text)
        except ValueError:
            raise ConfigError(
                f"card setting {item!r} needs a number, for example {key}=1"
            ) from None
    return values
