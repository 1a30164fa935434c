"""Where the bytes go: each term of a run on the card and on the host, at full context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload_llama.cost.forward import Span, forward
from offload_llama.cost.setup import Setup, rounded, weight_tensors, weights_bytes
from offload_llama.geometry import (
    FIRST_BUFFER_TOKENS,
    FLUSHES_IN_FLIGHT,
    MAX_SLAB_BYTES,
    ceil_power,
    choose_ring_slots,
    resident_rows,
)
from offload_llama.hardware import HardwareProfile

MIB = 1 << 20
# The caching allocator serves blocks of up to 1 MiB from segments of 2 MiB, of up to 10 MiB from
# segments of 20 MiB, and rounds larger ones up to 2 MiB.
# Source: c10/cuda/CUDACachingAllocator: kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge.
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * MIB, 20 * MIB
LARGE_BLOCK_BYTES, ROUND_BYTES = 10 * MIB, 2 * MIB


@dataclass(frozen=True, slots=True)
class Phase:
    """A moment of a run: bytes of resident rows, of departing ones, and the pass on top of them."""

    kv_resident_bytes: int
    departing_bytes: int
    pass_bytes: int
    logits_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.kv_resident_bytes + self.departing_bytes + self.pass_bytes


def phases(
    setup: Setup, profile: HardwareProfile, n_host: int, prompt_tokens: int | None = None
) -> list[Phase]:
    """Return the moments that can be the largest: a prompt's last chunks, and the last decode step.

    The prompt (of all the context but one token, unless told otherwise) is the last row's, beside
    others that are full. Chunks end at multiples of `prefill_chunk`, so the last whole one and the
    rest behind it are what counts.
    """
    n_resident = setup.config.n_layers - n_host
    growing = n_resident > 0
    departing = departing_bytes(setup, n_host)
    full = n_resident * resident_layer_bytes(setup, setup.ctx)
    prompt, chunk = prompt_tokens or setup.ctx - 1, setup.prefill_chunk
    whole = prompt // chunk * chunk
    found = []
    for start, stop in ((whole - chunk, whole), (whole, prompt)):
        if 0 <= start < stop:
            own = n_resident * resident_layer_bytes(setup, stop)
            cost = forward(
                setup,
                profile,
                (Span(start, stop - start),),
                n_wanted=1,
                departing_bytes=departing,
                growing=growing,
            )
            kv_bytes = (setup.batch - 1) * full + own
            found.append(Phase(kv_bytes, departing, cost.peak_bytes, cost.logits_bytes))
    spans = (Span(setup.ctx - 1, 1),) * setup.batch
    cost = forward(setup, profile, spans, n_wanted=setup.batch, growing=growing)
    found.append(Phase(setup.batch * full, 0, cost.peak_bytes, cost.logits_bytes))
    if growing:
        # Rows that are taken back leave a part's buffer for a smaller one, between two steps.
        rows = resident_rows(setup.geometry, setup.ctx)[-1]
        smaller = rows // 2 if rows > FIRST_BUFFER_TOKENS else 0
        found.append(Phase(setup.batch * full, 0, rounded(2 * smaller * setup.kv_row_bytes)))
    return found


def resident_layer_bytes(setup: Setup, n_tokens: int) -> int:
    """Return what one sequence's rows take on the card in one resident layer."""
    rows = resident_rows(setup.geometry, n_tokens)
    return sum(rounded(2 * n * setup.kv_row_bytes) for n in rows)


def growth_bytes(setup: Setup) -> int:
    """Return the most that a part's old buffer takes while a larger one replaces it."""
    return rounded(setup.geometry.part_tokens * setup.kv_row_bytes)


def tail_bytes(setup: Setup) -> int:
    """Return what one sequence's tail takes on the card in one offloaded layer."""
    return rounded(2 * setup.geometry.flush_tokens * setup.kv_row_bytes)


