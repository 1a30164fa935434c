"""What a plan is shown as: tables, JSON, alternatives, the frontier and its figure."""

from __future__ import annotations

import builtins
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from offload_llama.checkpoint.headers import model_shape
from offload_llama.cli import run_command
from offload_llama.cost import Setup
from offload_llama.errors import DeviceError
from offload_llama.hardware import card
from offload_llama.report.alternatives import (
    alternatives,
    longest_context,
    sequences_on_card,
    sequences_with_host,
)
from offload_llama.report.frontier import contexts, frontier, policies
from offload_llama.report.plot import draw
from offload_llama.report.question import Question, tokens_word
from offload_llama.report.saved import as_json
from offload_llama.report.table import formula, render
from offload_llama.report.target import Target

GIB = 2**30
KEYS = {
    *("fits", "needed_bytes", "available_bytes", "kv_bytes_per_token", "kv_bytes_total"),
    *("device_bytes", "host_bytes", "placements", "predicted", "alternatives"),
}
TERMS = {
    *("weights", "kv_resident", "tails", "ring", "departing", "activations", "logits"),
    *("overhead", "reserve"),
}


@pytest.fixture(autouse=True)
def own_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFLOAD_LLAMA_CACHE_DIR", str(tmp_path / "cache"))


def ask(
    model: str = "smollm2-1.7b",
    *,
    gpu: str = "rtx-4060",
    ram_bytes: int | None = None,
    policy: str = "auto",
    allow_lossy: bool = False,
    weights: str = "bf16",
    ctx: int = 8192,
    **setup: Any,
) -> Question:
    shape = model_shape(model)
    return Question(
        model=model,
        shape=shape,
        target=Target(profile=card(gpu), options=("--gpu", gpu), ram_bytes=ram_bytes),
        setup=Setup(
            config=shape.config,
            ctx=ctx,
            weights=weights,
            kv_dtype=setup.pop("kv_dtype", "bf16"),
            dtype="bfloat16",
            **setup,
        ),
        policy=policy,
        allow_lossy=allow_lossy,
    )


def shown(question: Question, **settings: Any) -> str:
    answer = question.answer()
    return render(question, answer, alternatives(question, answer), **settings)


# The table


def test_the_rows_of_the_table_add_up_to_its_total() -> None:
    question = ask(batch=4)
    plan = question.answer().plan
    lines = shown(question).splitlines()
    first, last = lines.index("On the card"), next(i for i, x in enumerate(lines) if "total" in x)
    shares = [float(m[1]) for x in lines[first + 1 : last] if (m := re.search(r"([\d.]+) %", x))]
    assert len(shares) == sum(1 for n in plan.device_bytes.values() if n)
    assert sum(shares) == pytest.approx(100 * plan.needed_bytes / plan.available_bytes, abs=0.5)
    assert f"{100 * plan.needed_bytes / plan.available_bytes:.1f} %" in lines[last]
    assert sum(plan.device_bytes.values()) == plan.needed_bytes


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8", "int4"])
def test_the_formula_gives_the_bytes_it_names(kv_dtype: str) -> None:
    question = ask("llama-3.1-8b", ctx=4096, batch=3, kv_dtype=kv_dtype)
    left, _, _ = formula(question).partition(" = ")[2].partition(" = ")
    product = 1.0
    for factor in left.split(" x "):
        product *= float(factor.split()[0])
    assert product == question.setup.kv_bytes


def test_each_layers_reason_is_shown_only_if_asked_for() -> None:
    question = ask(batch=4)
    answer = question.answer()
    explained = shown(question, explain=True).splitlines()
    for placement in answer.placements:
        line = f"  layer {placement.layer:>2}: {placement.store:<8}  {placement.reason}"
        assert line in explained
    assert not any(line.startswith("  layer") for line in shown(question).splitlines())


def test_what_does_not_run_yet_is_marked_and_gets_no_command_to_run() -> None:
    text = shown(ask(weights="q4_0", kv_dtype="int8"))
    assert "weights q4_0 (not yet runnable), KV int8 (not yet runnable)" in text
    assert "Run it" not in text and "offload-llama generate" not in text
    plain = shown(ask())
    assert "not yet runnable" not in plain.partition("Alternatives")[0]
    assert (
        "offload-llama generate --model HuggingFaceTB/SmolLM2-1.7B-Instruct --weights bf16 "
        "--ctx 8k PROMPT" in plain
    )


