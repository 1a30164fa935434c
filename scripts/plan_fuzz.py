"""Plans random runs and carries them out on simulated cards with exactly that much memory.

    python scripts/plan_fuzz.py [--cases 300] [--seed 0] [--quick] [--jobs 2]

A case is a model's shapes, a card, a context, a batch, numbers, a policy and a chunk. What the plan
says fits must run without an allocation failure, its peak must stay under the plan and close to it;
a sample of what does not fit is forced and must fail. Nothing is kept free (`reserve` 0), so that
the borders are sharp. The last line is one JSON object; exit code 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offload_llama.config import ModelConfig
from offload_llama.cost import SHORT_NAMES, Setup
from offload_llama.hardware import card
from offload_llama.planner import MemoryPlan, budget_of
from offload_llama.policy import plan

MIB = 1 << 20
BELOW_SHARE, BELOW_SHARE_WITHOUT, TINY_BYTES = 0.02, 0.05, 2 * MIB
# A shortage below this share of the need may be the plan's own margin.
FORCED_SHARE = 0.03


def shape(*sizes: int, **more: Any) -> ModelConfig:
    """Return a config of (dim, n_layers, n_heads, n_kv_heads, head_dim, hidden, vocabulary)."""
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size")
    return ModelConfig(**dict(zip(names, sizes, strict=True)), max_seq_len=32768, **more)


TINY = {
    "tiny": shape(32, 4, 4, 2, 8, 64, 97),
    "tiny-mha": shape(64, 5, 4, 4, 16, 128, 301, tied_output=True),
    "tiny-wide": shape(96, 3, 6, 1, 32, 160, 512),
    "tiny-deep": shape(48, 12, 3, 3, 16, 96, 211),
}
MIDDLE = {
    "smollm2-135m": shape(576, 30, 9, 3, 64, 1536, 49152, tied_output=True),
    "llama-3.2-1b": shape(2048, 16, 32, 8, 64, 8192, 128256, tied_output=True),
    "smollm2-1.7b": shape(2048, 24, 32, 32, 64, 8192, 49152, tied_output=True),
}
LARGE = {
    "llama-2-7b": shape(4096, 32, 32, 32, 128, 11008, 32000),
    "llama-3.1-8b": shape(4096, 32, 32, 8, 128, 14336, 128256),
}
MODELS = TINY | MIDDLE | LARGE
CARDS = ("rtx-3060-12gb", "rtx-4060", "rtx-2060-12gb", "rtx-5070", "rx-7600")


@dataclass(frozen=True, slots=True)
class Case:
    """One run to plan and to carry out. `share` is the card's memory over what would be needed."""

    number: int
    model: str
    card: str
    dtype: str
    ctx: int
    batch: int
    chunk: int
    policy: str
    share: float


