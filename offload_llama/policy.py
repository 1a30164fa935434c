"""From a policy as the user spells it to one `Placement` per layer, decided as plain data."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offload_llama.cost import Setup
from offload_llama.errors import ConfigError
from offload_llama.hardware import HardwareProfile, format_bytes, parse_bytes
from offload_llama.planner import (
    Budget,
    MemoryPlan,
    auto,
    largest,
    plan_for,
    spill_order,
    spread,
    with_kv_limit,
)

POLICY_HELP = (
    "auto, gpu, offload, gpu-layers:N, budget:1.5GiB, layers:0-11=gpu,12-29=offload or @FILE"
)

CONTEXT_STEP = 256
"""Contexts are searched in steps of this many tokens."""

__all__ = [
    "POLICY_HELP",
    "Placement",
    "max_context",
    "place",
    "placements_of",
    "plan",
    "spill_order",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One layer's choice: `store` is "resident" (on the card) or "host" (offloaded, streamed)."""

    layer: int
    store: str
    reason: str


def plan(
    policy: str, setup: Setup, profile: HardwareProfile, budget: Budget
) -> tuple[MemoryPlan, tuple[Placement, ...]]:
    """Return the plan of a policy and, at full context, each layer's placement with its reason.

    Whether it fits is for the caller to ask: a policy given by hand is planned as it stands.

    Raises:
        ConfigError: the policy is unknown, or names a layer that is not there, twice or never.
    """
    text, n_layers = policy.strip(), setup.config.n_layers
    if text == "auto":
        found = auto(setup, profile, budget)
        return found, _explained(found)
    if text.startswith("budget:"):
        limit_bytes = parse_bytes(text.removeprefix("budget:"))
        found = with_kv_limit(setup, profile, budget, limit_bytes)
        return found, _reasoned(
            found.hosts,
            f"policy {text}: within the {format_bytes(limit_bytes)} for the cache",
            f"policy {text}: no room in {format_bytes(limit_bytes)} at full context",
        )
    placements = place(text, n_layers)
    hosts = [placement.store == "host" for placement in placements]
    return plan_for(setup, profile, budget, hosts), placements


