"""Attention over host memory beside the read bandwidth of that memory, and beside torch's kernel.

    python scripts/bench_host_attention.py [--threads N] [--size 512MiB] [--rounds N]

One token attends over keys and values of at least four times the last-level cache, laid out in
slabs as the engine's host pages are. A round reads the whole working set with the kernel's own
threads and nothing else, lets the kernel attend over it, and reads again; its ratio is the
attention's rate over that of the two reads. A round counts where its threads had their cores: they
took nine tenths of the processor time there was. Where other programs leave too few of those within
`--patience` seconds, all rounds count and the line says so. Figures are medians; torch's kernel,
which is slow, has a few rounds of its own. A table, then one JSON object as the last line, whose
`worst` are the lowest ratios: groups of 1 to 4, and of 8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload_llama.geometry import MAX_SLAB_BYTES, MIB
from offload_llama.hardware import format_bytes, parse_bytes
from offload_llama.native import HostAttention, NativeAttention, Run, TorchAttention, choose

N_KV_HEADS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (128, 64)
GROUPS = (1, 2, 4, 8)
UNKNOWN_CACHE_BYTES = 64 * MIB
BUSY_SHARE = 0.9
MIN_ROUNDS = 3


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of the first core, a guess where none is told."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    kib = [int(path.read_text().strip().removesuffix("K")) for path in sizes]
    return max(kib) << 10 if kib else UNKNOWN_CACHE_BYTES


@dataclass(frozen=True, slots=True)
class Timing:
    """What a call took, and whether its threads had their cores meanwhile."""

    wall_s: float
    undisturbed: bool


def timed(work: Callable[[], object]) -> Timing:
    wall, busy = time.perf_counter(), time.process_time()
    work()
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    return Timing(wall, busy >= BUSY_SHARE * wall * torch.get_num_threads())


def runs_of(memory: torch.Tensor, dtype: torch.dtype, head_dim: int) -> list[Run]:
    """Return keys and values of each slab: its two halves."""
    row_bytes = N_KV_HEADS * head_dim * dtype.itemsize
    runs = []
    for first in range(0, len(memory), MAX_SLAB_BYTES):
        slab = memory[first : first + MAX_SLAB_BYTES]
        rows = slab.numel() // (2 * row_bytes)
        halves = slab[: 2 * rows * row_bytes].view(dtype).view(2, rows, N_KV_HEADS, head_dim)
        runs.append((halves[0], halves[1]))
    return runs


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one attention, and of a read of as many bytes around it."""

    attend_s: float
    read_s: float
    undisturbed: bool

    @property
    def ratio(self) -> float:
        return self.read_s / self.attend_s


def play(
    attention: HostAttention, read: Callable[[], object], q: torch.Tensor, runs: list[Run]
) -> Round:
    before = timed(read)
    middle = timed(partial(attention.attend, q, runs))
    after = timed(read)
    calm = before.undisturbed and middle.undisturbed and after.undisturbed
    return Round(middle.wall_s, (before.wall_s + after.wall_s) / 2, calm)


def measure(
    native: NativeAttention,
    memory: torch.Tensor,
    q: torch.Tensor,
    runs: list[Run],
    rounds: int,
    patience_s: float,
) -> dict[str, Any]:
    """Return the medians of one case; rates are bytes/s."""
    n_bytes = sum(2 * k.numel() * k.element_size() for k, _ in runs)
    read = partial(native.read, memory[:n_bytes])
    native.attend(q, runs)
    played: list[Round] = []
    calm: list[Round] = []
    start = time.perf_counter()
    while len(calm) < rounds:
        played.append(play(native, read, q, runs))
        calm = [r for r in played if r.undisturbed]
        if len(played) >= rounds and time.perf_counter() - start > patience_s:
            break
    counted = calm if len(calm) >= MIN_ROUNDS else played
    theirs = [play(TorchAttention(), read, q, runs) for _ in range(MIN_ROUNDS)]
    low, _, high = statistics.quantiles([r.ratio for r in counted], n=4)
    return {
        "read_bytes_per_s": n_bytes / statistics.median(r.read_s for r in counted),
        "native_bytes_per_s": n_bytes / statistics.median(r.attend_s for r in counted),
        "torch_bytes_per_s": n_bytes / statistics.median(r.attend_s for r in theirs),
        "native_ratio": statistics.median(r.ratio for r in counted),
        "native_ratio_low": low,
        "native_ratio_high": high,
        "torch_ratio": statistics.median(r.ratio for r in theirs),
        "rounds": len(counted),
        "undisturbed": counted is calm,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--size", type=parse_bytes, help="working set, such as 512MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patience", type=float, default=10.0, metavar="SECONDS")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    attention, reason = choose()
    if not isinstance(attention, NativeAttention):
        parser.exit(1, f"nothing to measure: {reason}\n")
    cache_bytes = last_level_cache_bytes()
    size = options.size or -(-4 * cache_bytes // MAX_SLAB_BYTES) * MAX_SLAB_BYTES
    # Small whole numbers as bytes are small numbers in every dtype.
    memory = torch.randint(0, 60, (size,), dtype=torch.uint8)
    print(
        f"{attention.title}, {options.threads} threads, {format_bytes(size)} in memory, last-level "
        f"cache {format_bytes(cache_bytes)}, {N_KV_HEADS} KV heads; GB/s and share of the reads"
    )
    print(f"{'dtype':9}{'D':>5}{'G':>4}{'read':>7}{'native':>8}{'torch':>7}{'share':>8}  quartiles")
    cases: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            runs = runs_of(memory, dtype, head_dim)
            for groups in GROUPS:
                q = torch.randn(N_KV_HEADS * groups, head_dim)
                case = measure(attention, memory, q, runs, options.rounds, options.patience)
                name = str(dtype).removeprefix("torch.")
                cases.append({"dtype": name, "head_dim": head_dim, "groups": groups, **case})
                rates = (case[f"{key}_bytes_per_s"] / 1e9 for key in ("read", "native", "torch"))
                print(
                    f"{name:9}{head_dim:5}{groups:4}{'{:7.1f}{:8.1f}{:7.1f}'.format(*rates)}"
                    f"{case['native_ratio']:7.0%}   {case['native_ratio_low']:.0%}-"
                    f"{case['native_ratio_high']:.0%} of {case['rounds']} rounds"
                    f"{'' if case['undisturbed'] else ', all disturbed'}",
                    flush=True,
                )
    worst = {
        "groups_1_to_4": min(c["native_ratio"] for c in cases if c["groups"] <= 4),
        "groups_8": min(c["native_ratio"] for c in cases if c["groups"] == 8),
    }
    print(
        json.dumps(
            {
                "kernel": attention.title,
                "threads": options.threads,
                "size_bytes": size,
                "cache_bytes": cache_bytes,
                "cases": cases,
                "worst": worst,
            }
        )
    )


if __name__ == "__main__":
    main()