def draw(number: int, seed: int, quick: bool) -> Case:
    """Return the case of a number, the same for the same seed."""
    rng = random.Random(f"{seed}/{number}")
    model = rng.choice([*TINY, *MIDDLE, *LARGE, *LARGE])
    n_layers = MODELS[model].n_layers
    longest = 700 if quick else {True: 6000, False: 2500}[model in TINY]
    ctx = rng.choice([rng.randint(40, longest), rng.randint(longest // 2, longest)])
    kept = rng.randint(0, n_layers - 1)
    policy = rng.choice(["auto", "auto", "gpu", "offload", f"gpu-layers:{kept}", "budget"])
    return Case(
        number=number,
        model=model,
        card=rng.choice(CARDS),
        dtype=rng.choice(["float16", "bfloat16", "float32"] if model in TINY else ["float16"]),
        ctx=ctx,
        batch=rng.choice([1, 1, 2, 3] if model in LARGE or quick else [1, 2, 4]),
        chunk=rng.choice([128, 256, 512]),
        policy=policy,
        share=rng.choice([rng.uniform(0.85, 0.999), 1.0, rng.uniform(1.0, 1.1)]),
    )


def planned(case: Case) -> MemoryPlan:
    """Return the plan of a case on a card that has its share of what the policy would need.

    For `auto` that is what all layers on the card would need: with less, some must leave.
    """
    name = SHORT_NAMES[case.dtype]
    setup = Setup(
        config=MODELS[case.model],
        ctx=case.ctx,
        batch=case.batch,
        weights=name,
        kv_dtype=name,
        dtype=case.dtype,
        prefill_chunk=case.chunk,
    )
    # The simulated card counts tensors and nothing else.
    roomy = card(f"{case.card}?vram=64GiB&workspace=0")
    unlimited = budget_of(roomy, reserve_bytes=0)
    policy = "gpu" if case.policy == "auto" else case.policy
    if policy == "budget":
        policy = f"budget:{setup.kv_bytes // 2}"
    whole, _ = plan(policy, setup, roomy, unlimited)
    context_bytes = roomy.context_bytes
    vram = context_bytes + round((whole.needed_bytes - context_bytes) * case.share)
    profile = card(f"{case.card}?vram={vram}&workspace=0")
    budget = budget_of(profile, reserve_bytes=0)
    found, _ = plan("auto" if case.policy == "auto" else policy, setup, profile, budget)
    return found


def carry_out(case: Case, found: MemoryPlan) -> dict[str, int] | None:
    """Run a plan to its full context and return what was measured; None if memory ran out.

    Every row is filled, one token is decoded in all, then the last row's last two chunks are taken
    back and filled in again beside the others, as after an edited message: the most that a run of
    this setup can hold at once.
    """
    import torch

    from offload_llama.cache import KVCache
    from offload_llama.device.sim import simulated
    from offload_llama.model import Transformer
    from offload_llama.policy import Placement

    setup = found.setup
    dtype = getattr(torch, case.dtype)
    device = simulated(f"{case.card}?vram={found.profile.vram_bytes}", values=False)
    placements = [
        Placement(layer=layer, store="host" if host else "resident", reason="planned")
        for layer, host in enumerate(found.hosts)
    ]
    with device.scope(), torch.no_grad():
        try:
            model = Transformer(setup.config)
            for name, sizes in model.expected_tensors().items():
                weight = torch.empty(sizes, dtype=dtype, device=device.torch_device)
                model.set_tensor(name, weight)
            model.tie_output()
            weights_bytes = device.memory().allocated_bytes
            cache = KVCache(
                setup.config,
                device,
                placements,
                dtype=dtype,
                max_batch_size=setup.batch,
                max_seq_len=setup.ctx,
                ring_slots=found.ring_slots,
            )

            def prefill(row: int, n_tokens: int, first: int = 0) -> None:
                for start in range(first, n_tokens, setup.prefill_chunk):
                    n = min(setup.prefill_chunk, n_tokens - start)
                    wanted = "last" if start + n == n_tokens else "none"
                    with cache.step([row], [start], [n], wanted) as step:
                        logits = model(step.upload([0] * n), step)
                logits.argmax(-1).tolist()

            def decode() -> None:
                rows = list(range(setup.batch))
                with cache.step(rows, list(cache.lengths), [1] * setup.batch) as step:
                    logits = model(step.upload([0] * setup.batch), step)
                logits.argmax(-1).tolist()

            for row in range(setup.batch):
                prefill(row, setup.ctx - 2)
            decode()
            whole = (setup.ctx - 1) // setup.prefill_chunk
            kept = max(0, whole - 1) * setup.prefill_chunk
            cache.truncate(setup.batch - 1, kept)
            prefill(setup.batch - 1, setup.ctx - 1, kept)
            decode()
        except torch.OutOfMemoryError:
            return None
        return {
            "peak_bytes": device.memory().peak_bytes,
            "weights_bytes": weights_bytes,
            "pinned_bytes": cache.stats().pinned_bytes,
        }


def check(case: Case, forced: bool) -> dict[str, Any]:
    """Return what a case showed; `wrong` says what did not hold."""
    began_s = time.perf_counter()
    found = planned(case)
    result: dict[str, Any] = {
        "case": case.number,
        "fits": found.fits,
        "n_host": found.n_host,
        "large": case.model in LARGE,
        "wrong": "",
        "forced": False,
    }
    short = found.needed_bytes - found.available_bytes
    if not found.fits:
        if forced and short > FORCED_SHARE * found.needed_bytes:
            result["forced"] = True
            if carry_out(case, found) is not None:
                result["wrong"] = "ran although the plan says it does not fit"
        result["seconds"] = time.perf_counter() - began_s
        return result
    real = carry_out(case, found)
    if real is None:
        result["wrong"] = "ran out of memory although the plan says it fits"
    else:
        over = found.profile.context_bytes
        plan_bytes, real_bytes = found.peak_bytes, real["peak_bytes"]
        below = plan_bytes - real_bytes
        result["below_bytes"] = below
        result["below_share"] = below / (real_bytes + over)
        rest = real_bytes - real["weights_bytes"]
        result["below_share_without"] = below / rest
        if below < 0:
            result["wrong"] = f"the peak is {-below} bytes above the plan"
        elif result["below_share"] > BELOW_SHARE:
            result["wrong"] = f"the peak is {result['below_share']:.1%} below the plan"
        elif below > BELOW_SHARE_WITHOUT * rest and not (
            case.model in TINY and below <= TINY_BYTES
        ):
            result["wrong"] = f"without weights, the peak is {below / rest:.1%} below the plan"
        elif real["pinned_bytes"] > sum(found.host_bytes.values()):
            result["wrong"] = f"{real['pinned_bytes']} bytes pinned, more than planned"
    result["seconds"] = time.perf_counter() - began_s
    return result


def _check(job: tuple[Case, bool]) -> tuple[Case, dict[str, Any]]:
    return job[0], check(*job)


def run(numbers: Sequence[int], seed: int, quick: bool, jobs: int) -> dict[str, Any]:
    """Check the cases and return the totals."""
    work = [(draw(n, seed, quick), n % 2 == 0) for n in numbers]
    totals: Counter[str] = Counter()
    wrong, below, without = [], [0.0], [0.0]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for case, result in pool.imap(_check, work):
            totals["cases"] += 1
            totals["fit"] += result["fits"]
            totals["offloaded"] += result["fits"] and result["n_host"] > 0
            totals["large"] += result["fits"] and result["large"]
            totals["forced"] += result["forced"]
            if "below_share" in result:
                below.append(result["below_share"])
                if case.model not in TINY:
                    without.append(result["below_share_without"])
            if result["wrong"]:
                wrong.append({"case": repr(case), "wrong": result["wrong"]})
                print(f"WRONG {case}: {result['wrong']}", flush=True)
    return {
        **totals,
        "most_below_share": max(below),
        "most_below_share_without_weights": max(without),
        "wrong": wrong,
    }


def main() -> None:
    """Print what went wrong and the totals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="short contexts")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    totals = run(range(options.cases), options.seed, options.quick, options.jobs)
    print(json.dumps(totals))
    sys.exit(1 if totals["wrong"] else 0)


if __name__ == "__main__":
    main()
