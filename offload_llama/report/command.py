"""One `plan` command from its options to what it prints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from offload_llama.checkpoint.headers import model_shape
from offload_llama.console import Console, json_is_ascii, report_error
from offload_llama.cost import Setup
from offload_llama.errors import ConfigError, PlanError
from offload_llama.hardware import format_bytes, parse_bytes
from offload_llama.options.saved import SavedPlan
from offload_llama.planner import AUTO_BATCH_CTX, max_batch
from offload_llama.report import saved, table
from offload_llama.report.alternatives import alternatives, longest_context
from offload_llama.report.question import Answer, Question, numbers, tokens_word
from offload_llama.report.target import Target, find_target

DOES_NOT_FIT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """What the user asked of `plan`; sizes are bytes.

    `ctx` None is what the model allows, `batch` may be "auto". `replayed` is a saved plan whose
    settings the others already have.

    Raises:
        ConfigError: the options contradict each other.
    """

    model: str
    gpu: str | None
    device: str
    vram: int | None
    ram: int | None
    reserve: int | None
    ctx: int | None
    batch: int | str
    weights: str
    kv_dtype: str
    dtype: str
    policy: str
    prefill_chunk: int
    allow_lossy: bool
    min_tps: float | None
    explain: bool
    frontier: bool
    plot: str | None
    check: bool
    as_json: bool
    replayed: SavedPlan | None
    console: Console

    def __post_init__(self) -> None:
        if self.min_tps is not None and not 0 < self.min_tps < float("inf"):
            raise ConfigError(f"--min-tps must be above 0, got {self.min_tps:g}")
        if self.plot is not None and not self.frontier:
            raise ConfigError("--plot draws the frontier: add --frontier")
        if self.frontier and self.check:
            raise ConfigError("give --frontier or --check: a frontier has many answers")


def run(job: PlanJob) -> int:
    """Answer one question and return the exit code.

    Raises:
        OffloadLlamaError: the question makes no sense, or nothing does what it asks.
    """
    if job.frontier:
        return _frontier(job)
    question = ask(job)
    console = job.console
    answer = question.answer()
    others = alternatives(question, answer)
    if job.as_json:
        _print_json(console, saved.as_json(question, answer, others))
    else:
        console.write(
            table.render(question, answer, others, explain=job.explain, min_tps=job.min_tps)
        )
    return _check(job, question, answer)


def _frontier(job: PlanJob) -> int:
    # Not above: a single plan is the quicker for it.
    from offload_llama.report import frontier, plot

    picture = None if job.plot is None else plot.check_path(job.plot)
    question = ask(job)
    points = frontier.frontier(question)
    if picture is not None:
        plot.draw(question, points, picture)
        job.console.say(f"drawn in {picture}")
    if job.as_json:
        _print_json(job.console, {"frontier": frontier.as_json(points)})
    else:
        job.console.write(frontier.as_table(question, points))
    return 0


def _print_json(console: Console, value: Any) -> None:
    console.write(json.dumps(value, ensure_ascii=json_is_ascii(), indent=1) + "\n")


def _check(job: PlanJob, question: Question, answer: Answer) -> int:
    """Return the exit code; what --check finds wrong is said in one line."""
    if not job.check:
        return 0
    if not answer.fits:
        others = alternatives(question, answer, 1)
        hint = f"; this would: {others[0].command}" if others else ""
        report_error(table.summary(question, answer) + hint)
        return DOES_NOT_FIT
    if job.min_tps is not None and answer.tokens_per_s < job.min_tps:
        report_error(_too_slow(question, answer, job.min_tps))
        return DOES_NOT_FIT
    return 0


def _too_slow(question: Question, answer: Answer, min_tps: float) -> str:
    longest = longest_context(question, min_tps)
    hint = "no shorter context is that fast; ask for less, or name another card with --gpu"
    if longest is not None:
        hint = f"--ctx {tokens_word(longest)} is that fast"
    return (
        f"{question.shape.label} on {question.profile.name} makes {answer.tokens_per_s:.1f} "
        f"tokens/s at {question.setup.ctx} tokens, below --min-tps {min_tps:g}; {hint}"
    )


def ask(job: PlanJob) -> Question:
    """Return the question that the options put, every "auto" and "max" settled.

    Raises:
        ConfigError: an option is not possible for this model or card.
        CheckpointError: there is no such model.
        PlanError: no batch fits, or no context is as fast as asked.
    """
    shape = model_shape(job.model)
    if job.replayed is not None:
        job.replayed.check_model(shape.config, job.model)
    target = find_target(gpu=job.gpu, device=job.device, vram_bytes=job.vram, ram_bytes=job.ram)
    _check_budget(job.policy, target)
    weights, kv_dtype, dtype = numbers(job.weights, job.kv_dtype, job.dtype, target.profile)
    setup = Setup(
        config=shape.config,
        ctx=shape.config.max_seq_len if job.ctx is None else job.ctx,
        batch=1 if job.batch == "auto" else int(job.batch),
        weights=weights,
        kv_dtype=kv_dtype,
        dtype=dtype,
        prefill_chunk=job.prefill_chunk,
    )
    question = Question(
        model=job.model,
        shape=shape,
        target=target,
        setup=setup,
        policy=job.policy,
        reserve_bytes=job.reserve,
        allow_lossy=job.allow_lossy,
    )
    if job.batch == "auto":
        question = _largest_batch(question, ctx_given=job.ctx is not None)
    if job.ctx is not None:
        return question
    return _longest(question, job.min_tps)


def _check_budget(policy: str, target: Target) -> None:
    """Refuse a cache budget that the card cannot have.

    Raises:
        ConfigError: it is larger than the card.
    """
    prefix, colon, size = policy.partition(":")
    if prefix.strip() != "budget" or not colon:
        return
    there = target.profile.vram_bytes if target.free_bytes is None else target.free_bytes
    if parse_bytes(size) > there:
        raise ConfigError(
            f"--kv-policy {policy} gives the cache more than the {format_bytes(there)} that "
            f"{target.profile.name} has; write a smaller budget, or auto"
        )


def _largest_batch(question: Question, *, ctx_given: bool) -> Question:
    """Return the question with as many sequences as fit, at the context given or a usual one."""
    if not ctx_given:
        question = question.varied(ctx=min(AUTO_BATCH_CTX, question.setup.ctx))
    batch = max_batch(question.setup, question.profile, question.budget)
    return question.varied(batch=max(1, batch))


def _longest(question: Question, min_tps: float | None) -> Question:
    """Return the question with the longest context that fits and is as fast as asked.

    Where none fits, the question stays as it is, and its answer says so.

    Raises:
        PlanError: the slowest that would do is faster than any.
    """
    if min_tps is None and question.answer().fits:
        return question
    ctx = longest_context(question, min_tps)
    if ctx is not None:
        return question.varied(ctx=ctx).noted(
            f"{ctx} tokens are the longest context that "
            + ("fits" if min_tps is None else f"is as fast as --min-tps {min_tps:g} asks")
        )
    short = question.varied(ctx=min(256, question.config.max_seq_len))
    answer = short.answer()
    if min_tps is None or not answer.fits:
        return question
    raise PlanError(
        f"no context of {question.shape.label} reaches --min-tps {min_tps:g} on "
        f"{question.profile.name}: at {short.setup.ctx} tokens it is {answer.tokens_per_s:.1f} "
        "tokens/s; ask for less, or name another card with --gpu"
    )