def departing_bytes(setup: Setup, n_host: int) -> int:
    """Return the keys and values of a chunk's layers that are on their way to the host at once."""
    chunk = min(setup.prefill_chunk, setup.ctx - 1)
    if chunk == 1 or n_host == 0:
        return 0
    # With a single offloaded layer the other one is the previous chunk's.
    return FLUSHES_IN_FLIGHT * 2 * rounded(chunk * setup.config.kv_row_bytes(setup.item_bytes))


def slot_tokens(setup: Setup) -> int:
    """Return the rows of one of the ring's slots."""
    return min(setup.geometry.part_tokens, ceil_power(setup.ctx * setup.batch))


def ring_slots(setup: Setup, n_host: int) -> int:
    """Return how many slots the ring has."""
    if setup.ring_slots is not None:
        return setup.ring_slots
    parts = -(-setup.ctx * setup.batch // setup.geometry.part_tokens)
    return choose_ring_slots(setup.config, setup.item_bytes, n_host, parts)


def ring_bytes(setup: Setup, n_host: int) -> int:
    """Return what the ring takes on the card; nothing if no layer is offloaded."""
    if n_host == 0:
        return 0
    slot = rounded(2 * slot_tokens(setup) * setup.kv_row_bytes)
    return ring_slots(setup, n_host) * slot


def kv_device_bytes(setup: Setup, n_host: int) -> tuple[int, int]:
    """Return the bytes of all resident rows and of all tails, at full context."""
    n_resident = setup.config.n_layers - n_host
    resident = n_resident * setup.batch * resident_layer_bytes(setup, setup.ctx)
    return resident, n_host * setup.batch * tail_bytes(setup)


def overhead(setup: Setup, profile: HardwareProfile) -> dict[str, int]:
    """Return what the runtime takes beside our tensors, by name.

    `context` is the driver's and the runtime's own, `workspace` cuBLAS's scratch memory, and
    `allocator` what the caching allocator rounds up: weights to its segments, and one segment of
    each kind that is partly used. `learnt` is what runs on this computer took beyond all that.
    """
    terms = {"context": profile.context_bytes, "workspace": profile.workspace_bytes, "allocator": 0}
    if profile.workspace_bytes:
        terms["allocator"] = (
            allocator_slack(setup, profile) + SMALL_SEGMENT_BYTES + LARGE_SEGMENT_BYTES
        )
    terms["learnt"] = profile.learnt_bytes
    return terms


def allocator_slack(setup: Setup, profile: HardwareProfile) -> int:
    """Return what large weights lose by being rounded up to whole segments."""
    large = [n for n in weight_tensors(setup, profile) if n >= LARGE_BLOCK_BYTES]
    return sum(-n % ROUND_BYTES for n in large)


def device_terms(
    setup: Setup, profile: HardwareProfile, n_host: int, prompt_tokens: int | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes on the card by name, without reserve, and the parts of `overhead`."""
    resident, tails = kv_device_bytes(setup, n_host)
    found = phases(setup, profile, n_host, prompt_tokens)
    largest = max(found, key=lambda phase: phase.total_bytes)
    beyond = largest.total_bytes - resident
    departing = min(largest.departing_bytes, beyond)
    logits = min(largest.logits_bytes, beyond - departing)
    parts = overhead(setup, profile)
    terms = {
        "weights": weights_bytes(setup, profile),
        "kv_resident": resident,
        "tails": tails,
        "ring": ring_bytes(setup, n_host),
        "departing": departing,
        "activations": beyond - departing - logits,
        "logits": logits,
        "overhead": sum(parts.values()),
    }
    return terms, parts


def host_terms(setup: Setup, n_host: int) -> dict[str, int]:
    """Return the pinned bytes on the host by name: rows, and what pages and slabs add at most."""
    rows = 2 * n_host * setup.batch * setup.ctx * setup.kv_row_bytes
    if rows == 0:
        return {"kv": 0, "pages": 0}
    return {"kv": rows, "pages": rows // 20 + MAX_SLAB_BYTES}


def tensor_bytes(terms: Mapping[str, int]) -> int:
    """Return the planned peak of the tensors alone: what the device's own counter shows."""
    return sum(n for name, n in terms.items() if name not in ("overhead", "reserve"))
