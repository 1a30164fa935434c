"""The virtual clock: when each queued operation runs on its engine.

A discrete-event simulation. A stream's next operation may start when the one before it has ended,
the events its stream waits for have happened, the host has launched it, and its engine is free;
of several that could, the earliest goes first. Engines: `compute` (one kernel at a time), `h2d`
and `d2h`, which slow each other down by the profile's duplex factor while both run.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from offload_llama.device.sim.errors import SimError
from offload_llama.device.sim.site import Site

# The host reads the clock rarely, so queued operations are also settled every so many.
_SETTLE_EVERY = 256
_KEPT_RECORDS = 500_000


class Record(NamedTuple):
    """One operation as it ran."""

    engine: str
    stream: str
    op: str
    nbytes: int
    start_s: float
    end_s: float
    site: Site

    @property
    def where(self) -> str:
        """The line of the engine that asked for it."""
        return str(self.site)


class Mark:
    """One recording of an event: its time once known, and whether the values are there."""

    __slots__ = ("executed", "launched_s", "time_s")

    def __init__(self, launched_s: float) -> None:
        self.launched_s = launched_s
        self.time_s: float | None = None
        self.executed = False


class Work:
    """One queued operation."""

    __slots__ = ("engine", "launched_s", "nbytes", "op", "seconds", "site")

    def __init__(
        self, engine: str, op: str, nbytes: int, seconds: float, launched_s: float, site: Site
    ) -> None:
        self.engine, self.op, self.nbytes = engine, op, nbytes
        self.seconds, self.launched_s, self.site = seconds, launched_s, site


class Lane:
    """One stream's queue on the clock: work, marks to set, marks to wait for."""

    __slots__ = ("busy", "free_s", "name", "queue")

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Work | tuple[bool, Mark]] = deque()
        self.free_s = 0.0
        self.busy = False


class _Copy:
    """A copy under way; `remaining_s` is what is left of it at the full rate."""

    __slots__ = ("lane", "rate", "remaining_s", "since_s", "started_s", "work")

    def __init__(self, lane: Lane, work: Work, start_s: float) -> None:
        self.lane, self.work, self.started_s, self.since_s = lane, work, start_s, start_s
        self.remaining_s, self.rate = work.seconds, 1.0

    @property
    def end_s(self) -> float:
        return self.since_s + self.remaining_s / self.rate

    def change_rate(self, now_s: float, rate: float) -> None:
        self.remaining_s -= (now_s - self.since_s) * self.rate
        self.since_s, self.rate = now_s, rate


class Clock:
    """All lanes, the engines they share, and the host's own time."""

    def __init__(self, duplex_factor: float) -> None:
        self.host_s = 0.0
        self.timeline: deque[Record] = deque(maxlen=_KEPT_RECORDS)
        self._duplex = duplex_factor
        self._lanes: list[Lane] = []
        self._compute_free_s = 0.0
        self._copies: dict[str, _Copy] = {}
        self._link_free_s = {"h2d": 0.0, "d2h": 0.0}
        self._unsettled = 0

    def lane(self, name: str) -> Lane:
        """Return a new, empty lane."""
        lane = Lane(name)
        self._lanes.append(lane)
        return lane

    def submit(self, lane: Lane, work: Work) -> None:
        """Queue one operation."""
        lane.queue.append(work)
        self._unsettled += 1
        if self._unsettled >= _SETTLE_EVERY:
            self.settle()

    def record(self, lane: Lane) -> Mark:
        """Queue and return a mark that is set once everything before it in the lane has ended."""
        mark = Mark(self.host_s)
        lane.queue.append((True, mark))
        return mark

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Queue a wait for a mark."""
        lane.queue.append((False, mark))

    def settle(self) -> None:
        """Let everything that starts up to the host's time run."""
        self._unsettled = 0
        self._run(None)

    def reach(self, mark: Mark) -> float:
        """Let work run until a mark is set, and return its time.

        Raises:
            SimError: every stream waits for another.
        """
        self._run(mark)
        if mark.time_s is None:
            raise SimError("deadlock: every stream waits for an event that never comes")
        return mark.time_s

    def _run(self, mark: Mark | None) -> None:
        while True:
            while self._pass_marks():
                pass
            if mark is not None and mark.time_s is not None:
                return
            chosen: Lane | None = None
            chosen_start, chosen_ready = float("inf"), float("inf")
            for lane in self._lanes:
                if lane.busy or not lane.queue:
                    continue
                head = lane.queue[0]
                if not isinstance(head, Work) or head.engine in self._copies:
                    continue
                ready = max(lane.free_s, head.launched_s)
                start = max(ready, self._engine_free(head.engine))
                if (start, ready) < (chosen_start, chosen_ready):
                    chosen, chosen_start, chosen_ready = lane, start, ready
            ending = min(self._copies.values(), key=lambda c: c.end_s, default=None)
            next_s = min(chosen_start, ending.end_s if ending else float("inf"))
            if next_s == float("inf") or (mark is None and next_s > self.host_s):
                return
            if ending is not None and ending.end_s <= chosen_start:
                self._end_copy(ending)
            else:
                assert chosen is not None
                self._start(chosen, chosen_start)

    def _engine_free(self, engine: str) -> float:
        return self._compute_free_s if engine == "compute" else self._link_free_s[engine]

    def _pass_marks(self) -> bool:
        """Set and pass the marks at the lanes' heads; return whether any was set."""
        any_set = False
        for lane in self._lanes:
            queue = lane.queue
            while queue and not lane.busy:
                head = queue[0]
                if isinstance(head, Work):
                    break
                is_record, mark = head
                if is_record:
                    mark.time_s = max(lane.free_s, mark.launched_s)
                    any_set = True
                elif mark.time_s is None:
                    break
                else:
                    lane.free_s = max(lane.free_s, mark.time_s)
                queue.popleft()
        return any_set

    def _start(self, lane: Lane, start_s: float) -> None:
        work = lane.queue.popleft()
        assert isinstance(work, Work)
        if work.engine == "compute":
            end_s = start_s + work.seconds
            self._compute_free_s = lane.free_s = end_s
            self._keep(lane, work, start_s, end_s)
            return
        copy = _Copy(lane, work, start_s)
        for other in self._copies.values():
            other.change_rate(start_s, self._duplex)
            copy.rate = self._duplex
        self._copies[work.engine] = copy
        lane.busy = True

    def _end_copy(self, copy: _Copy) -> None:
        end_s = copy.end_s
        del self._copies[copy.work.engine]
        for other in self._copies.values():
            other.change_rate(end_s, 1.0)
        copy.lane.busy, copy.lane.free_s = False, end_s
        self._link_free_s[copy.work.engine] = end_s
        self._keep(copy.lane, copy.work, copy.started_s, end_s)

    def _keep(self, lane: Lane, work: Work, start_s: float, end_s: float) -> None:
        self.timeline.append(
            Record(work.engine, lane.name, work.op, work.nbytes, start_s, end_s, work.site)
        )
