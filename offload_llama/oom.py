"""When the card's memory runs out: trying again, and saying who holds it and what would work."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from offload_llama.cache import KVCache
from offload_llama.device import Device, DeviceMemory
from offload_llama.errors import OutOfMemory
from offload_llama.geometry import MIB, floor_power
from offload_llama.hardware import format_bytes

Result = TypeVar("Result")

ALLOCATOR_SETTING = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
LEAST_CHUNK_TOKENS = 16
DRIVER_BYTES = 512 * MIB
"""Of what is not ours, this much may be the driver's own; no program could give it back."""


def attempt(
    action: Callable[[], Result],
    relieve: Callable[[], object],
    device: Device,
    report: Callable[[str, DeviceMemory], OutOfMemory],
) -> Result:
    """Return what `action` returns, tried again for as long as memory runs out and can be freed.

    Args:
        action: must leave nothing behind where it raises.
        relieve: frees memory of the card and returns something true, or nothing is left to free.
        device: whose memory it is.
        report: makes the exception of what PyTorch said and of the memory as it was then.

    Raises:
        OutOfMemory: nothing was left to free.
    """
    while True:
        try:
            return action()
        except torch.OutOfMemoryError as error:
            said, memory = str(error), device.memory()
        # Only out here is the traceback gone, and with it all that the failed pass still held.
        if not relieve():
            raise report(said, memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a run was started with, as far as another choice would take less memory.

    Attributes:
        device: the card's name.
        weights_bytes: bytes of the model on the card (all of them, also while they load).
        weights_itemsize: bytes of one weight.
        prefill_chunk: most tokens of a forward pass.
        fallback: whether layers may move to the host.
    """

    device: str
    weights_bytes: int
    weights_itemsize: int
    prefill_chunk: int
    fallback: bool = True


def out_of_memory(
    phase: str, said: str, memory: DeviceMemory, setup: Setup, cache: KVCache
) -> OutOfMemory:
    """Return the exception for memory that ran out: who holds it, and what would work.

    Args:
        phase: "weights", "prefill" or "decode".
        said: PyTorch's message.
        memory: the card's, while the failed pass was still there.
        setup: what the run was started with.
        cache: its cache.
    """
    needed_bytes = asked_bytes(said)
    unused_bytes = max(0, memory.reserved_bytes - memory.allocated_bytes)
    held = holders(phase, memory, setup, cache)
    fragmented = unused_bytes > needed_bytes > 0
    found = [*_allocator(fragmented), *_remedies(phase, needed_bytes, memory, setup, cache, held)]
    suggestions = tuple(found[:3])
    named = ", ".join(f"{name} {format_bytes(n)}" for name, n in held.items() if n)
    pieces = (
        f"; {format_bytes(unused_bytes)} that PyTorch holds are free, but in pieces too small"
        if fragmented
        else ""
    )
    message = (
        f"out of memory ({phase}) on {setup.device}: {format_bytes(needed_bytes)} more were needed "
        f"and {format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} are free; "
        f"held by {named}{pieces}; try {', or '.join(suggestions)}"
    )
    return OutOfMemory(
        message,
        phase=phase,
        needed_bytes=needed_bytes,
        free_bytes=memory.free_bytes,
        holders=held,
        suggestions=suggestions,
    )


def asked_bytes(said: str) -> int:
    """Return the bytes that PyTorch says it tried to allocate, 0 where it names none."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)", said)
    if match is None:
        return 0
    power = ("bytes", "KiB", "MiB", "GiB", "TiB").index(match[2])
    return int(float(match[1]) * 1024**power)


def holders(phase: str, memory: DeviceMemory, setup: Setup, cache: KVCache) -> dict[str, int]:
    """Return bytes of the card by who holds them; together with the free ones they are all."""
    kept = cache.stats()
    kv_bytes, staging_bytes = kept.device_kv_bytes, kept.ring_bytes
    tensors = max(0, memory.allocated_bytes - kv_bytes - staging_bytes)
    weights = tensors if phase == "weights" else min(tensors, setup.weights_bytes)
    reserved = max(memory.reserved_bytes, memory.allocated_bytes)
    return {
        "weights": weights,
        "KV": kv_bytes,
        "staging": staging_bytes,
        "activations": tensors - weights,
        "other programs": max(0, memory.total_bytes - memory.free_bytes - reserved),
        "PyTorch's cache": reserved - memory.allocated_bytes,
    }


def _allocator(fragmented: bool) -> Iterator[str]:
    """Yield the remedy for memory in pieces, where this platform has one that is not yet in use."""
    set_already = any(
        "expandable_segments:True" in os.environ.get(name, "")
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    )
    if fragmented and not set_already and sys.platform != "win32":
        yield f"setting {ALLOCATOR_SETTING} in the environment"


def _remedies(
    phase: str,
    needed_bytes: int,
    memory: DeviceMemory,
    setup: Setup,
    cache: KVCache,
    held: Mapping[str, int],
) -> Iterator[str]:
    """Yield what would free enough, what frees most first, and then what always works."""
    short = max(1, needed_bytes - memory.free_bytes)
    frees: list[tuple[int, str]] = []
    if phase == "weights":
        short = max(short, setup.weights_bytes - held["weights"] - memory.free_bytes)
    if setup.weights_itemsize > 2:
        frees.append((setup.weights_bytes // 2, "--dtype bfloat16"))
    demand = held["activations"] + needed_bytes
    chunk = _fitting_chunk(setup.prefill_chunk, demand, demand - short)
    if phase == "prefill" and chunk:
        frees.append((demand, f"--prefill-chunk {chunk}"))
    if phase != "weights":
        frees += _kv_remedies(short, held["KV"], setup, cache)
    others = held["other programs"] - DRIVER_BYTES
    frees.append((others, f"closing other programs ({format_bytes(others)})"))
    yield from (how for gain, how in sorted(frees, reverse=True) if gain >= short)
    yield from ("--device cpu", "a smaller model", "a card with more memory")


def _fitting_chunk(chunk: int, demand_bytes: int, room_bytes: int) -> int | None:
    """Return the largest power of two of tokens whose share of the demand fits, or None.

    What a chunk takes grows with its tokens.
    """
    tokens = chunk * max(0, room_bytes) // max(1, demand_bytes)
    if tokens < LEAST_CHUNK_TOKENS:
        return None
    return min(floor_power(tokens), max(1, chunk // 2))


def _kv_remedies(
    short: int, kv_bytes: int, setup: Setup, cache: KVCache
) -> Iterator[tuple[int, str]]:
    """Yield what makes the rows on the card fewer, with the bytes that frees."""
    if any(placement.store == "resident" for placement in cache.placements):
        yield kv_bytes, "--kv-policy offload" if setup.fallback else "leaving out --no-fallback"
    n_rows = sum(length > 0 for length in cache.lengths)
    if n_rows > 1:
        fewer = max(1, n_rows // 2)
        yield kv_bytes - kv_bytes * fewer // n_rows, f"--max-batch-size {fewer}"
    longest = max(cache.lengths)
    fitting = longest * max(0, kv_bytes - short) // max(1, kv_bytes) // 64 * 64
    if fitting:
        yield kv_bytes - kv_bytes * fitting // longest, f"--ctx {fitting}"
