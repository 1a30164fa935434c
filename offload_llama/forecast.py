"""What was to be expected of a run, beside what it came to, and what a moved layer costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload_llama.cost import decode_seconds
from offload_llama.cost.memory import device_terms, tensor_bytes
from offload_llama.hardware import format_bytes
from offload_llama.planner import MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How far a run went: its sequences, the longest prompt, and the most tokens one came to."""

    rows: int
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Planned figures of a run of one extent."""

    peak_device_bytes: int
    host_kv_bytes: int
    decode_s: float


def expected(plan: MemoryPlan, hosts: Sequence[bool], extent: Extent) -> Expected:
    """Return what the plan's formulas give for what was really run.

    Args:
        plan: what the model was loaded with.
        hosts: for each layer, whether it is offloaded now.
        extent: prompts and tokens.
    """
    n_host, flush = sum(hosts), plan.setup.geometry.flush_tokens
    # The newest token was sampled and is not in the cache.
    cached = max(1, extent.tokens - 1)
    setup = replace(plan.setup, ctx=max(2, cached), batch=extent.rows)
    prompt = max(1, min(extent.prompt_tokens, setup.ctx))
    terms, _ = device_terms(setup, plan.profile, n_host, prompt)
    terms["ring"] = plan.device_bytes["ring"] or terms["ring"]
    on_host = prompt + (cached - prompt) // flush * flush
    middle = max(1, (prompt + extent.tokens) // 2)
    return Expected(
        peak_device_bytes=tensor_bytes(terms) + plan.profile.workspace_bytes,
        host_kv_bytes=2 * n_host * extent.rows * on_host * setup.kv_row_bytes,
        decode_s=decode_seconds(setup, plan.profile, hosts, middle),
    )


def moved_line(
    plan: MemoryPlan | None, moved: Sequence[int], hosts: Sequence[bool], tokens: Sequence[int]
) -> str:
    """Return the line that says which layers left the card and what a token costs from now on.

    Args:
        plan: what the model was loaded with.
        moved: the layers that moved just now.
        hosts: for each layer, whether it is offloaded now.
        tokens: of each sequence.
    """
    total = sum(tokens)
    which = f"layer{'s' if len(moved) > 1 else ''} {', '.join(map(str, sorted(moved)))}"
    text = f"at {total:,} tokens the KV cache of {which} moved to host memory"
    if plan is None:
        return text
    setup = plan.setup
    moved_bytes = 2 * len(moved) * total * setup.kv_row_bytes
    rows = max(1, sum(n > 0 for n in tokens))
    now_s = decode_seconds(
        replace(setup, batch=rows), plan.profile, hosts, min(setup.ctx, max(2, total // rows))
    )
    return (
        f"{text} ({format_bytes(moved_bytes)}; {sum(hosts)} of {len(hosts)} layers are there): "
        f"a token now takes about {now_s * 1e3:.1f} ms"
    )
