"""Measures what a card, its link and its host reach.

Every rate is a median of several repeats on the device's own clock, over buffers that no cache
holds. The largest page-locked memory is tried in a process of its own, where a refusal or a crash
does no harm:

    python -m offload_llama.probe DEVICE LIMIT_BYTES
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from offload_llama.device import Device, PinRefused, open_device
from offload_llama.machine import host_memory_available, host_memory_for_cache
from offload_llama.profiles import Measured, measured_now

MIB = 2**20
_FIRST_PIN_BYTES = 64 * MIB
_MOST_PIN_BYTES = 16 * 2**30
_KV_HEADS, _GROUPS, _HEAD_DIM = 8, 4, 128
_OPS_IN_A_ROW = 8

aten = torch.ops.aten


def probe(device: Device, *, quick: bool = False) -> Measured:
    """Return what was measured on a device; what it does not have is left out.

    Args:
        device: a card, a simulated one, or the CPU, of which only the host's rates are taken.
        quick: smaller buffers, fewer repeats and a lower limit for page-locking: at most about
            10 seconds instead of 60.
    """
    # A simulated clock gives the same time every time.
    repeats = 1 if device.simulated else 3 if quick else 7
    found: dict[str, float] = {}
    with torch.no_grad():
        if device.offloads:
            found |= _context_and_pins(device, quick)
            found |= _link(device, quick, repeats)
            found |= _card(device, quick, repeats)
        found |= _host(device, quick, repeats)
    return measured_now(found)


def _seconds(device: Device, repeats: int, work: Callable[[], object]) -> float:
    """Return the median time of some work, after one run that does not count."""
    times = []
    for _ in range(repeats + 1):
        began_s = device.clock()
        work()
        device.synchronize()
        times.append(device.clock() - began_s)
    return statistics.median(times[1:])


def _size(wanted_bytes: int, free_bytes: int) -> int:
    """Return the bytes of a buffer: an eighth of what is free at most, and never nothing."""
    return max(MIB, min(wanted_bytes, free_bytes // 8))


# The link


def _link(device: Device, quick: bool, repeats: int) -> dict[str, float]:
    found: dict[str, float] = {}
    free_bytes = min(device.memory().free_bytes, host_memory_available())
    size = _size((64 if quick else 256) * MIB, free_bytes)
    with device.scope():
        on_card = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
        with _pinned(device, size) as pinned:
            if pinned is not None:
                for name, target, source in (
                    ("h2d_bytes_per_s", on_card, pinned),
                    ("d2h_bytes_per_s", pinned, on_card),
                ):
                    seconds = _seconds(device, repeats, _copies(target, source, pinned=True))
                    found[name] = size / seconds
        pageable = torch.ones(size, dtype=torch.uint8)
        for name, target, source in (
            ("pageable_h2d_bytes_per_s", on_card, pageable),
            ("pageable_d2h_bytes_per_s", pageable, on_card),
        ):
            seconds = _seconds(device, repeats, _copies(target, source, pinned=False))
            found[name] = size / seconds
    if "h2d_bytes_per_s" in found:
        ratio = found["pageable_h2d_bytes_per_s"] / found["h2d_bytes_per_s"]
        found["pageable_factor"] = min(1.0, ratio)
    return found


def _copies(target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=pinned)


@contextlib.contextmanager
def _pinned(device: Device, size: int) -> Iterator[torch.Tensor | None]:
    """Give page-locked memory as the cache has it, or a pinned buffer, or None if both fail."""
    memory = _mapped(size)
    try:
        device.register(memory)
    except PinRefused:
        del memory
        try:
            yield device.pinned_empty((size,), torch.uint8).fill_(1)
        except PinRefused:
            yield None
        return
    try:
        yield memory.fill_(1)
    finally:
        device.synchronize()
        device.unregister(memory)


def _mapped(size: int) -> torch.Tensor:
    """Return fresh, page-aligned memory; the mapping ends with its tensor."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


# The card


def _card(device: Device, quick: bool, repeats: int) -> dict[str, float]:
    free_bytes = device.memory().free_bytes
    size = _size((64 if quick else 256) * MIB, free_bytes)
    side = 4096 if quick or free_bytes < 2**30 else 8192
    with device.scope():
        copying_s = _seconds(device, repeats, _copies_on(device, size)) / _OPS_IN_A_ROW
        left = torch.ones(side, side, dtype=torch.float16, device=device.torch_device)
        product = torch.empty_like(left)
        product_s = _seconds(device, repeats, lambda: torch.mm(left, left, out=product))
    return {"mem_bytes_per_s": 2 * size / copying_s, "fp16_flops": 2 * side**3 / product_s}


def _copies_on(device: Device, size: int) -> Callable[[], None]:
    """Return a run of copies within the card, so long that queueing them does not count."""
    source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)

    def work() -> None:
        for _ in range(_OPS_IN_A_ROW):
            target.copy_(source)

    return work


# The host


