"""The plan command: what it answers, how it ends, and what it says to what makes no sense."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from offload_llama.cli import ModelOptions, run_command
from offload_llama.errors import OutOfMemory
from offload_llama.report import command
from offload_llama.report.target import ASSUMED
from tests.helpers_cli import StubLLM

GIB = 2**30
INT4 = "plan llama-3.1-8b --gpu rtx-4060 --weights int4 --ctx 32k"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("OFFLOAD_LLAMA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OFFLOAD_LLAMA_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def no_card_here(monkeypatch: pytest.MonkeyPatch) -> None:
    import offload_llama.machine

    facts = offload_llama.machine.Facts(system="Linux")
    monkeypatch.setattr(offload_llama.machine, "gather", lambda: facts)


def planned(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert run_command([*line.split(), "--json"]) == code
    return json.loads(capsys.readouterr().out)


# What it answers


def test_published_articles_are_wrong_about_llama_2_7b_with_32_sequences(
    capsys: pytest.CaptureFixture[str], no_card_here: None
) -> None:
    line = "plan llama-2-7b --batch 32 --ctx 2048 --weights fp16"
    assert run_command(line.split()) == 0
    out = capsys.readouterr().out
    assert (
        "KV cache = 2 x 32 layers x 32 KV heads x 128 head size x 2 bytes x 2048 tokens x "
        "32 sequences = 32 GiB" in out
    )
    assert "half the batch (16) frees" in out and "16 GiB of it keys and values" in out
    assert "does not fit: " in out and " too much" in out
    assert planned(line, capsys)["kv_bytes_total"] == 32 * GIB


def test_without_a_card_the_assumed_one_is_named_and_how_to_name_another(
    capsys: pytest.CaptureFixture[str], no_card_here: None
) -> None:
    assert run_command(["plan", "smollm2-1.7b"]) == 0
    out = capsys.readouterr().out
    assert "no card in this computer; assumed: RTX 3060 12 GB (--gpu NAME names one" in out
    assert planned("plan smollm2-1.7b", capsys)["target"] == ["--gpu", ASSUMED]


def test_8gb_and_8gib_are_two_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    smaller = planned("plan llama-3.2-1b --vram 8GB", capsys)
    larger = planned("plan llama-3.2-1b --vram 8GiB", capsys)
    assert smaller["available_bytes"] == 8 * 10**9
    assert larger["available_bytes"] == 8 * GIB
    assert smaller["card"] == larger["card"] == "RTX 4060"


def test_a_card_can_be_cut_to_a_part_of_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    whole = planned("plan llama-3.2-3b --gpu rtx-4060 --ctx 16k", capsys)
    cut = planned("plan llama-3.2-3b --gpu rtx-4060 --ctx 16k --vram 7800MiB", capsys)
    assert cut["available_bytes"] == 7800 * 2**20 < whole["available_bytes"]
    assert cut["card"] == whole["card"]


def test_a_size_beyond_all_presets_is_planned_with_assumed_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = planned("plan llama-3.1-8b --vram 24GiB --ctx 8k", capsys)
    assert plan["fits"] and plan["available_bytes"] == 24 * GIB


def test_a_simulated_card_is_planned_like_the_card_without_scratch_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_device = planned("plan smollm2-1.7b --device sim:rtx-4060", capsys)
    real = planned("plan smollm2-1.7b --gpu rtx-4060", capsys)
    assert by_device["target"] == ["--device", "sim:rtx-4060"]
    assert by_device["peak_bytes"] == real["peak_bytes"]
    assert by_device["overhead_bytes"]["workspace"] == 0 < real["overhead_bytes"]["workspace"]


def test_the_longest_context_at_a_speed_is_that_fast_and_a_longer_one_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "plan llama-3.1-8b --gpu rtx-4060 --weights int4"
    found = planned(f"{line} --ctx max --min-tps 8", capsys)
    assert found["fits"] and found["ctx"] % 256 == 0 and found["ctx"] < 131072
    assert found["predicted"]["decode_ms"] <= 125
    longer = planned(f"{line} --ctx {found['ctx'] + 512}", capsys)
    assert longer["predicted"]["decode_ms"] > 125


def test_without_a_context_the_longest_that_fits_is_planned_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "plan llama-3.2-3b --gpu rtx-4060 --kv-policy gpu"
    assert run_command(line.split()) == 0
    out = capsys.readouterr().out
    ctx = planned(line, capsys)["ctx"]
    assert f"{ctx} tokens are the longest context that fits" in out
    assert planned(f"{line} --ctx {ctx}", capsys)["fits"]
    assert not planned(f"{line} --ctx {ctx + 256}", capsys)["fits"]


def test_batch_auto_is_the_largest_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan smollm2-1.7b --gpu rtx-4060 --ram 4GiB --ctx 2k"
    batch = planned(f"{line} --batch auto", capsys)["batch"]
    assert planned(f"{line} --batch {batch}", capsys)["fits"]
    assert not planned(f"{line} --batch {batch + 1}", capsys)["fits"]


def test_the_defaults_of_a_plan_come_from_the_same_variables_as_those_of_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "MODEL": "llama-3.2-1b",
        "GPU": "rtx-4060",
        "CTX": "2k",
        "WEIGHTS": "q8_0",
        "MAX_BATCH_SIZE": "2",
    }.items():
        monkeypatch.setenv(f"OFFLOAD_LLAMA_{name}", value)
    plan = planned("plan", capsys)
    assert (plan["model"], plan["ctx"], plan["batch"]) == ("meta-llama/Llama-3.2-1B", 2048, 2)
    assert plan["weights"] == "q8_0" and plan["not_yet_runnable"] == ["--weights q8_0"]


def test_a_plan_of_a_saved_plan_is_the_same_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = planned(f"{INT4} --kv-policy gpu-layers:20 --vram 7GiB", capsys)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(first))
    assert planned(f"plan --plan {path}", capsys) == first


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("gpu", range(16)),
        ("offload", []),
        ("gpu-layers:3", [4, 8, 0]),
        ("layers:0-11=gpu,12-15=offload", range(12)),
        ("@layers.txt", [5]),
        ("@plan.json", [0, 1, 2]),
    ],
)
def test_every_policy_in_the_help_places_the_layers_it_says(
    policy: str,
    kept: Iterable[int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B58: what is asked for is what is planned."""
    monkeypatch.chdir(tmp_path)
    Path("layers.txt").write_text("layers:0-4=offload,5=gpu,6-15=offload\n")
    saved = planned("plan llama-3.2-1b --kv-policy layers:0-2=gpu,3-15=offload", capsys)
    Path("plan.json").write_text(json.dumps(saved))
    plan = planned(f"plan llama-3.2-1b --gpu rtx-4060 --kv-policy {policy}", capsys)
    resident = [p["layer"] for p in plan["placements"] if p["store"] == "resident"]
    assert resident == sorted(kept)


