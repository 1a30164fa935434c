"""Checks a real card: is offloading exact, asynchronous, and as large as it says? Under 5 minutes.

    python scripts/gpu_acceptance.py [--device cuda] [--small]
    python scripts/gpu_acceptance.py --sim [CARD]       the same checks on the simulated card

Prints a pass/fail table, then one JSON object as the last line. Exit code 0 if all passed. Weights
are random; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from offload_llama.cache import KVCache
from offload_llama.config import ModelConfig
from offload_llama.device import Device, open_device
from offload_llama.device.sim import simulated
from offload_llama.errors import OffloadLlamaError
from offload_llama.model import Transformer
from offload_llama.policy import place

SMALL = ModelConfig(
    dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=512, vocab_size=512,
    max_seq_len=4096,
)  # fmt: skip
LARGE = ModelConfig(
    dim=4096, n_layers=8, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336,
    vocab_size=32000, max_seq_len=32768,
)  # fmt: skip
SLEEP_CYCLES = 3_000_000


class Report:
    """What passed and what did not."""

    def __init__(self) -> None:
        self.checks: dict[str, bool] = {}
        self.figures: dict[str, float] = {}

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self.checks[name] = bool(passed)
        print(f"{'PASS' if passed else 'FAIL'}  {name}  {detail}", flush=True)

    def figure(self, name: str, value: float) -> None:
        self.figures[name] = value
        print(f"      {name}: {value:.2f}", flush=True)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Let what is raised inside fail this section and not hide the others."""
        try:
            yield
        except Exception as error:
            self.check(name, False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def build(
    config: ModelConfig, device: Device, dtype: torch.dtype, *, random: bool = True
) -> Transformer:
    """Return a model on the device, with random weights or uninitialised ones."""
    generator = torch.Generator().manual_seed(0)
    model = Transformer(config)
    for name, shape in model.expected_tensors().items():
        if not random:
            empty = torch.empty(shape, dtype=dtype, device=device.torch_device)
            model.set_tensor(name, empty)
            continue
        weight = torch.randn(shape, generator=generator, dtype=torch.float32)
        weight = 1 + 0.1 * weight if len(shape) == 1 else weight * (2.0 / shape[-1]) ** 0.5
        model.set_tensor(name, weight.to(dtype).to(device.torch_device))
    model.tie_output()
    return model


def make_cache(model: Transformer, device: Device, policy: str, **options: Any) -> KVCache:
    """Return a cache for two sequences in the weights' dtype."""
    settings = {"max_batch_size": 2, "max_seq_len": 1024, "warn": print} | options
    placements = place(policy, model.params.n_layers)
    dtype = model.tok_embeddings.weight.dtype
    return KVCache(model.params, device, placements, dtype=dtype, **settings)


def advance(model: Transformer, cache: KVCache, new: dict[int, list[int]], logits: str) -> Any:
    """Run one step and return its logits on the device."""
    start = [cache.lengths[row] for row in new]
    with cache.step(list(new), start, [len(ids) for ids in new.values()], logits) as step:
        return model(step.upload([i for ids in new.values() for i in ids]), step)


def bandwidths(device: Device, report: Report, n_bytes: int) -> None:
    """Measure copies both ways, pinned and pageable, and within the card."""
    pinned = device.pinned_empty((n_bytes,), torch.uint8)
    pageable = torch.zeros(n_bytes, dtype=torch.uint8)
    card = torch.zeros(n_bytes, dtype=torch.uint8, device=device.torch_device)

    def rate(copy: Callable[[], object], times: int = 4) -> float:
        copy()
        device.synchronize()
        start_s = device.clock()
        for _ in range(times):
            copy()
        device.synchronize()
        return times * n_bytes / (device.clock() - start_s) / 1e9

    figures = {
        "h2d_pinned_gb_per_s": rate(lambda: card.copy_(pinned, non_blocking=True)),
        "d2h_pinned_gb_per_s": rate(lambda: pinned.copy_(card, non_blocking=True)),
        "h2d_pageable_gb_per_s": rate(lambda: card.copy_(pageable)),
        "d2h_pageable_gb_per_s": rate(lambda: pageable.copy_(card)),
        # Half of the bytes are read and half are written.
        "device_gb_per_s": rate(lambda: card[: n_bytes // 2].copy_(card[n_bytes // 2 :])),
    }
    for name, value in figures.items():
        report.figure(name, value)
    faster = figures["h2d_pinned_gb_per_s"] / figures["h2d_pageable_gb_per_s"]
    report.check("pinned copies are faster than pageable ones", faster > 1.1, f"{faster:.2f}x")


@contextlib.contextmanager
def delayed(device: Device, which: str) -> Iterator[None]:
    """Hold the copies or the compute stream back before each of its pieces of work."""
    if which == "none" or device.simulated:
        yield
        return
    use = device.use

    @contextlib.contextmanager
    def slow_use(stream: Any) -> Iterator[None]:
        if which == "compute":
            torch.cuda._sleep(SLEEP_CYCLES)
        with use(stream):
            if which == "copies":
                torch.cuda._sleep(SLEEP_CYCLES)
            yield

    device.use = slow_use  # type: ignore[method-assign]
    try:
        yield
    finally:
        del device.use  # type: ignore[attr-defined]


def equality(
    open_: Callable[[str], Device], report: Report, dtype: torch.dtype, slots: tuple[int, ...]
) -> None:
    """Compare logits with those of the resident cache, bit for bit, under delays."""

    def run(delay: str, policy: str, ring_slots: int) -> torch.Tensor:
        device = open_(delay)
        with device.scope():
            model = build(SMALL, device, dtype)
            cache = make_cache(
                model, device, policy, ring_slots=ring_slots, part_tokens=64, flush_tokens=16
            )
            with delayed(device, delay):
                advance(model, cache, {0: [i % 512 for i in range(150)]}, "none")
                advance(model, cache, {0: [i % 500 for i in range(90)], 1: [1, 2, 3]}, "none")
                out = [advance(model, cache, {0: [i], 1: [i + 9]}, "last") for i in range(24)]
                device.synchronize()
            result = torch.cat(out).cpu()
            cache.close()
        return result

    expected = run("none", "gpu", 3)
    for policy in ("offload", "gpu-layers:3", "layers:0-4=gpu,5=offload"):
        for ring_slots in slots:
            for delay in ("none", "copies", "compute"):
                name = f"resident equals {policy}, {ring_slots} slots, delayed: {delay}"
                with report.section(name):
                    report.check(name, torch.equal(run(delay, policy, ring_slots), expected))


def one_layer_stack(device: Device, report: Report, config: ModelConfig, n_tokens: int) -> None:
    """Look for hidden waits, the peak, pinned bytes and overlap in a realistic decode step."""
    with device.scope():
        model = build(config, device, torch.float16, random=not device.simulated)
        device.synchronize()
        weights_bytes = device.memory().allocated_bytes
        # The first passes load the kernels' libraries, which is host memory of its own.
        warm_up = make_cache(model, device, "gpu", max_batch_size=1)
        advance(model, warm_up, {0: [7] * min(512, n_tokens)}, "none")
        advance(model, warm_up, {0: [5]}, "last")
        warm_up.close()
        resident_before = psutil.Process().memory_info().rss
        cache = make_cache(
            model, device, f"gpu-layers:{config.n_layers // 2}", max_batch_size=1,
            max_seq_len=n_tokens + 512,
        )  # fmt: skip
        chunk = min(512, n_tokens)
        for _ in range(n_tokens // chunk):
            advance(model, cache, {0: [7] * chunk}, "none")
        for _ in range(3):
            advance(model, cache, {0: [5]}, "last")
        device.synchronize()
        device.reset_peak()
        with no_waits(device, report):
            advance(model, cache, {0: [5]}, "last")
        device.synchronize()
        stats = cache.stats()
        kept = weights_bytes + stats.device_kv_bytes + stats.ring_bytes
        peak = device.memory().peak_bytes
        report.check(
            "a decode step's peak is what is kept plus 5 % and 8 MiB",
            kept <= peak <= 1.05 * kept + (8 << 20),
            f"{peak / 2**20:.0f} MiB, kept {kept / 2**20:.0f} MiB",
        )
        pinned(device, report, cache, resident_before)
        (simulated_overlap if device.simulated else profiled_overlap)(
            device, report, lambda: advance(model, cache, {0: [5]}, "last")
        )
        cache.close()
        report.check("closing unpins everything", cache.stats().pinned_bytes == 0)


@contextlib.contextmanager
def no_waits(device: Device, report: Report) -> Iterator[None]:
    """Report whether the host waited for the card inside."""
    if device.simulated:
        before = len(device.card.syncs)  # type: ignore[attr-defined]
        yield
        waits = list(device.card.syncs)[before:]  # type: ignore[attr-defined]
        where = ", ".join(f"{wait.op} at {wait.where}" for wait in waits[:1])
        report.check("no hidden wait in a decode step", not waits, where)
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
        report.check("no hidden wait in a decode step", True)
    except RuntimeError as error:
        report.check("no hidden wait in a decode step", False, str(error).partition("\n")[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def pinned(device: Device, report: Report, cache: KVCache, resident_before: int) -> None:
    """Report whether the slabs are really pinned, and how much memory they take."""
    slabs, bytes_ = cache._memory.slabs, cache.stats().pinned_bytes
    if device.simulated:
        held = device.card.pinned_bytes  # type: ignore[attr-defined]
        ok = all(slab.pinned for slab in slabs) and held >= bytes_
        report.check("the cache's host memory is pinned", ok, f"{bytes_ / 2**20:.0f} MiB")
        return
    ok = all(slab.k.is_pinned() and slab.v.is_pinned() for slab in slabs)
    report.check("the cache's host memory is pinned", ok, f"{bytes_ / 2**20:.0f} MiB")
    grown = psutil.Process().memory_info().rss - resident_before
    report.check(
        "the process holds what is pinned, not its next power of two",
        0.9 * bytes_ <= grown <= 1.1 * bytes_ + (64 << 20),
        f"{grown / 2**20:.0f} MiB more resident",
    )


def simulated_overlap(device: Any, report: Report, step: Callable[[], object]) -> None:
    """Report how much of the copies' time lies under compute, from the timeline."""
    device.card.forget()
    for _ in range(3):
        step()
    device.synchronize()
    work = device.card.timeline
    copies = [(r.start_s, r.end_s) for r in work if r.engine == "h2d" and r.nbytes > 4096]
    compute = [(r.start_s, r.end_s) for r in work if r.engine == "compute"]
    overlap(report, copies, compute)


def profiled_overlap(device: Device, report: Report, step: Callable[[], object]) -> None:
    """Report the same from PyTorch's profiler, and what kind of copies there were."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step()
        device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    done = [event for event in events if event.get("ph") == "X"]
    kernels = [e for e in done if e.get("cat") == "kernel"]
    loads = [
        e for e in done
        if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"] and e["args"]["bytes"] > 4096
    ]  # fmt: skip
    pageable = [e["name"] for e in loads if "Pageable" in e["name"]]
    report.check("no pageable copy to the card", not pageable, str(pageable[:1]))
    streams = {e["args"]["stream"] for e in loads}
    apart = len(streams) == 1 and not streams & {e["args"]["stream"] for e in kernels}
    report.check("loads run on one stream of their own", apart, str(streams))
    overlap(
        report,
        [(e["ts"], e["ts"] + e["dur"]) for e in loads],
        [(e["ts"], e["ts"] + e["dur"]) for e in kernels],
    )


def overlap(
    report: Report, copies: list[tuple[float, float]], compute: list[tuple[float, float]]
) -> None:
    """Report how long copies and kernels ran together, as a share of the shorter of the two.

    On a card much faster than its link no schedule hides all copies; it can fill its kernels' time.
    """
    together = sum(
        max(0.0, min(stop, end) - max(start, begin))
        for start, stop in copies
        for begin, end in compute
        if begin < stop and end > start
    )
    shorter = min(sum(stop - start for start, stop in spans) for spans in (copies, compute))
    share = together / shorter if shorter else 0.0
    report.figure("overlap", share)
    report.check("copies and compute overlap for over 60 % of the shorter", share > 0.6)


def main() -> None:
    """Run the checks and print the table and one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sim", nargs="?", const="rtx-3060-12gb", help="a card of the presets")
    parser.add_argument("--small", action="store_true", help="small shapes: seconds")
    options = parser.parse_args()
    start_s = time.perf_counter()
    report = Report()
    orders = {"none": "inorder", "copies": "copy_last", "compute": "copy_first"}

    def open_(delay: str) -> Device:
        if options.sim:
            return simulated(options.sim, order=orders[delay])
        return open_device(options.device)

    with torch.no_grad():
        device = open_("none")
        print(
            f"{device.name}{', simulated' if device.simulated else ''}, torch {torch.__version__}"
        )
        small = options.small or bool(options.sim)
        with device.scope(), report.section("bandwidths"):
            bandwidths(device, report, (16 if small else 256) << 20)
        with report.section("equality"):
            equality(open_, report, torch.float16, (2,) if small else (2, 4))
        with report.section("a realistic decode step"):
            if options.sim:
                one_layer_stack(simulated(options.sim, values=False), report, LARGE, 8192)
            elif small:
                one_layer_stack(open_("none"), report, SMALL, 2048)
            else:
                one_layer_stack(open_("none"), report, LARGE, 8192)
    passed = sum(report.checks.values())
    took_s = time.perf_counter() - start_s
    print(f"{passed} of {len(report.checks)} passed in {took_s:.0f} s")
    print(
        json.dumps(
            {
                "device": device.name,
                "simulated": device.simulated,
                "passed": passed == len(report.checks),
                "checks": report.checks,
                "figures": {name: round(value, 3) for name, value in report.figures.items()},
            }
        )
    )
    sys.exit(0 if passed == len(report.checks) else 1)


if __name__ == "__main__":
    try:
        main()
    except OffloadLlamaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
