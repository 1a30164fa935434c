"""The program as a user runs it: real processes, the real default model, few tokens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_llama import answer as answer_module
from offload_llama.answer import Job
from offload_llama.cli import run_command
from offload_llama.planner import MemoryPlan
from tests.helpers_cli import write_lines

PROGRAM = [sys.executable, "-m", "offload_llama"]
FRANCE = "The capital of France is"  # 5 tokens
# The model goes on with the pattern, so that the answer holds characters beyond ASCII and cp1252.
GREEK = "“π” “π” “π” “π”"


def environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OFFLOAD_LLAMA_")}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


def start(
    *arguments: str, env: Mapping[str, str] | None = None, **settings: Any
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        env=environment(**(env or {})),
        capture_output=True,
        check=False,
        timeout=300,
        **settings,
    )


def error_line(stderr: str) -> str:
    """Return the one line that an error is."""
    [line] = [line for line in stderr.splitlines() if "error:" in line]
    assert line.startswith("offload-llama: error: ") and "Traceback" not in stderr
    return line


def test_help_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys; from offload_llama.cli import run_command; "
        "code = run_command(['generate', '--help']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        seconds.append(time.perf_counter() - began)
    assert b"OFFLOAD_LLAMA_MODEL" in done.stdout
    assert min(seconds) < 0.5


def test_greedy_ids_are_those_of_the_reference_and_json_is_alone_on_standard_output(
    reference: dict[str, Any], tmp_path: Path
) -> None:
    """B46: a stale launcher's environment, no torch.distributed, no socket: nothing changes."""
    code = (
        "import socket, sys, torch\n"
        "def refuse(*_): raise OSError('no sockets here')\n"
        "socket.socket.bind = socket.socket.connect = refuse\n"
        "torch.distributed.is_available = lambda: False\n"
        "from offload_llama.cli import main\n"
        "main()\n"
    )
    stale = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.1"}
    options = ["--raw", "--json", "--max-tokens", "6", "--ignore-eos", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", FRANCE, *options],
        env=environment(**stale),
        cwd=tmp_path,
        capture_output=True,
        check=True,
        timeout=300,
    )
    answer = json.loads(done.stdout)
    expected = reference["prompts"][0]
    assert answer["prompt_token_ids"] == expected["prompt_ids"]
    assert answer["token_ids"] == expected["hf_ids"][:6]
    assert answer["finish_reason"] == "length"
    assert b" on cpu, context" in done.stderr  # the device in use is printed


