"""What else could be asked: variants of a question that fit, or are faster, as ready commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offload_llama.cost import WEIGHT_BITS
from offload_llama.planner import largest, plan_for
from offload_llama.policy import max_context
from offload_llama.report.question import Answer, Question

FASTER = 0.95
"""A variant counts as faster below this share of the time."""
MAX_BATCH = 256


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another question with its answer; `gain` says what it changes, in a few words."""

    question: Question
    answer: Answer
    gain: str

    @property
    def command(self) -> str:
        return self.question.command()


def alternatives(question: Question, answer: Answer, n: int = 3) -> list[Alternative]:
    """Return up to n variants that fit and, if the question itself fits, are faster.

    What runs today comes first, then what changes no number of the cache, then the fastest.
    """
    found = []
    seen = {question.setup}
    for gain, variant in _variants(question, answer):
        if variant.setup in seen and variant.policy == question.policy:
            continue
        seen.add(variant.setup)
        other = variant.answer()
        faster = other.decode_s < FASTER * answer.decode_s
        if other.fits and (faster or not answer.fits):
            found.append(Alternative(variant, other, gain))
    found.sort(key=_rank)
    return found[:n]


def _rank(alternative: Alternative) -> tuple[bool, bool, float]:
    setup = alternative.question.setup
    return (not setup.runnable, setup.lossy, alternative.answer.decode_s)


def _variants(question: Question, answer: Answer) -> Iterator[tuple[str, Question]]:
    setup = question.setup
    if question.policy != "auto":
        yield "the policy chosen for you", question.varied(policy="auto")
    if setup.prefill_chunk > 128 and not answer.plan.fits:
        yield "a smaller prefill chunk", question.varied(prefill_chunk=128, policy="auto")
    if setup.ctx >= 1024:
        yield "half the context", question.varied(ctx=setup.ctx // 2, policy="auto")
    if not answer.fits:
        longest = longest_context(question)
        if longest is not None and longest != setup.ctx // 2:
            yield "the longest context that fits", question.varied(ctx=longest, policy="auto")
    if setup.batch > 1:
        half = question.varied(batch=setup.batch // 2, policy="auto")
        yield "half the batch", half
    for weights in _fewer_bits(setup.weights):
        yield f"{weights} weights", question.varied(weights=weights, policy="auto")
    if question.allow_lossy or not answer.fits:
        for kv_dtype in ("int8",):
            if not setup.lossy:
                yield f"{kv_dtype} keys and values", _lossy(question, kv_dtype)


def _lossy(question: Question, kv_dtype: str) -> Question:
    return question.varied(kv_dtype=kv_dtype, policy="auto")


def _fewer_bits(weights: str) -> Iterator[str]:
    for name in ("bf16", "int8", "int4"):
        if WEIGHT_BITS[name] < WEIGHT_BITS[weights]:
            yield name


def longest_context(question: Question, min_tps: float | None = None) -> int | None:
    """Return the longest context that fits (and is this fast) with the question's policy."""
    found = max_context(
        question.setup,
        question.profile,
        question.budget,
        policy=question.policy,
        min_tps=min_tps,
    )
    return None if found is None else found.setup.ctx


def sequences_on_card(question: Question) -> int:
    """Return how many sequences of this context the card holds with no layer offloaded."""
    hosts = (False,) * question.config.n_layers

    def fits(batch: int) -> bool:
        setup = question.varied(batch=batch).setup
        return plan_for(setup, question.profile, question.budget, hosts).fits

    # Keys and values alone bound it: plans of many sequences are what takes long here.
    at_most = question.budget.available_bytes // question.varied(batch=1).setup.kv_bytes
    return largest(fits, min(MAX_BATCH, at_most))


def sequences_with_host(question: Question) -> int:
    """Return how many sequences of this context card and host hold together."""

    def fits(batch: int) -> bool:
        return question.varied(batch=batch, policy="auto").answer().fits

    return largest(fits, MAX_BATCH)