def test_a_budget_bounds_what_the_cache_takes_of_the_card(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = planned("plan llama-3.2-1b --gpu rtx-4060 --ctx 16k --kv-policy budget:100MiB", capsys)
    cache = plan["device_bytes"]["kv_resident"] + plan["device_bytes"]["tails"]
    assert 0 < cache <= 100 * 2**20


def test_a_plan_of_another_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(planned(INT4, capsys)))
    assert run_command(["plan", "llama-3.2-1b", "--plan", str(path)]) == 2
    err = capsys.readouterr().err
    assert "is for Llama-3.1-8B (dim 4096), not for llama-3.2-1b (dim 2048)" in err
    assert err.endswith("plan again: offload-llama plan llama-3.2-1b --json\n")


def test_a_plan_takes_under_a_third_of_a_second_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom offload_llama.cli import run_command\n"
        f"code = run_command({INT4.split()!r})\n"
        "print(code, sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.stdout.splitlines()[-1] == "0 []"
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # Time of the processor: other tests may run beside this one.
    assert min(seconds) < 0.3


# How it ends


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("plan llama-3.2-1b --gpu rtx-4060 --check", 0),
        ("plan llama-3.1-8b --gpu rtx-4060 --ctx 4k", 0),
        ("plan llama-3.1-8b --gpu rtx-4060 --ctx 4k --check", 3),
        ("plan llama-3.2-1b --gpu rtx-4060 --ctx 4k --check --min-tps 10000", 3),
        ("plan llama-3.2-3b --gpu rtx-4060 --ctx 16k --check --min-tps 0.1", 0),
        ("plan no-such-model --gpu rtx-4060", 4),
        ("plan llama-3.1-8b --device cuda:7", 7),
    ],
)
def test_each_end_has_its_exit_code(
    line: str, code: int, capsys: pytest.CaptureFixture[str], no_card_here: None
) -> None:
    assert run_command(line.split()) == code
    err = capsys.readouterr().err
    assert err.count("\n") == (1 if code else 0)


