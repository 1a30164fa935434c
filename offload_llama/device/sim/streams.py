"""Streams and events with the methods of `torch.cuda.Stream` and `torch.cuda.Event`.

`stream_and_event_types` gives classes bound to one card, since the originals are constructed
without saying which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload_llama.device.sim.clock import Mark
from offload_llama.device.sim.hazards import VectorClock

if TYPE_CHECKING:
    from offload_llama.device.sim.card import Card


class SimStream:
    """A first-in, first-out queue of work on the simulated card."""

    card: Card

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority
        self.actor, self.lane, self.queue = self.card.new_stream_state(self)
        self._previous: list[SimStream] = []

    @property
    def name(self) -> str:
        """The name it has in the timeline."""
        return self.actor.name

    def wait_event(self, event: SimEvent) -> None:
        """Later work waits for the event's last recording; none was recorded: no wait."""
        if event.mark is not None:
            self.actor.learn(event.clock)
            self.card.clock.wait(self.lane, event.mark)
            self.card.executor.wait(self.queue, event.mark)

    def wait_stream(self, stream: SimStream) -> None:
        """Later work waits for all that is queued on another stream now."""
        self.wait_event(stream.record_event())

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        """Record an event (a new one if none is given) here, and return it."""
        event = self.card.event_type() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all that is queued here."""
        self.card.host_wait(self.record_event(), "stream.synchronize")

    def query(self) -> bool:
        """Return whether all that is queued here is done."""
        return self.record_event().query()

    def __enter__(self) -> SimStream:
        self._previous.append(self.card.current)
        self.card.current = self
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.card.current = self._previous.pop()


class SimEvent:
    """A point in a stream's work."""

    card: Card

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self.mark: Mark | None = None
        self.clock: VectorClock = {}

    def record(self, stream: SimStream | None = None) -> None:
        """Mark what is queued on the stream (the current one if none is given) now."""
        stream = self.card.current if stream is None else stream
        self.clock = dict(stream.actor.clock)
        self.mark = self.card.clock.record(stream.lane)
        self.card.executor.record(stream.queue, self.mark)

    def wait(self, stream: SimStream | None = None) -> None:
        """Let a stream (the current one if none is given) wait for this event."""
        (self.card.current if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for this event."""
        self.card.host_wait(self, "event.synchronize")

    def query(self) -> bool:
        """Return whether the work is done at the host's present time."""
        return self.card.poll(self)

    def elapsed_time(self, end_event: SimEvent) -> float:
        """Return the milliseconds from this event to another, on the virtual clock."""
        if self.mark is None or end_event.mark is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        clock = self.card.clock
        return (clock.reach(end_event.mark) - clock.reach(self.mark)) * 1e3


class StreamScope:
    """What `torch.cuda.stream` gives: work is queued on a stream inside; None changes nothing."""

    def __init__(self, stream: SimStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(type, value, traceback)


def stream_and_event_types(card: Card) -> tuple[type[SimStream], type[SimEvent]]:
    """Return stream and event classes that belong to one card."""
    return (
        type("Stream", (SimStream,), {"card": card}),
        type("Event", (SimEvent,), {"card": card}),
    )
