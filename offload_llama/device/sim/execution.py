"""When queued operations compute their values: at once, or as late or early as events allow.

A card may run streams in any order that events permit. `inorder` runs each operation as it is
queued; the other orders keep queues and pick adversarially, so that a missing wait yields wrong
values: `copy_last` runs the default stream as far as it can and the others only when they are
waited for, `copy_first` the other way round, `random` by a seeded coin.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch

from offload_llama.device.sim.clock import Mark
from offload_llama.device.sim.errors import SimError
from offload_llama.errors import ConfigError

ORDERS = ("inorder", "copy_last", "copy_first", "random")

Action = Callable[[], object]


class Queue:
    """One stream's operations that have not computed their values yet."""

    __slots__ = ("items", "side")

    def __init__(self, side: bool) -> None:
        self.items: deque[Action | tuple[bool, Mark]] = deque()
        self.side = side


class Executor:
    """Runs the queues of all streams in one of the orders."""

    def __init__(self, order: str, seed: int) -> None:
        if order not in ORDERS:
            raise ConfigError(f"unknown execution order {order!r}; use {', '.join(ORDERS)}")
        self.lazy = order != "inorder"
        self._order = order
        self._random = random.Random(seed)
        self._queues: list[Queue] = []

    def queue(self) -> Queue:
        """Return a new queue; the first one is the default stream's."""
        queue = Queue(side=bool(self._queues))
        self._queues.append(queue)
        return queue

    def add(self, queue: Queue, action: Action) -> None:
        """Queue one operation."""
        if not self.lazy:
            action()
            return
        queue.items.append(action)
        self._eagerly(queue)

    def record(self, queue: Queue, mark: Mark) -> None:
        """Queue the setting of a mark."""
        if not self.lazy:
            mark.executed = True
            return
        queue.items.append((True, mark))
        self._eagerly(queue)

    def wait(self, queue: Queue, mark: Mark) -> None:
        """Queue a wait."""
        if self.lazy and not mark.executed:
            queue.items.append((False, mark))

    def run_until(self, mark: Mark) -> None:
        """Run until a mark is set.

        Raises:
            SimError: every stream waits for another.
        """
        while not mark.executed:
            ready = [queue for queue in self._queues if _can_step(queue)]
            if not ready:
                raise SimError("deadlock: every stream waits for an event that never comes")
            if self._order == "random":
                _step(self._random.choice(ready))
            else:
                side_first = self._order == "copy_first"
                _step(min(ready, key=lambda queue: queue.side != side_first))

    def _eagerly(self, queue: Queue) -> None:
        if self._order == "random":
            while self._random.random() < 0.5:
                ready = [q for q in self._queues if _can_step(q)]
                if not ready:
                    return
                _step(self._random.choice(ready))
        elif queue.side == (self._order == "copy_first"):
            while _can_step(queue):
                _step(queue)


def _can_step(queue: Queue) -> bool:
    if not queue.items:
        return False
    head = queue.items[0]
    return not isinstance(head, tuple) or head[0] or head[1].executed


def _step(queue: Queue) -> None:
    item = queue.items.popleft()
    if isinstance(item, tuple):
        if item[0]:
            item[1].executed = True
        return
    # May be called by `event.synchronize()`, that is, with the simulator's dispatch in place.
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        item()