def out_of_memory() -> OutOfMemory:
    return OutOfMemory(
        "out of memory", phase="decode", needed_bytes=2, free_bytes=1, holders={}, suggestions=()
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("what"), 1),
        (MemoryError(), 5),
        (out_of_memory(), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_nobody_planned_for_has_an_exit_code_too(
    error: BaseException,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(job: command.PlanJob) -> int:
        raise error

    monkeypatch.setattr(command, "run", run)
    assert run_command(["plan", "llama-3.2-1b", "--gpu", "rtx-4060"]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err


def test_a_prompt_beyond_the_planned_context_ends_with_6(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelOptions, "load", lambda options, console: StubLLM())
    assert run_command(["generate", "--raw", "x" * 100]) == 6
    assert capsys.readouterr().err.splitlines()[-1].startswith("offload-llama: error: ")


def test_a_check_that_fails_says_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan llama-3.1-8b --gpu rtx-4060 --ctx 4k --check"
    assert run_command(line.split()) == 3
    err = capsys.readouterr().err
    assert "does not fit RTX 4060: " in err and " needed, 8 GiB available; this would: " in err
    words = err.rstrip("\n").partition("this would: offload-llama ")[2].split()
    assert run_command([*words, "--check"]) == 0


def test_a_model_too_big_for_the_host_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan llama-3.2-3b --gpu rtx-4060 --ctx 128k --ram 2GiB --check"
    assert run_command(line.split()) == 3
    assert "does not fit the host: " in capsys.readouterr().err
    plan = planned(line.removesuffix(" --check"), capsys)
    assert (plan["fits"], plan["device_fits"], plan["host_fits"]) == (False, True, False)


# What makes no sense

PLAN = "plan llama-3.2-1b --gpu rtx-4060"


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("plan llama-3.2-1b --gpu rtx-9999", 2, "did you mean rtx-"),
        ("plan llama-3.2-1b --gpu rtx-3060", 2, "rtx-3060-8gb or rtx-3060-12gb"),
        ("plan llama-3.2-1b --gpu rtx-4060?speed=9", 2, "unknown card setting 'speed=9'; use vram"),
        ("plan llama-3.2-1b --gpu rtx-4060 --vram 12GiB", 2, "leave --vram out, or name a larger"),
        (
            "plan llama-3.2-1b --gpu rtx-4060 --device sim:rtx-5070",
            2,
            "contradicts --device sim:rtx-5070",
        ),
        ("plan llama-3.2-1b --device tpu", 2, "unknown device 'tpu'; use auto"),
        ("plan llama-3.2-1b --device cpu", 2, "name a card: --gpu"),
        ("plan lama-3.2-1b --gpu rtx-4060", 4, "did you mean llama-3.2-1b"),
        (f"{PLAN} --vram 8GBs", 2, "write for example 8GiB, 512MiB or 8GB"),
        (f"{PLAN} --vram -8GiB", 2, "write for example 8GiB, 512MiB or 8GB"),
        (f"{PLAN} --ram 0", 2, "it must be more than 0; write for example 8GiB"),
        (f"{PLAN} --ctx -4096", 2, "write for example 4096, 32k or max"),
        (f"{PLAN} --ctx 4.5k", 2, "write for example 4096, 32k or max"),
        (f"{PLAN} --ctx 256k", 2, "this model allows 2 to 131072 tokens"),
        (f"{PLAN} --batch 0", 2, "write for example 4, or auto"),
        (f"{PLAN} --batch -1", 2, "write for example 4, or auto"),
        (
            f"{PLAN} --weights int3",
            2,
            "is none of auto, fp32, bf16, fp16, int8, int4, int4-g32, q8_0",
        ),
        (f"{PLAN} --kv-dtype fp8", 2, "is none of auto, fp32, bf16, fp16, int8, int4"),
        (f"{PLAN} --kv-policy fast", 2, "use auto, gpu, offload, gpu-layers:N, budget:1.5GiB"),
        (f"{PLAN} --kv-policy gpu-layers:17", 2, "more layers than the model's 16"),
        (f"{PLAN} --kv-policy gpu-layers:-1", 2, "for example gpu-layers:8"),
        (f"{PLAN} --kv-policy layers:0-16=gpu", 2, "names layers outside 0-15"),
        (f"{PLAN} --kv-policy layers:0-3=gpu", 2, "leaves out layer 4; name all of 0-15"),
        (f"{PLAN} --kv-policy layers:0-15=gpu,3=gpu", 2, "layer 3 is placed twice"),
        (f"{PLAN} --kv-policy budget:9GiB", 2, "write a smaller budget, or auto"),
        (f"{PLAN} --kv-policy budget:lots", 2, "write for example 8GiB"),
        (f"{PLAN} --kv-policy @no-such-file", 2, "KV policy @no-such-file: cannot be read"),
        (f"{PLAN} --reserve 8GiB", 2, "leaves nothing of the 8 GiB that RTX 4060 has; keep less"),
        (f"{PLAN} --prefill-chunk 0", 2, "--prefill-chunk"),
        (f"{PLAN} --plan no-such-file", 2, "save one with: offload-llama plan MODEL --json"),
        (f"{PLAN} --min-tps 0", 2, "--min-tps must be above 0"),
        (f"{PLAN} --min-tps nan", 2, "--min-tps must be above 0"),
        (f"{PLAN} --ctx max --min-tps 9999", 3, "ask for less, or name another card with --gpu"),
        (f"{PLAN} --plot out.png", 2, "add --frontier"),
        (f"{PLAN} --frontier --plot out.bmp", 2, "write one of .png, .svg, .pdf"),
        (f"{PLAN} --frontier --plot /no/such/folder/a.png", 2, "make it first"),
        (f"{PLAN} --frontier --check", 2, "give --frontier or --check"),
        (f"{PLAN} --learn", 2, "leave --gpu out"),
        ("plan llama-3.2-1b --learn --device sim:rtx-4060", 2, "--learn measures a real card"),
        ("plan llama-3.2-1b --learn --device cpu", 2, "--learn measures a real card"),
        ("plan llama-3.2-1b llama-3.2-3b", 2, "unexpected extra argument"),
    ],
)
def test_a_wrong_input_gets_one_line_that_names_the_next_step(
    line: str, code: int, words: str, capsys: pytest.CaptureFixture[str], no_card_here: None
) -> None:
    assert run_command(line.split()) == code
    out, err = capsys.readouterr()
    assert out == "" and words in err
    assert err.startswith("offload-llama: error: ") and err.count("\n") == 1