def max_context(
    setup: Setup,
    profile: HardwareProfile,
    budget: Budget,
    *,
    policy: str = "auto",
    min_tps: float | None = None,
) -> MemoryPlan | None:
    """Return the plan of the longest context that fits (and is this fast), or None.

    Args:
        setup: whose `ctx` does not count.
        profile: the card.
        budget: what may be used.
        policy: as for `plan`.
        min_tps: tokens per second of each sequence, at the full context.
    """
    step = min(CONTEXT_STEP, setup.config.max_seq_len)

    def at(steps: int) -> MemoryPlan:
        return plan(policy, replace(setup, ctx=steps * step), profile, budget)[0]

    def good(steps: int) -> bool:
        found = at(steps)
        if not (found.fits and found.host_fits):
            return False
        return min_tps is None or found.decode_s <= 1 / min_tps

    steps = largest(good, setup.config.max_seq_len // step)
    return at(steps) if steps else None


def _explained(found: MemoryPlan) -> tuple[Placement, ...]:
    """Return the placements of an automatic plan."""
    if found.n_host == 0:
        return _reasoned(found.hosts, "auto: every layer fits the card at full context", "")
    left = found.available_bytes - found.needed_bytes
    room = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
    return _reasoned(
        found.hosts,
        f"auto: fits the card at full context ({room})",
        "auto: leaves the card before the context is full; spread among the others",
    )


def _reasoned(hosts: Sequence[bool], resident: str, offloaded: str) -> tuple[Placement, ...]:
    return tuple(
        Placement(
            layer=layer,
            store="host" if host else "resident",
            reason=offloaded if host else resident,
        )
        for layer, host in enumerate(hosts)
    )


def place(policy: str, n_layers: int) -> tuple[Placement, ...]:
    """Return one placement per layer for a policy that needs no plan.

    Raises:
        ConfigError: the policy is unknown, or names a layer that is not there, twice or never.
    """
    text = policy.strip()
    if text == "gpu":
        return _uniform(n_layers, "resident", "policy gpu: every layer on the card")
    if text == "offload":
        return _uniform(n_layers, "host", "policy offload: every layer in host memory")
    if text.startswith("gpu-layers:"):
        return _gpu_layers(text, n_layers)
    if text.startswith("layers:"):
        return _explicit(text, n_layers)
    if text.startswith("@"):
        return _from_file(Path(text[1:]), n_layers)
    raise ConfigError(f"unknown KV policy {policy!r}; use {POLICY_HELP}")


def _uniform(n_layers: int, store: str, reason: str) -> tuple[Placement, ...]:
    return tuple(Placement(layer=i, store=store, reason=reason) for i in range(n_layers))


def _gpu_layers(text: str, n_layers: int) -> tuple[Placement, ...]:
    number = text.removeprefix("gpu-layers:")
    if not number.isascii() or not number.isdigit():
        raise ConfigError(
            f"gpu-layers needs a whole number of layers, got {number!r}; "
            f"for example gpu-layers:{n_layers // 2}"
        )
    keep = int(number)
    if keep > n_layers:
        raise ConfigError(f"gpu-layers:{keep} asks for more layers than the model's {n_layers}")
    return _reasoned(
        spread(n_layers, n_layers - keep),
        f"policy {text}: one of those kept",
        f"policy {text}: offloaded, spread",
    )


_RANGE = re.compile(r"(\d+)(?:-(\d+))?=(gpu|offload)", re.ASCII)


def _explicit(text: str, n_layers: int) -> tuple[Placement, ...]:
    chosen: dict[int, str] = {}
    for item in text.removeprefix("layers:").split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise ConfigError(
                f"cannot read {item.strip()!r} in KV policy {text!r}; write ranges like 0-11=gpu"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= n_layers:
            raise ConfigError(
                f"{item.strip()!r} names layers outside 0-{n_layers - 1} in KV policy {text!r}"
            )
        for layer in range(first, last + 1):
            if layer in chosen:
                raise ConfigError(f"layer {layer} is placed twice in KV policy {text!r}")
            chosen[layer] = "resident" if match[3] == "gpu" else "host"
    missing = [i for i in range(n_layers) if i not in chosen]
    if missing:
        raise ConfigError(
            f"KV policy {text!r} leaves out layer {missing[0]}; name all of 0-{n_layers - 1}"
        )
    return tuple(
        Placement(layer=i, store=chosen[i], reason="placed by hand") for i in range(n_layers)
    )


def _from_file(path: Path, n_layers: int) -> tuple[Placement, ...]:
    """Return the placements a file holds: a policy in words, or the JSON of a saved plan."""
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"KV policy @{path}: cannot be read ({error})") from error
    if not text.startswith("{"):
        if text.startswith("@"):
            raise ConfigError(f"KV policy @{path}: the file names another file; write a policy")
        return place(text, n_layers)
    try:
        entries = json.loads(text)["placements"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"KV policy @{path}: no saved plan ({error!r}); make one with offload-llama plan --json"
        ) from error
    return placements_of(entries, n_layers, f"@{path}")


def placements_of(entries: object, n_layers: int, name: str) -> tuple[Placement, ...]:
    """Return the placements of a saved plan's list.

    Args:
        entries: a list of objects with `layer` and `store`.
        n_layers: the model's layers.
        name: what the message calls the plan.

    Raises:
        ConfigError: it is not one entry for each layer, in order.
    """
    stores = []
    for layer, entry in enumerate(entries if isinstance(entries, list) else []):
        store = entry.get("store") if isinstance(entry, dict) else None
        if store not in ("resident", "host") or entry.get("layer") != layer:
            raise ConfigError(f"{name}: placement {layer} of the saved plan cannot be read")
        stores.append(store)
    if len(stores) != n_layers:
        raise ConfigError(
            f"{name}: the saved plan places {len(stores)} layers, this model has {n_layers}; "
            "plan again for this model"
        )
    return tuple(
        Placement(layer=layer, store=store, reason=f"replayed from {name}")
        for layer, store in enumerate(stores)
    )
