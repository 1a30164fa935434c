"""Happens-before: which accesses to the same bytes are ordered, and which race.

Every stream and the host is an actor with a vector clock: how far into each other actor's work it
is certain to be behind. An access that overlaps an earlier one of another actor, either of them a
write, must find that one in its clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from offload_llama.device.sim.errors import RaceError, SimError, UseAfterFreeError
from offload_llama.device.sim.site import Site
from offload_llama.device.sim.spans import Span, covers, overlap

VectorClock = dict[int, int]

# A log this long first drops what the host has already waited for.
_PRUNE_LENGTH = 16


class Actor:
    """The host, or one stream: whoever touches memory in an order of its own."""

    def __init__(self, actor_id: int, name: str) -> None:
        self.actor_id, self.name = actor_id, name
        self.clock: VectorClock = {actor_id: 0}

    def learn(self, other: VectorClock) -> None:
        """Everything in `other` is now ordered before this actor's next access."""
        clock = self.clock
        for actor_id, count in other.items():
            if clock.get(actor_id, 0) < count:
                clock[actor_id] = count


class Access:
    """One read or write of some bytes; `freed` marks one to memory that was given back since."""

    __slots__ = ("actor", "count", "freed", "op", "site", "span", "write")

    def __init__(
        self, actor: Actor, count: int, span: Span, write: bool, op: str, site: Site
    ) -> None:
        self.actor, self.count, self.span, self.write = actor, count, span, write
        self.op, self.site, self.freed = op, site, False

    def __str__(self) -> str:
        verb = "write" if self.write else "read"
        return (
            f"{verb} of bytes {self.span.lo}-{self.span.hi} by {self.op} on {self.actor.name} "
            f"({self.site})"
        )

    def as_freed(self, block_bytes: int) -> Access:
        """Return this access as one to memory that a new block of that size was cut from."""
        whole = Span(0, block_bytes, block_bytes)
        copy = Access(self.actor, self.count, whole, self.write, self.op, self.site)
        copy.freed = True
        return copy


class Memory:
    """A device block or a pinned host region, with the accesses that later ones must respect."""

    __slots__ = ("__weakref__", "label", "log")

    def __init__(self, label: str) -> None:
        self.label = label
        self.log: list[Access] = []


def pending(log: Iterable[Access], clock: VectorClock) -> list[Access]:
    """Return the accesses that are not ordered before work with this clock."""
    return [a for a in log if clock.get(a.actor.actor_id, 0) < a.count]


def conflict(
    memory: Memory, actor: Actor, span: Span, write: bool, op: str, site: Site
) -> SimError | None:
    """Return the error that this access would be, None if everything before it is ordered."""
    clock = actor.clock
    for a in memory.log:
        if (
            a.actor is actor
            or not (write or a.write)
            or clock.get(a.actor.actor_id, 0) >= a.count
            or not overlap(a.span, span)
        ):
            continue
        this = Access(actor, 0, span, write, op, site)
        if a.freed:
            return UseAfterFreeError(
                f"{this} of {memory.label} may take over freed memory before the {a}; keep the "
                "tensor alive until an event after that access was waited for"
            )
        return RaceError(f"{this} of {memory.label} is not ordered after the {a}")
    return None


def note(
    memory: Memory,
    actor: Actor,
    host: Actor,
    span: Span,
    write: bool,
    op: str,
    site: Site,
) -> None:
    """Remember an access, and forget those that it stands for from now on.

    A write replaces what it covers, since whoever is ordered after it is ordered after those too.
    """
    log = memory.log
    count = actor.clock[actor.actor_id]
    if write:
        log[:] = [a for a in log if not covers(span, a.span)]
    else:
        for a in log:
            if a.actor is actor and not a.write and a.span == span:
                a.count, a.op, a.site = count, op, site
                return
        log[:] = [a for a in log if a.actor is not actor or a.write or not covers(span, a.span)]
    if len(log) > _PRUNE_LENGTH:
        # The host takes part in every later submission, so what it knows is always ordered.
        log[:] = pending(log, host.clock)
    log.append(Access(actor, count, span, write, op, site))