def test_text_beyond_ascii_survives_any_locale(smollm2_path: Path, tmp_path: Path) -> None:
    """B64: C locale, model path with spaces and letters beyond ASCII, output into a file."""
    model = tmp_path / "mødel with späce 模型" / "smøl.gguf"
    model.parent.mkdir()
    model.symlink_to(smollm2_path)
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    out = tmp_path / "out.txt"
    with out.open("wb") as file:
        done = subprocess.run(
            [*PROGRAM, "generate", GREEK, "--raw", "--model", str(model), "--max-tokens", "6"],
            env=environment(**env),
            stdout=file,
            stderr=subprocess.PIPE,
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    text = out.read_text("utf-8")
    assert "π" in text and "\ufffd" not in text


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_of_another_encoding_shows_question_marks_and_goes_on() -> None:
    """B64: a cp1252 terminal cannot spell Greek."""
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "generate", GREEK, "--raw", "-q", "--max-tokens", "6"],
        env=environment(PYTHONIOENCODING="cp1252"),
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 1024)
        except OSError:  # Linux: the other end was closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "“?”" in shown.decode("cp1252") and err == b""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_in_mid_answer_prints_what_there_is() -> None:
    # As at a terminal, also where these tests run in the background, with Ctrl-C switched off.
    begin = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from offload_llama.cli import main; main()"
    )
    command = ["generate", FRANCE, "--raw", "--ignore-eos", "--max-tokens", "4000"]
    process = subprocess.Popen(
        [sys.executable, "-c", begin, *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = process.stdout.read(8)  # the answer comes as it is made
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert first == b" Paris.\n" and (first + out).endswith(b"\n")
    assert b"interrupted after " in err and b"Traceback" not in err


def test_a_pipe_that_closes_early_is_quiet() -> None:
    process = subprocess.Popen(
        [*PROGRAM, "generate", FRANCE, "--raw", "-q", "--ignore-eos", "--max-tokens", "50"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(6) == b" Paris"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=120) == 0


def test_six_prompts_with_a_batch_of_four_run_in_order(
    reference: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B41: 4 + 2 prompts, answered in the order in which they came."""
    known = reference["prompts"]
    texts = [known[index % len(known)]["full_prompt"] for index in range(6)]
    path = write_lines(tmp_path / "six.jsonl", *(json.dumps({"prompt": t}) for t in texts))
    line = ["generate", "--batch-file", path, "--raw", "--max-batch-size", "4", "--ignore-eos"]
    assert run_command([*line, "--max-tokens", "4", "--device", "cpu"]) == 0
    answers = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    for index, answer in enumerate(answers):
        assert answer["token_ids"] == known[index % len(known)]["hf_ids"][:4]
    assert len(answers) == 6


def test_the_same_seed_gives_the_same_text_in_another_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B40: temperature 0.8, seed 7: in this process, after another call, and in a new one."""
    line = ["generate", FRANCE, "--raw", "--device", "cpu", "--json", "--temperature", "0.8"]
    line += ["--max-tokens", "6"]
    assert run_command([*line, "--seed", "7"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert run_command([*line, "--seed", "8"]) == 0
    other = json.loads(capsys.readouterr().out)
    there = json.loads(start(*line, "--seed", "7").stdout)
    assert here["token_ids"] == there["token_ids"] != other["token_ids"]


def test_a_prompt_that_fills_the_context_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B17: 5 tokens do not fit a context of 5, and leave room for one in a context of 6."""
    line = ["generate", FRANCE, "--raw", "--device", "cpu"]
    assert run_command([*line, "--ctx", "5"]) == 6
    out, err = capsys.readouterr()
    message = error_line(err)
    assert out == "" and "5 tokens" in message and "--ctx" in message
    assert run_command([*line, "--ctx", "6"]) == 0
    out, err = capsys.readouterr()
    assert out == " Paris\n" and "the context of 6 tokens is full" in err


def test_without_a_card_offloading_is_said_to_change_nothing() -> None:
    """B55: no visible card, offload asked for, half precision: runs on the CPU."""
    done = start(
        *("generate", FRANCE, "--raw", "--max-tokens", "2", "--kv-policy", "offload"),
        *("--dtype", "fp16", "--device", "cpu"),
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b" Paris")
    assert done.stderr.count(b"KV policy offload changes nothing") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """B55: explicit --device cuda fails in one line."""
    assert run_command(["generate", "hello", "--device", "cuda"]) == 7
    out, err = capsys.readouterr()
    assert out == "" and "--device cpu" in error_line(err)


def test_a_simulated_card_says_so_and_counts_the_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["generate", FRANCE, "--raw", "--max-tokens", "4", "--json", "--dtype", "fp32"]
    line += ["--device", "sim:rtx-3060-12gb", "--kv-policy", "offload", "--no-pin"]
    assert run_command(line) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["text"].startswith(" Paris")
    assert answer["stats"]["simulated"] and answer["stats"]["host_kv_bytes"] > 0
    assert {placement["store"] for placement in answer["placements"]} == {"host"}
    assert "simulated: real text" in err and err.splitlines()[-1].endswith("[simulated]")


def test_damaged_files_are_one_line_each(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B37: a pointer file, a truncated file and another kind of file name path and cause."""
    head = smollm2_path.read_bytes()[: 2**20]
    for name, data in {
        "pointer.gguf": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "cut.gguf": head,
        "page.gguf": b"<!doctype html><title>Not found</title>",
        "empty.gguf": b"",
    }.items():
        path = tmp_path / name
        path.write_bytes(data)
        assert run_command(["generate", "hello", "--model", str(path)]) == 4
        out, err = capsys.readouterr()
        assert out == "" and name in error_line(err)


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["generate", "hello", "--model", "./no-such-folder"]) == 4
    assert "no such model: ./no-such-folder" in error_line(capsys.readouterr().err)


def test_an_empty_prompt_starts_from_the_begin_token(capsys: pytest.CaptureFixture[str]) -> None:
    """B34: an empty prompt on a model with a begin token."""
    line = ["generate", "", "--raw", "--json", "--max-tokens", "2", "--device", "cpu"]
    assert run_command(line) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["prompt_token_ids"]) == 1 and len(answer["token_ids"]) == 2


def test_a_card_too_small_for_the_weights_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    card = "sim:rtx-3060-12gb?vram=200MiB&context=0"
    assert run_command(["generate", "hello", "--device", card]) == 3
    out, err = capsys.readouterr()
    assert out == "" and re.search(
        r"200 MiB are there; its weights alone are 25\d MiB; use ", error_line(err)
    )


def test_what_the_card_could_not_hold_later_is_refused_before_it_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B19: the weights fit, the activations of a full chunk beside them do not."""
    options = "--device sim:rtx-3060-12gb?vram=316MiB&context=0 --kv-policy gpu --ctx 1k"
    for chunk, code in (("4096", 3), ("128", 0)):
        line = [*options.split(), "--prefill-chunk", chunk]
        assert run_command(["plan", "smollm2-135m", *line, "--check"]) == code
        capsys.readouterr()
        run = ["generate", "hello", *line, "--max-tokens", "1", "-q"]
        assert run_command(run) == code
        out, err = capsys.readouterr()
        if code:
            assert out == "" and " of the card are needed, 316 MiB are there" in error_line(err)


@pytest.mark.parametrize(
    "options",
    [
        "--ctx 4k --batch 3 --vram 900MiB --prefill-chunk 64",
        "--batch auto --vram 1000MiB --reserve 64MiB --ram 1GiB",
        "--vram 1200MiB --weights fp32 --ctx max",
    ],
)
def test_plan_and_run_agree(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--device", "sim:rtx-3060-12gb", *options.split()]
    line += [] if "--ram" in line else ["--ram", "2GiB"]
    assert run_command(["plan", *line, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    loaded = run_options(line)
    for key in ("ctx", "batch", "weights", "kv_dtype"):
        assert getattr(loaded.setup, key) == shown[key], key
    assert loaded.device_bytes == shown["device_bytes"]
    assert loaded.available_bytes == shown["available_bytes"]
    assert loaded.kv_budget_bytes == shown["kv_budget_bytes"]


def run_options(line: list[str]) -> MemoryPlan:
    """Return the plan that the options of a run lead to."""
    found = []

    def keep(job: Job) -> int:
        with job.load() as llm:
            found.append(llm.plan)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_module, "run", keep)
        assert run_command(["generate", "hello", "-q", *line]) == 0
    [plan] = found
    assert plan is not None
    return plan


def test_a_saved_plan_runs_as_it_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B58: the placements are those of the plan, and so is the memory, to 2 %."""
    line = ["plan", "--gpu", "rtx-3060-12gb", "--ctx", "512", "--kv-policy", "gpu-layers:11"]
    assert run_command([*line, "--json"]) == 0
    saved = capsys.readouterr().out
    (tmp_path / "plan.json").write_text(saved)
    run = ["generate", "--plan", str(tmp_path / "plan.json"), "--device", "sim:rtx-3060-12gb"]
    assert run_command([*run, "--raw", FRANCE, "--max-tokens", "8", "--json", "-q"]) == 0
    answer = json.loads(capsys.readouterr().out)
    stores = [placement["store"] for placement in answer["placements"]]
    assert stores == [placement["store"] for placement in json.loads(saved)["placements"]]
    assert stores.count("resident") == 11
    stats = answer["stats"]
    planned = stats["planned_peak_device_bytes"]
    assert stats["peak_device_bytes"] <= planned <= 1.02 * stats["peak_device_bytes"]
    assert stats["planned_host_kv_bytes"] == stats["host_kv_bytes"]
    assert stats["decode_ms"] == pytest.approx(stats["planned_decode_ms"], rel=0.05)
