"""The scenarios of `mutation_suite` in which layers move to the host and come back."""

from __future__ import annotations

from tests.mutation_suite import Bench, ids


def layers_leave_the_card(order: str) -> None:
    """Layers move while the card is behind; what they free and the new ring's memory are used.

    Kernels are slow on this card, so rows are still being written as the move begins.
    """
    bench = Bench(order, "gpu", card="rtx-3060-12gb?kernel=1e-3")
    with bench.device.scope():
        bench.feed({0: ids(60, 1), 1: ids(33, 2)}, "none")
        bench.cache.move_to_host([1])
        bench.check(bench.feed({0: [3], 1: [4]}), [0, 1])
        bench.decode([0, 1], 8)
        bench.feed({0: ids(20, 3)}, "none")
        bench.cache.relieve()
        bench.feed({1: ids(20, 4)}, "none")
        bench.check(bench.decode([0, 1], 9), [0, 1])


def a_row_is_freed_while_it_leaves(order: str) -> None:
    """Tails go with their row, and layers come home, while the last flush still reads them."""
    bench = Bench(order, "gpu", card="rtx-3060-12gb?kernel=1e-3")
    with bench.device.scope():
        bench.feed({0: ids(40, 1)}, "none")
        bench.cache.move_to_host([0, 1, 3])
        for i in range(8):
            bench.feed({0: [i]}, "none")
        bench.cache.free(0)
        bench.rows = {}
        bench.feed({1: ids(30, 2)}, "none")
        assert not any(store.is_host for store in bench.cache.stores), "a layer stayed away"
        bench.check(bench.decode([1], 3), [1])