def test_mixed_numbers_do_not_run_yet() -> None:
    assert ask(weights="fp16").not_yet_runnable == [
        "--weights fp16 with --kv-dtype bf16 with --dtype bf16"
    ]
    assert ask().not_yet_runnable == []


def test_the_speed_of_a_batch_is_shown_for_each_sequence_and_together() -> None:
    question = ask(batch=4)
    decode_s = question.answer().decode_s
    line = next(x for x in shown(question).splitlines() if x.startswith("  at   8192 tokens"))
    assert f"{1e3 * decode_s:.1f}" in line and f"{1 / decode_s:.1f}" in line
    assert f"{4 / decode_s:.1f} together" in line


def test_halving_the_batch_frees_what_the_two_plans_differ_by() -> None:
    question = ask(batch=4, ram_bytes=64 * GIB)
    sums = []
    for batch in (4, 2):
        plan = question.varied(batch=batch).answer().plan
        sums.append(plan.needed_bytes + sum(plan.host_bytes.values()))
    line = next(x for x in shown(question).splitlines() if "half the batch (2)" in x)
    assert f"frees {(sums[0] - sums[1]) / GIB:.2f} GiB" in line
    assert "3 GiB of it keys and values" in line


def test_the_host_is_compared_with_its_memory_only_if_that_is_known() -> None:
    assert "not compared with your memory: --ram SIZE" in shown(ask(batch=8))
    assert "fits, " in shown(ask(batch=8, ram_bytes=64 * GIB)).partition("On the host")[2]
    short = shown(ask(batch=8, ram_bytes=GIB)).partition("On the host")[2]
    assert "does not fit: " in short.partition("KV cache =")[0]
    assert "On the host: nothing of the cache" in shown(ask(ctx=1024))


def test_a_speed_asked_for_is_compared_with_the_one_predicted() -> None:
    assert "as fast as --min-tps 1 asks" in shown(ask(), min_tps=1)
    assert "no context of this model reaches" in shown(ask(), min_tps=9999)
    question = ask(batch=4)
    tokens = longest_context(question, 20)
    assert tokens is not None
    assert f"below --min-tps 20; up to {tokens} tokens are that fast" in shown(question, min_tps=20)


# What else there is


def test_sequences_on_the_card_are_the_most_that_fit_without_offloading() -> None:
    question = ask(ctx=2048, ram_bytes=8 * GIB)
    n = sequences_on_card(question)
    assert question.varied(batch=n, policy="gpu").answer().fits
    assert not question.varied(batch=n + 1, policy="gpu").answer().fits
    more = sequences_with_host(question)
    assert more > n and question.varied(batch=more).answer().fits
    assert not question.varied(batch=more + 1).answer().fits


@pytest.mark.parametrize("policy", ["auto", "gpu", "gpu-layers:8"])
def test_the_longest_context_fits_and_the_next_does_not(policy: str) -> None:
    question = ask("llama-3.2-3b", policy=policy, ram_bytes=6 * GIB)
    ctx = longest_context(question)
    assert ctx is not None
    assert question.varied(ctx=ctx).answer().fits
    assert not question.varied(ctx=ctx + 512).answer().fits


