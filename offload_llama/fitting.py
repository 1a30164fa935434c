"""From what the user asked and what the device has to a plan: what is refused is refused here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload_llama.config import ModelConfig
from offload_llama.cost import SHORT_NAMES, Setup
from offload_llama.cost.packing import PACKED
from offload_llama.device import Device
from offload_llama.device.figures import profile_of
from offload_llama.errors import ConfigError, DoesNotFit
from offload_llama.hardware import HardwareProfile, format_bytes
from offload_llama.machine import host_memory_for_cache, platform_name, spill_warning
from offload_llama.planner import (
    AUTO_BATCH_CTX,
    Budget,
    MemoryPlan,
    budget_of,
    max_batch,
)
from offload_llama.policy import Placement, max_context, place, placements_of, plan

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asked for. `ctx` and `max_batch_size` None leave them to the plan."""

    weights: str
    kv_dtype: str
    dtype: str
    kv_policy: str
    ctx: int | None
    max_batch_size: int | None
    prefill_chunk: int
    part_tokens: int | None = None
    flush_tokens: int | None = None
    ring_slots: int | None = None
    reserve_bytes: int | None = None
    ram_bytes: int | None = None
    vram_bytes: int | None = None
    saved: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a model is loaded with. `plan` is None where device and host memory are the same."""

    placements: tuple[Placement, ...]
    max_seq_len: int
    max_batch_size: int
    plan: MemoryPlan | None


def setup_of(config: ModelConfig, wishes: Wishes, *, ctx: int, batch: int) -> Setup:
    """Return what the planner is asked.

    Raises:
        ConfigError: a size is not possible, or a name is unknown.
    """
    name = SHORT_NAMES[wishes.dtype]
    return Setup(
        config=config,
        ctx=ctx,
        batch=batch,
        weights=name if wishes.weights == "auto" else wishes.weights,
        kv_dtype=name if wishes.kv_dtype == "auto" else wishes.kv_dtype,
        dtype=wishes.dtype,
        prefill_chunk=wishes.prefill_chunk,
        part_tokens=wishes.part_tokens,
        flush_tokens=wishes.flush_tokens,
        ring_slots=wishes.ring_slots,
    )


def fit(config: ModelConfig, device: Device, wishes: Wishes, say: Callable[[str], None]) -> Fit:
    """Return placements, context and batch that the device can hold.

    Args:
        config: the model.
        device: where it shall run.
        wishes: what was asked for.
        say: is told in one line each what was decided for the user.

    Raises:
        ConfigError: a wish is not possible for this model or device.
        DoesNotFit: memory does not suffice; the message says what would.
    """
    setup = setup_of(
        config, wishes, ctx=wishes.ctx or config.max_seq_len, batch=wishes.max_batch_size or 1
    )
    profile = profile_of(device)
    if profile is None:
        return _shared_memory(setup, wishes, say)
    budget = _budget(device, profile, wishes)
    if wishes.saved is not None:
        return _replayed(setup, profile, budget, wishes.saved)
    if wishes.max_batch_size is None:
        setup = _with_batch(setup, profile, budget, wishes)
        say(
            f"batch of {setup.batch} sequences of {setup.ctx:,} tokens each "
            "(--ctx sets the tokens, --max-batch-size the sequences)"
        )
    found, placements = plan(wishes.kv_policy, setup, profile, budget)
    if wishes.ctx is None and not (found.fits and found.host_fits):
        shorter = max_context(setup, profile, budget, policy=wishes.kv_policy)
        if shorter is not None:
            say(
                f"context {shorter.setup.ctx:,} tokens: the model's {setup.ctx:,} do not fit "
                f"({_what_is_short(found)}); --ctx sets it"
            )
            found, placements = plan(wishes.kv_policy, shorter.setup, profile, budget)
    if not (found.fits and found.host_fits):
        raise does_not_fit(found, wishes.kv_policy, device.name)
    _warn_of_spilling(device, found, say)
    return Fit(
        placements=_at_start(placements, found),
        max_seq_len=found.setup.ctx,
        max_batch_size=found.setup.batch,
        plan=found,
    )


def _at_start(placements: tuple[Placement, ...], found: MemoryPlan) -> tuple[Placement, ...]:
    """Return where the layers are at first: all on the card, if they leave as the context grows."""
    if found.kv_budget_bytes is None:
        return placements
    return tuple(
        replace(p, store="resident", reason=f"on the card until its place is needed ({p.reason})")
        if p.store == "host"
        else p
        for p in placements
    )


def _budget(device: Device, profile: HardwareProfile, wishes: Wishes) -> Budget:
    """Return what of the device and the host may be used.

    Raises:
        ConfigError: more of the card is asked for than is free.
    """
    memory = device.memory()
    # The runtime's context is there by now; the plan counts it among its own bytes.
    free_bytes = memory.free_bytes + memory.allocated_bytes + profile.context_bytes
    if wishes.vram_bytes is not None:
        if wishes.vram_bytes > free_bytes:
            raise ConfigError(
                f"--vram {format_bytes(wishes.vram_bytes)}: {device.name} has "
                f"{format_bytes(free_bytes)} free of {format_bytes(memory.total_bytes)}; leave "
                "--vram out to use what is free, or close what holds the rest"
            )
        free_bytes = wishes.vram_bytes
    ram_bytes = host_memory_for_cache()
    return budget_of(
        profile,
        free_bytes=free_bytes,
        reserve_bytes=wishes.reserve_bytes,
        ram_bytes=ram_bytes if wishes.ram_bytes is None else wishes.ram_bytes,
    )


def _shared_memory(setup: Setup, wishes: Wishes, say: Callable[[str], None]) -> Fit:
    """Return the fit for a device whose memory is the host's: no layer can be elsewhere.

    Raises:
        DoesNotFit: weights and cache exceed the memory, and the context was asked for.
    """
    policy = wishes.kv_policy
    if policy != "auto" and not policy.startswith("budget:"):
        placements = place(policy, setup.config.n_layers)
        if any(placement.store != "resident" for placement in placements):
            say(f"device and host memory are the same here: KV policy {policy} changes nothing")
    available = host_memory_for_cache() if wishes.ram_bytes is None else wishes.ram_bytes
    row_bytes = setup.kv_bytes_per_token * setup.batch
    if row_bytes * setup.ctx > available:
        ctx = min(setup.config.max_seq_len, available // row_bytes // 256 * 256)
        if wishes.ctx is not None or ctx < 256:
            raise DoesNotFit(
                f"the KV cache of {setup.batch} x {setup.ctx:,} tokens needs "
                f"{format_bytes(row_bytes * setup.ctx)} of host memory, of which "
                f"{format_bytes(available)} may be used; use --ctx {max(2, ctx)} or less",
                needed_bytes=row_bytes * setup.ctx,
                available_bytes=available,
                suggestions=(f"--ctx {max(2, ctx)}",),
            )
        say(f"context {ctx:,} tokens: more do not fit the host's memory; --ctx sets it")
        setup = replace(setup, ctx=ctx)
    reason = "device and host memory are the same"
    return Fit(
        placements=tuple(
            Placement(layer=layer, store="resident", reason=reason)
            for layer in range(setup.config.n_layers)
        ),
        max_seq_len=setup.ctx,
        max_batch_size=setup.batch,
        plan=None,
    )


def _replayed(
    setup: Setup, profile: HardwareProfile, budget: Budget, saved: Mapping[str, Any]
) -> Fit:
    """Return the fit of a saved plan, placement by placement.

    Raises:
        ConfigError: it is a plan of another model.
        DoesNotFit: this device does not hold it.
    """
    placements = placements_of(saved.get("placements"), setup.config.n_layers, "--plan")
    stores = [f"{p.layer}={'offload' if p.store == 'host' else 'gpu'}" for p in placements]
    found, _ = plan("layers:" + ",".join(stores), setup, profile, budget)
    if not (found.fits and found.host_fits):
        raise does_not_fit(found, "--plan", profile.name)
    return Fit(placements=placements, max_seq_len=setup.ctx, max_batch_size=setup.batch, plan=found)


def _with_batch(setup: Setup, profile: HardwareProfile, budget: Budget, wishes: Wishes) -> Setup:
    """Return the setup with as many sequences as fit, at the context asked for or a usual one."""
    ctx = wishes.ctx or min(AUTO_BATCH_CTX, setup.config.max_seq_len)
    shorter = replace(setup, ctx=ctx)
    return replace(shorter, batch=max(1, max_batch(shorter, profile, budget)))


def _what_is_short(found: MemoryPlan) -> str:
    if not found.fits:
        return (
            f"{format_bytes(found.needed_bytes)} of the card are needed, "
            f"{format_bytes(found.available_bytes)} are there"
        )
    assert found.budget.ram_bytes is not None
    return (
        f"{format_bytes(sum(found.host_bytes.values()))} of host memory are needed, "
        f"{format_bytes(found.budget.ram_bytes)} may be used"
    )


def does_not_fit(found: MemoryPlan, policy: str, device_name: str) -> DoesNotFit:
    """Return the error for a plan that exceeds the memory, with what would fit instead."""
    setup, profile, budget = found.setup, found.profile, found.budget
    suggestions: list[str] = []
    if policy not in ("auto", "--plan"):
        better, _ = plan("auto", setup, profile, budget)
        if better.fits and better.host_fits:
            suggestions.append("--kv-policy auto")
    longest = max_context(setup, profile, budget, policy="auto" if policy == "--plan" else policy)
    if longest is not None and longest.setup.ctx < setup.ctx:
        suggestions.append(f"--ctx {longest.setup.ctx}")
    batch = max_batch(setup, profile, budget, setup.batch) if setup.batch > 1 else 0
    if 0 < batch < setup.batch:
        suggestions.append(f"--max-batch-size {batch}")
    short = found.needed_bytes - found.available_bytes
    if 0 < short <= budget.reserve_bytes:
        left = (budget.reserve_bytes - short) // MIB
        suggestions.append(f"--reserve {left}MiB" if left else "--reserve 1B")
    if not suggestions:
        suggestions = ["a smaller model", "--device cpu"]
        if setup.dtype == "float32":
            suggestions.insert(0, "--dtype fp16")
    needed, available = found.needed_bytes, found.available_bytes
    if found.fits and budget.ram_bytes is not None:
        needed, available = sum(found.host_bytes.values()), budget.ram_bytes
    weights = found.device_bytes["weights"]
    alone = f"; its weights alone are {format_bytes(weights)}" if weights > available else ""
    return DoesNotFit(
        f"{setup.batch} x {setup.ctx:,} tokens with KV policy {policy} do not fit {device_name}: "
        f"{_what_is_short(found)}{alone}; use {' or '.join(suggestions[:3])}",
        needed_bytes=needed,
        available_bytes=available,
        suggestions=tuple(suggestions[:3]),
    )


def _warn_of_spilling(device: Device, found: MemoryPlan, say: Callable[[str], None]) -> None:
    """Say so where a driver would page the card's memory to the host without a word."""
    if device.simulated:
        return
    memory = device.memory()
    needed = found.needed_bytes - found.device_bytes["reserve"]
    warning = spill_warning(platform_name(), memory.free_bytes, memory.total_bytes, needed)
    if warning is not None:
        say(warning)


