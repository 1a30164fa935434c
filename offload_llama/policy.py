"""Where each layer's KV cache lives: one `Placement` per layer, decided as plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass

from offload_llama.errors import ConfigError

POLICY_HELP = "gpu, offload, gpu-layers:N or layers:0-11=gpu,12-29=offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One layer's choice: `store` is "resident" (on the card) or "host" (offloaded, streamed)."""

    layer: int
    store: str
    reason: str


def spill_order(n_layers: int) -> list[int]:
    """Return the layers in the order in which they leave the card.

    Bit-reversed and from the last layer, so that after any number of departures the offloaded
    layers are spread among the resident ones, and each state contains the one before it.
    Source: van der Corput's sequence in base 2.
    """
    bits = max(1, (n_layers - 1).bit_length())
    reversed_bits = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(n_layers)]
    order = sorted(range(n_layers), key=reversed_bits.__getitem__)
    return [n_layers - 1 - i for i in order]


def place(policy: str, n_layers: int) -> tuple[Placement, ...]:
    """Return one placement per layer for a policy as the user spells it.

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
    gone = set(spill_order(n_layers)[: n_layers - keep])
    return tuple(
        Placement(
            layer=i,
            store="host" if i in gone else "resident",
            reason=f"policy {text}: {'offloaded, spread' if i in gone else 'one of those kept'}",
        )
        for i in range(n_layers)
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
