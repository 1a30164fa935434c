"""Latency against memory: what each policy costs and takes, at several contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offload_llama.hardware import format_bytes
from offload_llama.report.question import Question, tokens_word

CONTEXTS = 5
"""How many contexts a frontier has, each twice as long as the one before, up to that asked for."""
STEPS = 8
"""How many numbers of resident layers are looked at, besides none."""


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one context."""

    ctx: int
    policy: str
    n_resident: int
    device_bytes: int
    host_bytes: int
    decode_s: float
    fits: bool


def frontier(question: Question) -> list[Point]:
    """Return the points, by context and then from no layer on the card to all of them."""
    points = []
    for ctx in contexts(question):
        for policy, n_resident in policies(question.config.n_layers):
            answer = question.varied(ctx=ctx, policy=policy).answer()
            points.append(
                Point(
                    ctx=ctx,
                    policy=policy,
                    n_resident=n_resident,
                    device_bytes=answer.plan.needed_bytes,
                    host_bytes=sum(answer.plan.host_bytes.values()),
                    decode_s=answer.decode_s,
                    fits=answer.fits,
                )
            )
    return points


def contexts(question: Question) -> list[int]:
    """Return the contexts that a frontier is drawn for, shortest first."""
    found: list[int] = []
    ctx = question.setup.ctx
    while ctx >= min(1024, question.setup.ctx) and len(found) < CONTEXTS:
        found.append(ctx)
        ctx //= 2
    return found[::-1]


def policies(n_layers: int) -> list[tuple[str, int]]:
    """Return policies with the number of layers each keeps on the card, fewest first."""
    kept = sorted({round(n_layers * i / STEPS) for i in range(1, STEPS)} - {0, n_layers})
    between = [(f"gpu-layers:{n}", n) for n in kept]
    return [("offload", 0), *between, ("gpu", n_layers)]


def as_table(question: Question, points: Sequence[Point]) -> str:
    """Return the frontier as text: one block for each context."""
    lines = [
        f"{question.shape.label} on {question.profile.name}, "
        f"{format_bytes(question.budget.available_bytes)} available: latency against memory",
        f"{'context':>8}  {'KV policy':<14}{'on the card':>12}{'on the host':>12}"
        f"{'ms/token':>10}{'tokens/s':>10}",
    ]
    before = None
    for point in points:
        if before is not None and point.ctx != before:
            lines.append("")
        before = point.ctx
        lines.append(
            f"{tokens_word(point.ctx):>8}  {point.policy:<14}{format_bytes(point.device_bytes):>12}"
            f"{format_bytes(point.host_bytes):>12}{1e3 * point.decode_s:>10.1f}"
            f"{1 / point.decode_s:>10.1f}{'' if point.fits else '  does not fit'}"
        )
    return "\n".join(lines) + "\n"


def as_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the points as JSON can hold them."""
    return [
        {
            "ctx": point.ctx,
            "policy": point.policy,
            "resident_layers": point.n_resident,
            "device_bytes": point.device_bytes,
            "host_bytes": point.host_bytes,
            "decode_ms": round(1e3 * point.decode_s, 4),
            "fits": point.fits,
        }
        for point in points
    ]
