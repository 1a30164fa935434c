"""A plan as JSON: its figures, and all that a replay needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from offload_llama.cost import SHORT_NAMES
from offload_llama.options.saved import FORMAT, shape_of
from offload_llama.report.alternatives import Alternative
from offload_llama.report.question import Answer, Question


def as_json(
    question: Question, answer: Answer, others: Sequence[Alternative] = ()
) -> dict[str, Any]:
    """Return a plan as JSON can hold it: its figures, and all that a replay needs."""
    plan, setup = answer.plan, question.setup
    return {
        "format": FORMAT,
        "fits": answer.fits,
        "needed_bytes": plan.needed_bytes,
        "available_bytes": plan.available_bytes,
        "kv_bytes_per_token": setup.kv_bytes_per_token,
        "kv_bytes_total": setup.kv_bytes,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "placements": [asdict(placement) for placement in answer.placements],
        "predicted": predicted(answer),
        "alternatives": [_alternative(other) for other in others],
        "model": question.run_model,
        "model_name": question.shape.label,
        "shape": shape_of(setup.config),
        "card": question.profile.name,
        "target": list(question.target.options),
        "ctx": setup.ctx,
        "batch": setup.batch,
        "prefill_chunk": setup.prefill_chunk,
        "weights": setup.weights,
        "kv_dtype": setup.kv_dtype,
        "dtype": SHORT_NAMES[setup.dtype],
        "policy": question.policy,
        "not_yet_runnable": question.not_yet_runnable,
        "device_fits": plan.fits,
        "host_fits": plan.host_fits,
        "host_available_bytes": plan.budget.ram_bytes,
        "overhead_bytes": plan.overhead_bytes,
        "peak_bytes": plan.peak_bytes,
        "kv_budget_bytes": plan.kv_budget_bytes,
        "ring_slots": plan.ring_slots,
    }


def predicted(answer: Answer) -> dict[str, float]:
    """Return the predicted milliseconds by the names that JSON gives them."""
    speed = answer.speed
    return {
        "decode_ms": round(1e3 * speed.decode_s, 4),
        "decode_ms_half": round(1e3 * speed.decode_half_s, 4),
        "ttft_ms": round(1e3 * speed.ttft_s, 4),
    }


def _alternative(other: Alternative) -> dict[str, Any]:
    setup = other.question.setup
    return {
        "command": other.command,
        "gain": other.gain,
        "needed_bytes": other.answer.plan.needed_bytes,
        "kv_bytes_total": setup.kv_bytes,
        "predicted": predicted(other.answer),
        "not_yet_runnable": other.question.not_yet_runnable,
        "lossy": setup.lossy,
    }
