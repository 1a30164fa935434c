"""The simulated card: what tests ask it, and what its parts share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from offload_llama.device.sim.clock import Clock, Lane, Record, Work
from offload_llama.device.sim.device_memory import Allocation, DeviceMemoryModel
from offload_llama.device.sim.errors import SimError
from offload_llama.device.sim.execution import Executor, Queue
from offload_llama.device.sim.hazards import Actor, Memory, conflict, note
from offload_llama.device.sim.host_memory import HostMemory
from offload_llama.device.sim.site import Site, caller
from offload_llama.device.sim.spans import Span
from offload_llama.device.sim.streams import SimEvent, SimStream, stream_and_event_types
from offload_llama.hardware import HardwareProfile

Touched = Sequence[tuple[Memory, Span]]


class HostWait(NamedTuple):
    """One time the host waited for the card."""

    op: str
    site: Site
    waited_s: float

    @property
    def where(self) -> str:
        """The line of the engine that waited."""
        return str(self.site)


class Card:
    """One simulated card and its link.

    Attributes:
        profile: its figures.
        values: False keeps shapes only; reading a value then gives zeros.
        strict: True raises mistakes where they happen; False collects them in `errors`.
        errors: every mistake reported, in order.
        syncs: every time the host waited (the last few hundred thousand).
        n_launches: kernels and copies queued.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        *,
        values: bool = True,
        order: str = "inorder",
        strict: bool = True,
        seed: int = 0,
    ) -> None:
        self.profile, self.values, self.strict = profile, values, strict
        self.errors: list[SimError] = []
        self.syncs: deque[HostWait] = deque(maxlen=500_000)
        self.n_launches = 0
        self.clock = Clock(profile.duplex_factor)
        self.memory = DeviceMemoryModel(
            profile.vram_bytes - profile.context_bytes, profile.vram_bytes
        )
        self.host_memory = HostMemory()
        self.executor = Executor(order, seed)
        self.last_error = 0
        self.host = Actor(0, "the host")
        self._n_streams = 0
        self._copied: dict[tuple[str, str], int] = {}
        self.stream_type, self.event_type = stream_and_event_types(self)
        self.streams: list[SimStream] = []
        self.default = self.stream_type()
        self.current: SimStream = self.default

    # What tests ask

    def now(self) -> float:
        """Return the host's virtual time in seconds."""
        return self.clock.host_s

    @property
    def timeline(self) -> list[Record]:
        """Return what ran so far, in order of its end or start, as far as the host's time."""
        self.clock.settle()
        return list(self.clock.timeline)

    @property
    def allocations(self) -> list[Allocation]:
        """Return the device allocations made, in order."""
        return list(self.memory.allocations)

    @property
    def n_allocs(self) -> int:
        """Return how many device allocations were made."""
        return self.memory.n_allocs

    @property
    def live_bytes(self) -> int:
        """Return the device bytes that tensors hold."""
        return self.memory.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the most that `live_bytes` has been."""
        return self.memory.peak_bytes

    @property
    def pinned_bytes(self) -> int:
        """Return the host bytes that are page-locked now, as the platform counts them."""
        return self.host_memory.pinned_bytes

    def bytes(self, kind: str, stream: SimStream | str | None = None) -> int:
        """Return the bytes copied over the link so far, of one stream if one is named.

        Args:
            kind: "h2d" or "d2h".
            stream: a stream, or its name in the timeline.
        """
        wanted = stream.name if isinstance(stream, SimStream) else stream
        return sum(
            n
            for (direction, name), n in self._copied.items()
            if direction == kind and wanted in (None, name)
        )

    def forget(self) -> None:
        """Empty the records: timeline, waits, allocations, copied bytes. Time goes on."""
        self.clock.settle()
        self.clock.timeline.clear()
        self.syncs.clear()
        self.memory.forget()
        self._copied.clear()
        self.n_launches = 0

    # What tests switch on

    def refuse_pins_after(self, nbytes: int, *, pinned_empty: bool = False) -> None:
        """Let registrations fail that would pin more than this, and `pin_memory` too if asked."""
        self.host_memory.limit_bytes = nbytes
        self.host_memory.limit_pinned_empty = pinned_empty

    def take_memory(self, nbytes: int) -> None:
        """Let another program hold this much of the card."""
        self.memory.taken_by_others_bytes = nbytes

    # What the parts share

    def new_stream_state(self, stream: SimStream) -> tuple[Actor, Lane, Queue]:
        """Return the actor, lane and value queue of a new stream."""
        self._n_streams += 1
        name = "default" if self._n_streams == 1 else f"stream {self._n_streams - 1}"
        actor = Actor(self._n_streams, name)
        actor.learn(self.host.clock)
        self.streams.append(stream)
        return actor, self.clock.lane(name), self.executor.queue()

    def report(self, error: SimError) -> None:
        """Note a mistake, and raise it if the card is strict."""
        self.errors.append(error)
        if self.strict:
            raise error

    def launch(
        self,
        op: str,
        engine: str,
        seconds: float,
        reads: Touched,
        writes: Touched,
        action: Callable[[], object] | None,
        nbytes: int,
        site: Site,
    ) -> None:
        """Queue one operation on the current stream: its accesses, its time and its values.

        Raises:
            SimError: it races with something queued before, and the card is strict.
            torch.AcceleratorError: an earlier refusal of the runtime was never cleared.
        """
        if self.last_error and engine == "compute":
            code, self.last_error = self.last_error, 0
            raise torch.AcceleratorError(f"CUDA error {code} of an earlier call, never cleared")
        stream = self.current
        actor, host = stream.actor, self.host
        actor.learn(host.clock)
        actor.clock[actor.actor_id] += 1
        for write, touched in ((False, reads), (True, writes)):
            for memory, span in touched:
                if memory.log:
                    error = conflict(memory, actor, span, write, op, site)
                    if error is not None:
                        self.report(error)
                note(memory, actor, host, span, write, op, site)
        self.n_launches += 1
        self.clock.host_s += self.profile.launch_s
        self.clock.submit(stream.lane, Work(engine, op, nbytes, seconds, self.clock.host_s, site))
        if engine != "compute":
            key = (engine, stream.name)
            self._copied[key] = self._copied.get(key, 0) + nbytes
        if action is not None:
            self.executor.add(stream.queue, action)

    def host_access(self, memory: Memory, span: Span, write: bool, op: str) -> None:
        """Check an access of the host's own against what streams do to that memory."""
        error = conflict(memory, self.host, span, write, op, caller())
        if error is not None:
            self.report(error)

    def host_wait(self, event: SimEvent, op: str, site: Site | None = None) -> None:
        """Let the host wait for an event, on the clock and for its values."""
        if event.mark is None:
            return
        before_s = self.clock.host_s
        self._arrive(event)
        waited_s = self.clock.host_s - before_s
        self.syncs.append(HostWait(op, caller() if site is None else site, waited_s))

    def drain(self, op: str, site: Site) -> None:
        """Let the host wait for the current stream, as a blocking operation does."""
        self.host_wait(self.current.record_event(), op, site)

    def synchronize(self) -> None:
        """Let the host wait for every stream."""
        site, before_s = caller(), self.clock.host_s
        for stream in self.streams:
            self._arrive(stream.record_event())
        self.syncs.append(HostWait("device.synchronize", site, self.clock.host_s - before_s))

    def poll(self, event: SimEvent) -> bool:
        """Return whether an event has happened by now; asking takes the host a launch's time."""
        if event.mark is None:
            return True
        self.clock.host_s += self.profile.launch_s
        self.clock.settle()
        time_s = event.mark.time_s
        if time_s is None or time_s > self.clock.host_s:
            return False
        self._arrive(event)
        return True

    def _arrive(self, event: SimEvent) -> None:
        assert event.mark is not None
        self.clock.host_s = max(self.clock.host_s, self.clock.reach(event.mark))
        self.host.learn(event.clock)
        self.executor.run_until(event.mark)
