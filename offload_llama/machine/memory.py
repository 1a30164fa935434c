"""Host memory: what this process can still take, and what of it a cache may have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from offload_llama.hardware import GIB


def host_memory_available(root: Path = Path("/")) -> int:
    """Return the bytes of host memory this process can still take.

    Args:
        root: where `proc` and `sys` are, for tests.
    """
    return max(0, min(psutil.virtual_memory().available, *_limits(root)))


def host_memory_for_cache(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that keys and values may take, 0 if there are none to spare.

    The system keeps 1 GiB or 8 % of its memory, whichever is more, of what is available now. A
    limit of this process alone (a container's) is not the system's to share: of what it leaves,
    8 % stay for the program itself.
    """
    machine = psutil.virtual_memory()
    of_machine = machine.available - max(GIB, round(0.08 * machine.total))
    return max(0, min(of_machine, *(round(0.92 * room) for room in _limits(root))))


def _limits(root: Path) -> list[int]:
    """Return what each limit of this process leaves, and a number beyond all of them."""
    limits = [sys.maxsize, *_cgroup_room(root)]
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft - psutil.Process().memory_info().vms)
    return limits


def _cgroup_room(root: Path) -> Iterator[int]:
    """Yield what each memory control group above this process leaves free.

    Source: the Linux kernel's "Control Group v2", `memory.max`, `memory.current` and
    `memory.stat`; cached file pages are given back on demand, so they count as free.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        hierarchy, controllers, name = line.split(":", 2)
        if hierarchy == "0":
            base, files = top, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = top / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / name.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            yield from _room_in(folder, *files)


def _room_in(folder: Path, limit_file: str, usage_file: str, cached_key: str) -> Iterator[int]:
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return
    if limit != "max":
        yield int(limit) - usage + int(stat.get(cached_key, 0))
