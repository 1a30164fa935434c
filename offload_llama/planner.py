"""What fits, where each layer's cache goes, and how fast it will be: decided before anything runs.

Sizes are bytes, times seconds. Nothing here imports torch, reads a file or looks at the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offload_llama.cost import Setup, decode_seconds, prefill_seconds
from offload_llama.cost.memory import (
    device_terms,
    growth_bytes,
    host_terms,
    ring_slots,
    tensor_bytes,
)
from offload_llama.errors import ConfigError
from offload_llama.hardware import HardwareProfile, format_bytes

MIB = 1 << 20
RESERVE_SHARE = 0.03
MIN_RESERVE_BYTES = 128 * MIB
AUTO_BATCH_CTX = 1024
"""Tokens each sequence is planned with where neither batch nor context is given."""
MAX_AUTO_BATCH = 64


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a decode step at full and at half the context, and to the first token.

    A step gives one token of each sequence. `ttft_s` is for one prompt that fills the context.
    """

    decode_s: float
    decode_half_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What may be used: bytes of the card, of the host (None: not looked at), and those kept free.

    `available_bytes` is what a process without a context of its own could take of the card.
    """

    available_bytes: int
    reserve_bytes: int
    ram_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """A run at full context: its bytes by name, what they are measured against, and its speed.

    `hosts` says for each layer whether it is offloaded. `kv_budget_bytes` is what resident rows
    and tails may take together while it runs (None: they never outgrow the card). `peak_bytes` is
    the planned peak of the tensors alone, the figure that a device's own counter shows.
    """

    setup: Setup
    profile: HardwareProfile
    budget: Budget
    hosts: tuple[bool, ...]
    device_bytes: dict[str, int]
    overhead_bytes: dict[str, int]
    host_bytes: dict[str, int]
    kv_budget_bytes: int | None

    @property
    def n_host(self) -> int:
        """Layers that are offloaded at full context."""
        return sum(self.hosts)

    @property
    def needed_bytes(self) -> int:
        """All of the card that the run takes, with what is kept free."""
        return sum(self.device_bytes.values())

    @property
    def available_bytes(self) -> int:
        return self.budget.available_bytes

    @property
    def fits(self) -> bool:
        """Whether the card holds it."""
        return self.needed_bytes <= self.available_bytes

    @property
    def host_fits(self) -> bool:
        """Whether the host holds what is offloaded; True where its memory was not looked at."""
        ram_bytes = self.budget.ram_bytes
        return ram_bytes is None or sum(self.host_bytes.values()) <= ram_bytes

    @property
    def peak_bytes(self) -> int:
        return tensor_bytes(self.device_bytes)

    @property
    def ring_slots(self) -> int | None:
        """Slots of the ring, None if nothing is offloaded."""
        return ring_slots(self.setup, self.n_host) if self.n_host else None

    @property
    def decode_s(self) -> float:
        """Seconds of a decode step at full context."""
        return decode_seconds(self.setup, self.profile, self.hosts, self.setup.ctx)

    @property
    def predicted(self) -> Speed:
        """Speed of this placement; at half the context, of the placement it would have there."""
        setup, half = self.setup, max(2, self.setup.ctx // 2)
        return Speed(
            decode_s=self.decode_s,
            decode_half_s=decode_seconds(setup, self.profile, self._hosts_at(half), half),
            ttft_s=prefill_seconds(setup, self.profile, self.hosts, setup.ctx - 1),
        )

    def _hosts_at(self, context: int) -> tuple[bool, ...]:
        """Return which layers are offloaded while the sequences have this many tokens."""
        if self.kv_budget_bytes is None or self.n_host == 0:
            return self.hosts
        order = [layer for layer in spill_order(len(self.hosts)) if self.hosts[layer]]
        shorter = replace(self.setup, ctx=context)
        for n_host in range(self.n_host + 1):
            terms, _ = device_terms(shorter, self.profile, n_host)
            if terms["kv_resident"] + terms["tails"] <= self.kv_budget_bytes:
                gone = set(order[:n_host])
                return tuple(layer in gone for layer in range(len(self.hosts)))
        return self.hosts


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


def spread(n_layers: int, n_host: int) -> tuple[bool, ...]:
    """Return which layers are offloaded if n_host of them are."""
    gone = set(spill_order(n_layers)[:n_host])
    return tuple(layer in gone for layer in range(n_layers))


def budget_of(
    profile: HardwareProfile,
    *,
    free_bytes: int | None = None,
    reserve_bytes: int | None = None,
    ram_bytes: int | None = None,
) -> Budget:
    """Return the budget: what is really free of the card, or all of it if nobody looked.

    Args:
        profile: the card.
        free_bytes: bytes that a process without a context of its own could take.
        reserve_bytes: bytes to keep free; a share of the card if None.
        ram_bytes: host memory that may be used.

    Raises:
        ConfigError: nothing is left beside the reserve.
    """
    available = profile.vram_bytes if free_bytes is None else free_bytes
    if reserve_bytes is None:
        usual = max(MIN_RESERVE_BYTES, round(RESERVE_SHARE * available))
        reserve_bytes = min(usual, available // 10)
    if not 0 <= reserve_bytes < available:
        raise ConfigError(
            f"--reserve {format_bytes(reserve_bytes)} leaves nothing of the "
            f"{format_bytes(available)} that {profile.name} has; keep less free"
        )
    return Budget(available_bytes=available, reserve_bytes=reserve_bytes, ram_bytes=ram_bytes)


def plan_for(
    setup: Setup,
    profile: HardwareProfile,
    budget: Budget,
    hosts: Sequence[bool],
    *,
    follows: bool = False,
) -> MemoryPlan:
    """Return the plan of a given placement.

    Args:
        setup: the model and its numbers.
        profile: the card.
        budget: what may be used.
        hosts: for each layer, whether it is offloaded at full context.
        follows: whether layers stay on the card until the context needs their place.
    """
    n_host = sum(hosts)
    terms, parts = device_terms(setup, profile, n_host)
    terms["reserve"] = budget.reserve_bytes
    kv_budget = None
    if follows and n_host:
        held = terms["kv_resident"] + terms["tails"]
        rest = sum(terms.values()) - held
        # The cache counts the buffer that is being replaced too, as the activations do.
        kv_budget = max(budget.available_bytes - rest, held) + growth_bytes(setup)
    return MemoryPlan(
        setup=setup,
        profile=profile,
        budget=budget,
        hosts=tuple(hosts),
        device_bytes=terms,
        overhead_bytes=parts,
        host_bytes=host_terms(setup, n_host),
        kv_budget_bytes=kv_budget,
    )


def auto(setup: Setup, profile: HardwareProfile, budget: Budget) -> MemoryPlan:
    """Return the plan that keeps as many layers on the card as fit at full context.

    A resident layer costs no time on the link, so of the exact placements the one with the most
    resident layers is the fastest. If not even all layers offloaded fit, that plan is returned,
    and `fits` says so.
    """
    n_layers = setup.config.n_layers
    low, high = 0, n_layers
    while low < high:
        middle = (low + high) // 2
        if plan_for(setup, profile, budget, spread(n_layers, middle)).fits:
            high = middle
        else:
            low = middle + 1
    # One layer offloaded needs the ring as well, and with small caches that takes more than it
    # gives: the bytes are not monotone there, so the bisection may end beside the best.
    for n_host in (0, max(0, low - 1), low):
        plan = plan_for(setup, profile, budget, spread(n_layers, n_host), follows=True)
        if plan.fits:
            return plan
    return plan


def with_kv_limit(
    setup: Setup, profile: HardwareProfile, budget: Budget, limit_bytes: int
) -> MemoryPlan:
    """Return the plan whose resident rows and tails take at most `limit_bytes` of the card."""
    n_layers = setup.config.n_layers
    for n_host in range(n_layers + 1):
        hosts = spread(n_layers, n_host)
        plan = plan_for(setup, profile, budget, hosts, follows=True)
        if plan.device_bytes["kv_resident"] + plan.device_bytes["tails"] <= limit_bytes:
            break
    return replace(plan, kv_budget_bytes=limit_bytes if plan.n_host else None)


def largest(good: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 1 to the limit that is good, 0 if none is.

    What is good up to some number and not beyond is found by halving.
    """
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


def max_batch(
    setup: Setup, profile: HardwareProfile, budget: Budget, limit: int = MAX_AUTO_BATCH
) -> int:
    """Return how many sequences of this context the card holds with every layer offloaded or not.

    0 means that not even one does.
    """

    def fits(batch: int) -> bool:
        plan = auto(replace(setup, batch=batch), profile, budget)
        return plan.fits and plan.host_fits

    return largest(fits, limit)
