"""A plan as people read it: where the bytes go, how fast it runs, what else there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from offload_llama.console import format_ranges
from offload_llama.cost import KV_BITS
from offload_llama.hardware import format_bytes
from offload_llama.planner import MemoryPlan
from offload_llama.report.alternatives import (
    MAX_BATCH,
    Alternative,
    longest_context,
    sequences_on_card,
    sequences_with_host,
)
from offload_llama.report.question import Answer, Question, tokens_word

NAMES = {
    "weights": "weights",
    "kv_resident": "KV cache on the card",
    "tails": "KV tails (newest rows)",
    "ring": "ring (staging slots)",
    "departing": "KV on its way out",
    "activations": "activations",
    "logits": "logits",
    "overhead": "runtime overhead",
    "reserve": "reserve (kept free)",
    "kv": "KV cache on the host",
    "pages": "pages' slack",
    "context": "context",
    "workspace": "workspace",
    "allocator": "allocator",
    "learnt": "learnt here",
}
WIDTH = 24


def render(
    question: Question,
    answer: Answer,
    others: Sequence[Alternative],
    *,
    explain: bool = False,
    min_tps: float | None = None,
) -> str:
    """Return the whole report."""
    paragraphs = [
        _heading(question),
        _device_table(answer.plan),
        _host_table(answer.plan),
        formula(question),
        _speed(question, answer, min_tps),
        _layers(answer, explain),
        "\n".join(_scaling(question, answer)),
        _others(others),
        _run_it(question, answer),
    ]
    return "\n\n".join(part for part in paragraphs if part) + "\n"


def _heading(question: Question) -> str:
    setup, shape = question.setup, question.shape
    lines = [
        f"{shape.label} on {question.profile.name}: context {setup.ctx} tokens, "
        f"{_count(setup.batch, 'sequence')}, KV policy {question.policy}",
        f"weights {setup.weights}{_mark(question, '--weights')}, "
        f"KV {setup.kv_dtype}{_mark(question, '--kv-dtype')}, "
        f"computed in {_short(setup.dtype)}, prefill in chunks of {setup.prefill_chunk}",
    ]
    if shape.file_bytes is not None:
        lines.append(f"the files hold {format_bytes(shape.file_bytes)}")
    if question.target.note:
        lines.append(question.target.note)
    lines += question.notes
    return "\n".join(lines)


def _short(dtype: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]


def _mark(question: Question, flag: str) -> str:
    marked = any(part.startswith(f"{flag} ") for part in question.not_yet_runnable)
    return " (not yet runnable)" if marked else ""


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _device_table(plan: MemoryPlan) -> str:
    parts = [
        f"{NAMES.get(name, name)} {format_bytes(n)}" for name, n in plan.overhead_bytes.items() if n
    ]
    notes = {"overhead": ", ".join(parts)}
    lines = ["On the card", *_rows(plan.device_bytes, plan.available_bytes, notes)]
    lines.append(_row("total", plan.needed_bytes, plan.available_bytes))
    lines.append(_row("available", plan.available_bytes, None, _verdict(plan)))
    return "\n".join(lines)


def _verdict(plan: MemoryPlan) -> str:
    left = plan.available_bytes - plan.needed_bytes
    if left >= 0:
        return f"fits, {format_bytes(left)} left"
    return f"does not fit: {format_bytes(-left)} too much"


def _host_table(plan: MemoryPlan) -> str:
    total, ram_bytes = sum(plan.host_bytes.values()), plan.budget.ram_bytes
    if total == 0:
        return "On the host: nothing of the cache"
    lines = ["On the host (page-locked)", *_rows(plan.host_bytes, ram_bytes or total, {})]
    if ram_bytes is None:
        lines.append(_row("total", total, None, "not compared with your memory: --ram SIZE"))
        return "\n".join(lines)
    lines.append(_row("total", total, ram_bytes))
    left = ram_bytes - total
    verdict = f"fits, {format_bytes(left)} left"
    if left < 0:
        verdict = f"does not fit: {format_bytes(-left)} too much"
    lines.append(_row("available", ram_bytes, None, verdict))
    return "\n".join(lines)


def _rows(terms: Mapping[str, int], whole: int, notes: Mapping[str, str]) -> Iterator[str]:
    for name, n_bytes in terms.items():
        if n_bytes:
            yield _row(NAMES.get(name, name), n_bytes, whole, notes.get(name, ""))


def _row(label: str, n_bytes: int, whole: int | None, note: str = "") -> str:
    share = f"{100 * n_bytes / whole:5.1f} %" if whole else ""
    return f"  {label:<{WIDTH}}{format_bytes(n_bytes):>11}  {share:>7}  {note}".rstrip()


def formula(question: Question) -> str:
    """Return how the size of the KV cache comes about, with the numbers filled in."""
    setup, config = question.setup, question.config
    each = f"{KV_BITS[setup.kv_dtype] / 8:g}"
    return (
        f"KV cache = 2 x {config.n_layers} layers x {config.n_kv_heads} KV heads x "
        f"{config.head_dim} head size x {each} bytes x {setup.ctx} tokens x "
        f"{_count(setup.batch, 'sequence')} = {format_bytes(setup.kv_bytes)}\n"
        f"           ({format_bytes(setup.kv_bytes_per_token)} for each token of each sequence)"
    )


def _speed(question: Question, answer: Answer, min_tps: float | None) -> str:
    speed, setup = answer.speed, question.setup
    half = max(2, setup.ctx // 2)
    lines = [f"Predicted         {'ms/token':>10}{'tokens/s':>10}"]
    for context, seconds in ((setup.ctx, answer.decode_s), (half, speed.decode_half_s)):
        whole = ""
        if setup.batch > 1:
            whole = f"   (each sequence; {setup.batch / seconds:.1f} together)"
        lines.append(f"  at {context:>6} tokens{1e3 * seconds:>11.1f}{1 / seconds:>10.1f}{whole}")
    lines.append(f"  first token of a prompt that fills the context after {_seconds(speed.ttft_s)}")
    if min_tps is not None:
        lines.append(f"  {_compared(question, answer, min_tps)}")
    return "\n".join(lines)


def _compared(question: Question, answer: Answer, min_tps: float) -> str:
    if answer.tokens_per_s >= min_tps:
        return f"as fast as --min-tps {min_tps:g} asks"
    longest = longest_context(question, min_tps)
    if longest is None:
        return f"below --min-tps {min_tps:g}, which no context of this model reaches on this card"
    return f"below --min-tps {min_tps:g}; up to {longest} tokens are that fast"


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _layers(answer: Answer, explain: bool) -> str:
    by_store: dict[str, list[int]] = {"resident": [], "host": []}
    for placement in answer.placements:
        by_store[placement.store].append(placement.layer)
    lines = []
    if answer.plan.kv_budget_bytes is not None:
        lines.append("Layers when the context is full (they stay on the card while it is shorter)")
    else:
        lines.append("Layers")
    for store, words in (("resident", "on the card"), ("host", "on the host")):
        if by_store[store]:
            layers = by_store[store]
            lines.append(f"  {words}: {format_ranges(layers)} ({len(layers)})")
    if explain:
        lines.append("Reasons")
        lines += [
            f"  layer {each.layer:>2}: {each.store:<8}  {each.reason}" for each in answer.placements
        ]
    return "\n".join(lines)


def _scaling(question: Question, answer: Answer) -> Iterator[str]:
    """Yield how batch and context scale the need, and what the card holds at most."""
    setup = question.setup
    yield "Scaling"
    if setup.batch > 1:
        half = question.varied(batch=setup.batch // 2)
        other = half.answer()
        yield (
            f"  half the batch ({half.setup.batch}) frees {format_bytes(_freed(answer, other))}, "
            f"{format_bytes(setup.kv_bytes - half.setup.kv_bytes)} of it keys and values, and "
            f"takes {1e3 * other.decode_s:.1f} ms/token"
        )
    on_card = sequences_on_card(question)
    text = f"  the card alone holds {_sequences(on_card)} of {setup.ctx} tokens"
    if question.target.ram_bytes is not None:
        text += f", card and host {_sequences(sequences_with_host(question))}"
    yield text
    if not answer.fits:
        longest = longest_context(question)
        yield (
            "  no context fits, however short"
            if longest is None
            else f"  the longest context that fits is {longest} tokens"
        )


def _freed(answer: Answer, other: Answer) -> int:
    """Return the bytes of card and host that the other plan needs less."""
    sums = [a.plan.needed_bytes + sum(a.plan.host_bytes.values()) for a in (answer, other)]
    return sums[0] - sums[1]


def _sequences(n: int) -> str:
    if n >= MAX_BATCH:
        return f"{MAX_BATCH} sequences or more"
    return _count(n, "sequence") if n else "no sequence"


def _others(others: Sequence[Alternative]) -> str:
    if not others:
        return ""
    lines = ["Alternatives"]
    for other in others:
        setup, plan = other.question.setup, other.answer.plan
        remarks = [other.gain, f"{1e3 * other.answer.decode_s:.1f} ms/token"]
        remarks.append(f"{format_bytes(plan.needed_bytes)} on the card")
        if sum(plan.host_bytes.values()):
            remarks.append(f"{format_bytes(sum(plan.host_bytes.values()))} on the host")
        remarks += ["lossy"] if setup.lossy else []
        remarks += ["not yet runnable"] if not setup.runnable else []
        lines += [f"  {other.command}", f"    {', '.join(remarks)}"]
    return "\n".join(lines)


def _run_it(question: Question, answer: Answer) -> str:
    if not answer.fits or question.not_yet_runnable:
        return ""
    return f"Run it\n  {question.run_command()}"


def summary(question: Question, answer: Answer) -> str:
    """Return in one line why a plan does not fit, and what would."""
    plan = answer.plan
    what = f"{question.shape.label} with {tokens_word(question.setup.ctx)} tokens of context"
    if not plan.fits:
        return (
            f"{what} does not fit {question.profile.name}: {format_bytes(plan.needed_bytes)} "
            f"needed, {format_bytes(plan.available_bytes)} available"
        )
    needed = sum(plan.host_bytes.values())
    return (
        f"{what} does not fit the host: {format_bytes(needed)} needed for keys and values, "
        f"{format_bytes(plan.budget.ram_bytes or 0)} available"
    )
