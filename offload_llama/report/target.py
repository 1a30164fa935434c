"""Which card a plan is for: one that was named, the one in this computer, or an assumed one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload_llama.errors import ConfigError, DeviceError
from offload_llama.hardware import HardwareProfile, card, format_bytes, presets, simulated_card

if TYPE_CHECKING:
    from offload_llama.machine import CardFacts

ASSUMED = "rtx-3060-12gb"
# Where only a size is given: the commonest card of each size, from the tables in data/.
_BY_SIZE = ("rtx-2060", "rtx-4060", "rtx-3080", ASSUMED)
HOW_TO_NAME_ONE = f"--gpu NAME names one (like {ASSUMED}), --vram SIZE a size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A card, and what may be used of it and of the host.

    `options` are what to type for the same target, `note` says what was presumed. `free_bytes`
    None is all of the card, `ram_bytes` None is host memory that nobody looked at. `title` is the
    driver's name of a card that is here.
    """

    profile: HardwareProfile
    options: tuple[str, ...] = ()
    note: str | None = None
    free_bytes: int | None = None
    ram_bytes: int | None = None
    title: str | None = None

    @property
    def key(self) -> str | None:
        """What the measured figures of this card are kept under, None for one that is not here."""
        if self.title is None:
            return None
        from offload_llama.profiles import key_of

        return key_of(self.title)


def find_target(
    *, gpu: str | None, device: str = "auto", vram_bytes: int | None, ram_bytes: int | None
) -> Target:
    """Return the card that the options name.

    Raises:
        ConfigError: the card is unknown, or the options contradict each other.
        DeviceError: the card is not here.
    """
    simulated = device.removeprefix("sim:") if device.startswith("sim:") else None
    if gpu is not None and simulated is not None and card(gpu) != card(simulated):
        raise ConfigError(f"--gpu {gpu} contradicts --device {device}; give one of them")
    if gpu is not None:
        target = Target(profile=card(gpu), options=("--gpu", gpu))
    elif simulated is not None:
        target = Target(profile=simulated_card(simulated), options=("--device", device))
    elif device == "auto" and vram_bytes is not None:
        target = _of_size(vram_bytes)
    else:
        target = _of_this_computer(device)
    if ram_bytes is not None:
        target = replace(target, ram_bytes=ram_bytes)
    if vram_bytes is None:
        return target
    return _limited(target, vram_bytes)


def _limited(target: Target, vram_bytes: int) -> Target:
    """Return the target with no more than `vram_bytes` of its card."""
    there = target.profile.vram_bytes
    if vram_bytes > there:
        raise ConfigError(
            f"--vram {format_bytes(vram_bytes)} contradicts the card: {target.profile.name} has "
            f"{format_bytes(there)}; leave --vram out, or name a larger card"
        )
    free_bytes = vram_bytes
    if target.free_bytes is not None and target.free_bytes < vram_bytes:
        free_bytes = target.free_bytes
    options = target.options
    if "--vram" not in options:
        options += ("--vram", plain_size(vram_bytes))
    return replace(target, free_bytes=free_bytes, options=options)


def plain_size(n_bytes: int) -> str:
    """Return a size as it is typed, exactly: 8GiB, 512MiB, 8GB or a number of bytes."""
    for unit, scale in (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6)):
        if n_bytes % scale == 0:
            return f"{n_bytes // scale}{unit}"
    return str(n_bytes)


def _of_size(vram_bytes: int) -> Target:
    cards = [presets()[name] for name in _BY_SIZE]
    profile = next((each for each in cards if each.vram_bytes >= vram_bytes), cards[-1])
    note = f"speed assumed: that of a {profile.name}; --gpu NAME names the card"
    if profile.vram_bytes < vram_bytes:
        size = format_bytes(vram_bytes)
        profile = replace(
            profile, name=f"{size} card (figures of the {profile.name})", vram_bytes=vram_bytes
        )
    return Target(profile=profile, note=note, options=("--vram", plain_size(vram_bytes)))


def _of_this_computer(device: str) -> Target:
    if device == "cpu":
        raise ConfigError(
            "--device cpu has no memory of its own to plan; name a card: --gpu " + ASSUMED
        )
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cuda", "xpu") or not re.fullmatch(r"\d*", number, re.ASCII):
        raise ConfigError(
            f"unknown device {device!r}; use auto, cuda, cuda:N, xpu or a simulated card like "
            f"sim:{ASSUMED}"
        )
    # Not above: a plan for a named card asks this computer nothing, and is the quicker for it.
    from offload_llama.machine import gather

    cards = [each for each in gather().cards if _is_kind(each, kind)]
    index = int(number or 0)
    if index < len(cards):
        found = _of_card(cards[index], device)
        if found is not None:
            return found
    if device != "auto":
        raise DeviceError(f"no card for --device {device} in this computer; {HOW_TO_NAME_ONE}")
    return Target(
        profile=card(ASSUMED),
        options=("--gpu", ASSUMED),
        note=f"no card in this computer; assumed: {card(ASSUMED).name} ({HOW_TO_NAME_ONE})",
    )


def _is_kind(facts: CardFacts, kind: str) -> bool:
    return kind == "auto" or (kind == "xpu") == (facts.vendor == "Intel")


def _of_card(facts: CardFacts, device: str) -> Target | None:
    """Return a card that is here, with what was measured on it, or None if it is not known."""
    from offload_llama.machine import host_memory_for_cache
    from offload_llama.profiles import apply, key_of, load_measured, profile_of_card

    profile = profile_of_card(facts.title, facts.total_bytes)
    if profile is None:
        return None
    free_bytes = None
    note = f"the card in this computer: {facts.title}"
    if facts.total_bytes is not None and facts.used_bytes is not None:
        free_bytes = facts.total_bytes - facts.used_bytes
        if facts.used_bytes:
            note += f", of which others hold {format_bytes(facts.used_bytes)}"
    measured = load_measured(key_of(facts.title))
    if measured is not None:
        note += "; with figures measured here"
    return Target(
        profile=apply(profile, measured),
        options=() if device == "auto" else ("--device", device),
        note=note,
        free_bytes=free_bytes,
        ram_bytes=host_memory_for_cache(),
        title=facts.title,
    )