def _host(device: Device, quick: bool, repeats: int) -> dict[str, float]:
    free_bytes = host_memory_available()
    size = _size((64 if device.simulated else 128 if quick else 512) * MIB, free_bytes)
    kv_size = _size((32 if device.simulated else 64 if quick else 256) * MIB, free_bytes)
    with device.scope():
        source = torch.ones(size // 4)
        target = torch.empty_like(source)
        copying_s = _seconds(device, repeats, lambda: target.copy_(source))
        # The engine's decode shape: keys and values of one page, query heads folded by KV head.
        dtype = _cache_dtype(device)
        n_tokens = kv_size // (2 * _KV_HEADS * _HEAD_DIM * dtype.itemsize)
        k, v = (torch.full((n_tokens, _KV_HEADS, _HEAD_DIM), 0.5, dtype=dtype) for _ in range(2))
        q = torch.full((1, _KV_HEADS, _GROUPS, _HEAD_DIM), 0.5, dtype=dtype)
        views = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        attention_s = _seconds(
            device,
            repeats,
            lambda: aten._scaled_dot_product_flash_attention_for_cpu(q, *views, 0.0, False),
        )
    return {
        "host_dram_bytes_per_s": 2 * source.nbytes / copying_s,
        "cpu_attention_bytes_per_s": (k.nbytes + v.nbytes) / attention_s,
    }


def _cache_dtype(device: Device) -> torch.dtype:
    """Return the dtype that keys and values have on a device unless the user wants another."""
    kind = device.torch_device.type
    if kind == "cpu":
        return torch.float32
    if kind == "cuda":
        with device.scope():
            major, _ = torch.cuda.get_device_capability(device.torch_device)
        return torch.bfloat16 if major >= 8 else torch.float16
    return torch.bfloat16


# Page-locking and the context


def _context_and_pins(device: Device, quick: bool) -> dict[str, float]:
    most_bytes = _MOST_PIN_BYTES // (16 if quick else 1)
    limit_bytes = min(most_bytes, host_memory_for_cache() // 2)
    if not device.simulated:
        return try_in_a_child(device, limit_bytes, 8.0 if quick else 30.0)
    memory = device.memory()
    context_bytes = memory.total_bytes - memory.free_bytes - memory.allocated_bytes
    return {"context_bytes": context_bytes} | pin_figures(pin_attempts(device, limit_bytes))


def pin_attempts(
    device: Device, limit_bytes: int, announce: Callable[[int], object] = lambda size: None
) -> Iterator[tuple[int, bool]]:
    """Yield (bytes, whether they could be page-locked): doubling, then closer to what is refused.

    Args:
        device: where to try.
        limit_bytes: never try more.
        announce: is told each size before it is tried.
    """
    size, works, refused = _FIRST_PIN_BYTES, 0, 0
    while works < size <= limit_bytes:
        announce(size)
        accepted = _can_pin(device, size)
        yield size, accepted
        if accepted:
            works = size
        else:
            refused = size
        if refused and refused - works <= max(_FIRST_PIN_BYTES, works // 8):
            return
        size = (works + refused) // 2 if refused else min(2 * works, limit_bytes)
        size -= size % mmap.ALLOCATIONGRANULARITY


def pin_figures(attempts: Iterable[tuple[int, bool]]) -> dict[str, float]:
    """Return the most that worked, as a limit too if more was refused."""
    tried, refused = 0, False
    for size, accepted in attempts:
        tried, refused = max(tried, size if accepted else 0), refused or not accepted
    found: dict[str, float] = {"tried_pin_bytes": tried}
    return found | ({"max_pin_bytes": tried} if refused else {})


def _can_pin(device: Device, size: int) -> bool:
    try:
        memory = _mapped(size)
        device.register(memory)
    except (PinRefused, OSError):  # the system may not even have the addresses
        return False
    device.unregister(memory)
    return True


def try_in_a_child(device: Device, limit_bytes: int, patience_s: float) -> dict[str, float]:
    """Return context and page-locking figures that a second process finds on the same card.

    What its context takes is what this process sees disappear. A child that dies while it
    page-locks has met the limit; one that is too slow is stopped and has not.
    """
    free_bytes = device.memory().free_bytes
    command = [sys.executable, "-m", "offload_llama.probe", device.name, str(limit_bytes)]
    deadline_s = time.monotonic() + patience_s
    found: dict[str, float] = {}
    attempts: list[tuple[int, bool]] = []
    trying = 0
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read_lines, args=(child, lines), daemon=True)
        reader.start()
        try:
            while True:
                word, *numbers = lines.get(timeout=max(0.0, deadline_s - time.monotonic())).split()
                if word == "ready":
                    taken_bytes = free_bytes - device.memory().free_bytes - int(numbers[0])
                    found["context_bytes"] = max(0, taken_bytes)
                    _answer(child)
                elif word == "trying":
                    trying = int(numbers[0])
                elif word in ("pinned", "refused"):
                    attempts.append((trying, word == "pinned"))
                    trying = 0
                else:
                    break
            if trying:
                attempts.append((trying, False))
        except queue.Empty:
            pass  # too slow, which says nothing of what it was trying
        finally:
            child.kill()
    return found | (pin_figures(attempts) if attempts else {})


def _read_lines(child: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put("end")


def _answer(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.write("go on\n")
        child.stdin.flush()


def _main(name: str, limit_bytes: int) -> None:
    """Use the card once, wait for a line, then try to page-lock more and more."""
    with contextlib.suppress(OSError):  # if memory runs out, this process is to go first
        Path("/proc/self/oom_score_adj").write_text("1000")
    device = open_device(name)
    with device.scope():
        ones = torch.ones(64, 64, device=device.torch_device)
        torch.mm(ones, ones)
        device.synchronize()
    # What PyTorch's allocator holds of the card is not the context's.
    print("ready", device.memory().reserved_bytes, flush=True)
    sys.stdin.readline()
    announce = functools.partial(print, "trying", flush=True)
    for _, accepted in pin_attempts(device, limit_bytes, announce):
        print("pinned" if accepted else "refused", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