@pytest.mark.parametrize(
    "question",
    [
        ask("llama-3.1-8b", ctx=4096),
        ask("llama-3.2-3b", ctx=32768),
        ask(batch=8, ram_bytes=4 * GIB),
        ask(policy="gpu", batch=4),
        ask(prefill_chunk=4096, batch=16),
    ],
    ids=["weights too large", "slow", "host too small", "policy gpu", "chunk"],
)
def test_an_alternative_is_a_ready_command_that_fits(
    question: Question, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = question.answer()
    found = alternatives(question, answer)
    assert 1 <= len(found) <= 3
    for other in found:
        program, *words = shlex.split(other.command)
        assert program == "offload-llama"
        assert run_command([*words, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["fits"]
        assert plan["needed_bytes"] == other.answer.plan.needed_bytes
        assert plan["predicted"]["decode_ms"] == round(1e3 * other.answer.decode_s, 4)
        assert not answer.fits or other.answer.decode_s < answer.decode_s


def test_alternatives_that_run_today_come_first() -> None:
    question = ask(batch=4)
    found = alternatives(question, question.answer())
    runnable = [other.question.setup.runnable for other in found]
    assert runnable == sorted(runnable, reverse=True) and runnable[0]


def test_a_lossy_alternative_is_offered_only_if_that_is_allowed() -> None:
    strict, loose = ask(batch=4), ask(batch=4, allow_lossy=True)
    assert strict.answer().fits
    lossy = [o for o in alternatives(strict, strict.answer(), 9) if o.question.setup.lossy]
    assert lossy == []
    lossy = [o for o in alternatives(loose, loose.answer(), 9) if o.question.setup.lossy]
    assert [other.question.setup.kv_dtype for other in lossy] == ["int8"]
    assert "int8 keys and values" in lossy[0].gain


# JSON


def test_json_has_the_documented_keys_and_terms() -> None:
    question = ask(batch=4)
    answer = question.answer()
    data = json.loads(json.dumps(as_json(question, answer, alternatives(question, answer))))
    assert set(data) >= KEYS
    assert set(data["device_bytes"]) >= TERMS and "kv" in data["host_bytes"]
    assert set(data["predicted"]) == {"decode_ms", "decode_ms_half", "ttft_ms"}
    assert [p["layer"] for p in data["placements"]] == list(range(24))
    assert {p["store"] for p in data["placements"]} == {"resident", "host"}
    assert data["needed_bytes"] == sum(data["device_bytes"].values())
    assert data["kv_bytes_total"] == 4 * 8192 * data["kv_bytes_per_token"]
    for other in data["alternatives"]:
        assert other["command"].startswith("offload-llama plan smollm2-1.7b --gpu rtx-4060 ")


# The frontier


def test_a_frontier_trades_memory_for_time() -> None:
    points = frontier(ask(ctx=4096, batch=2))
    assert [point.ctx for point in points] == sorted(point.ctx for point in points)
    for ctx in (1024, 2048, 4096):
        line = [point for point in points if point.ctx == ctx]
        assert (line[0].policy, line[-1].policy) == ("offload", "gpu")
        assert line[0].decode_s == max(point.decode_s for point in line)
        assert line[-1].decode_s == min(point.decode_s for point in line)
        assert line[-1].host_bytes == 0 < line[0].host_bytes
        kept = [point.n_resident for point in line]
        assert kept == sorted(set(kept)) and kept[-1] == 24


def test_a_frontiers_contexts_double_up_to_the_one_asked_for() -> None:
    assert contexts(ask("llama-3.1-8b", ctx=32768)) == [2048, 4096, 8192, 16384, 32768]
    assert contexts(ask(ctx=1500)) == [1500]
    assert contexts(ask(ctx=256)) == [256]


@pytest.mark.parametrize("n_layers", [1, 2, 3, 8, 30])
def test_a_frontiers_policies_are_different_ones(n_layers: int) -> None:
    found = policies(n_layers)
    kept = [n for _, n in found]
    assert kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == n_layers


def test_a_frontier_is_printed_as_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan smollm2-1.7b --gpu rtx-4060 --batch 8 --ctx 4k --frontier"
    assert run_command(line.split()) == 0
    table = capsys.readouterr().out
    assert run_command([*line.split(), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["frontier"]
    rows = [row for row in table.splitlines()[2:] if row]
    assert len(rows) == len(points)
    for row, point in zip(rows, points, strict=True):
        assert row.split()[:2] == [tokens_word(point["ctx"]), point["policy"]]
        assert f"{point['decode_ms']:.1f}" in row
        assert row.endswith("does not fit") != point["fits"]
    assert {point["fits"] for point in points} == {True, False}


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_frontier_is_drawn_into_the_file_named(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out.{suffix}"
    line = ["plan", "smollm2-1.7b", "--gpu", "rtx-4060", "--frontier", "--plot", str(path)]
    assert run_command(line) == 0
    assert capsys.readouterr().err == f"drawn in {path}\n"
    head = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(head)


def test_a_figure_names_every_context_and_the_card(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context

    question = ask(ctx=4096)
    with rc_context({"svg.fonttype": "none"}):
        draw(question, frontier(question), tmp_path / "out.svg")
    text = (tmp_path / "out.svg").read_text()
    for word in ("1k", "2k", "4k tokens", "8 GiB", "RTX 4060", "ms per token, predicted"):
        assert f">{word}<" in text or word in re.sub("<[^>]*>", "", text)


def test_without_matplotlib_a_plot_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def refuse(name: str, *others: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *others)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DeviceError, match=r'pip install "offload-llama\[plot\]"'):
        draw(ask(), [], tmp_path / "out.png")