def dtype_name(dtype: str, device: Device) -> str:
    """Return the dtype to use: the one asked for, or the device's own."""
    if dtype != "auto":
        return dtype
    kind = device.torch_device.type
    if kind == "cpu":
        return "float32"  # whatever the files say: half precision is slow there, or missing
    if kind == "cuda":
        with device.scope():
            major, _minor = torch.cuda.get_device_capability(device.torch_device)
        return "bfloat16" if major >= 8 else "float16"
    return "bfloat16"


def require_one_kind(weights: str, dtype: str) -> None:
    """Refuse plain weights of another dtype than is computed with.

    Raises:
        ConfigError: they differ; both names are in the message.
    """
    if weights in SHORT_NAMES.values() and weights != SHORT_NAMES[dtype]:
        raise ConfigError(
            f"--weights {weights} with --dtype {SHORT_NAMES[dtype]}: weights that are not packed "
            f"are kept as they are computed with; leave --weights out, or use "
            f"{', '.join(PACKED)}"
        )


def batch_size(asked: int | str) -> int | None:
    """Return the sequences that run together, None for as many as fit."""
    if asked == "auto":
        return None
    if isinstance(asked, str):
        raise ConfigError(f"--max-batch-size must be a number or auto, got {asked!r}")
    if asked < 1:
        raise ConfigError(f"--max-batch-size must be 1 or more, got {asked}")
    return asked


def require_runnable(flag: str, name: str, runnable: Sequence[str]) -> None:
    """Refuse what can be planned but not run yet.

    Raises:
        ConfigError: it is not among what runs.
    """
    if name not in ("auto", *runnable):
        raise ConfigError(
            f"{flag} {name} is not yet runnable; use {', '.join(runnable)}, or see what it would "
            f"take: offload-llama plan MODEL {flag} {name}"
        )
