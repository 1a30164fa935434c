"""What slows this computer down, one sentence each, with what helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from offload_llama.hardware import HardwareProfile, format_bytes
from offload_llama.machine.cards import CardFacts
from offload_llama.machine.facts import Facts
from offload_llama.machine.system import SPILL_SETTING

# A desktop and a browser hold about this much of a card.
_USUAL_USE_BYTES = 600 * 2**20
_SLOW_LINK = 0.7
_SLOW_MEMORY = 0.6


def findings(
    facts: Facts,
    *,
    build: str | None,
    usable: bool,
    profile: HardwareProfile | None = None,
    measured: Mapping[str, float] | None = None,
) -> list[str]:
    """Return what could be better, as sentences.

    Args:
        facts: of this computer.
        build: which cards this torch is built for ("CUDA 13.0", "ROCm 7.0", "XPU", "CPU"), None
            where torch is missing.
        usable: whether torch finds a card.
        profile: the figures expected of the card (or of the host alone) that was measured.
        measured: figures measured, by the names of the profile's fields.
    """
    found = [*_wheel(facts, build)] if build is not None and not usable else []
    for card in facts.cards:
        found += [*_link(card), *_used(card)]
    found += [*_spill(facts), *_modules(facts, profile, measured or {})]
    if profile is not None:
        found += _slow_link(profile, measured or {})
    return found


def _wheel(facts: Facts, build: str) -> Iterator[str]:
    """Say which build of torch the cards here need, where this one finds none."""
    kinds = {"NVIDIA": "CUDA", "AMD": "ROCm", "Intel": "XPU"}
    for card in facts.cards:
        kind = kinds[card.vendor]
        if not build.startswith(kind):
            yield (
                f"{card.title} is here, but this torch is a {build} build, which cannot use it; "
                f"install torch again from PyTorch's {wheel_index(card, facts.system)} index "
                "(--index-url; the selector on PyTorch's start page writes the command)"
            )
        elif kind == "CUDA" and _driver_major(card) and wheel_index(card, "") not in _index(build):
            yield (
                f"{card.title} is here, but its driver {card.driver} is too old for this torch's "
                f"{build}; update the driver, or install torch from PyTorch's "
                f"{wheel_index(card, facts.system)} index"
            )
        else:
            yield (
                f"{card.title} is here and this torch is a {build} build, but it finds no card; "
                "see that its driver works and that CUDA_VISIBLE_DEVICES does not hide it"
            )


def wheel_index(card: CardFacts, system: str) -> str:
    """Return the name of PyTorch's package index whose builds drive a card.

    Source: CUDA 13 needs driver 580 and capability 7.5, CUDA 12.8 driver 570 (its minor versions
    run on 525 and later); code for capability 12 came with CUDA 12.8.
    """
    if card.vendor == "AMD":
        return "rocm (on Linux)" if system == "Windows" else "rocm"
    if card.vendor == "Intel":
        return "xpu"
    if card.capability is not None and card.capability < (7, 5):
        return "cu126"
    if 0 < _driver_major(card) < 580:
        return "cu128" if card.capability and card.capability >= (10, 0) else "cu126"
    return "cu130"


def _driver_major(card: CardFacts) -> int:
    major = card.driver.partition(".")[0]
    return int(major) if major.isdigit() else 0


def _index(build: str) -> tuple[str, ...]:
    """Return the indexes whose drivers also run a CUDA build."""
    major = build.removeprefix("CUDA ").partition(".")[0]
    return ("cu130",) if major == "13" else ("cu126", "cu128", "cu130")


def _link(card: CardFacts) -> Iterator[str]:
    width, width_max = card.width, card.width_max
    if width and width_max and width < width_max:
        yield (
            f"{card.title} runs on {width} of its {width_max} PCIe lanes, so offloaded layers load "
            f"at {100 * width // width_max} % of the speed; put it into the slot next to the "
            "processor, and see that no other card or drive shares its lanes"
        )
    slot, best = card.generation_slot, card.generation_max
    if slot and best and slot < best:
        yield (
            f"{card.title} could use PCIe {best}.0 but this slot allows {slot}.0, half the speed "
            "a generation; look for the PCIe generation in the firmware's settings, and do "
            "without a riser cable"
        )


def _used(card: CardFacts) -> Iterator[str]:
    used = card.used_bytes or 0
    if used > _USUAL_USE_BYTES:
        named = ", ".join(
            program.name
            + (f" ({format_bytes(program.held_bytes)})" if program.held_bytes is not None else "")
            for program in card.programs[:4]
        )
        yield (
            f"other programs hold {format_bytes(used)} of {card.title}"
            f"{f', among them {named}' if named else ''}; close them, or plan with what is free"
        )
    if card.display:
        yield (
            f"a display is attached to {card.title}, so the desktop shares it; "
            "connect it to the processor's own graphics if there is an outlet"
        )


def _spill(facts: Facts) -> Iterator[str]:
    if facts.system in ("Windows", "WSL") and any(c.vendor == "NVIDIA" for c in facts.cards):
        yield (
            f"on {facts.system} the driver moves device memory to host memory when the card is "
            f'full, which is slow and shows no error; set "{SPILL_SETTING}" to "Prefer No Sysmem '
            'Fallback" in the NVIDIA Control Panel'
        )


def _modules(
    facts: Facts, profile: HardwareProfile | None, measured: Mapping[str, float]
) -> Iterator[str]:
    rate = measured.get("host_dram_bytes_per_s")
    if len(facts.module_bytes) == 1:
        yield (
            f"this computer has one memory module of {format_bytes(facts.module_bytes[0])}: half "
            "the host memory's speed; add a second one like it in the slot for the other channel"
        )
    elif rate and profile and rate < _SLOW_MEMORY * profile.host_dram_bytes_per_s:
        yield (
            f"host memory copies at {rate / 1e9:.1f} GB/s where two modules reach about "
            f"{profile.host_dram_bytes_per_s / 1e9:.0f}; see that both channels hold a module and "
            "that the memory's rated speed (XMP or EXPO) is set in the firmware"
        )


def _slow_link(profile: HardwareProfile, measured: Mapping[str, float]) -> Iterator[str]:
    for field, way in (("h2d_bytes_per_s", "to"), ("d2h_bytes_per_s", "from")):
        rate, expected = measured.get(field), getattr(profile, field)
        if rate and rate < _SLOW_LINK * expected:
            yield (
                f"copies {way} the card reach {rate / 1e9:.1f} GB/s where {profile.name} allows "
                f"about {expected / 1e9:.0f}; look at its slot (lanes and PCIe generation), and "
                "at the power plan on a laptop"
            )
            return
