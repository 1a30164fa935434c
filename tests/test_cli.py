"""The command line's own logic, with a stand-in for the model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click
import pytest
import torch

from offload_llama import cli as module
from offload_llama.cli import ModelOptions, run_command
from offload_llama.console import format_ranges, stats_line
from offload_llama.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DeviceError,
    DoesNotFit,
    PromptTooLong,
    TokenizerError,
)
from tests.helpers_cli import StubLLM, a_completion

Stub = Callable[..., StubLLM]


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OFFLOAD_LLAMA_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """A function that puts a stand-in where the model would be loaded."""

    def install(**settings: Any) -> StubLLM:
        llm = StubLLM(**settings)
        monkeypatch.setattr(ModelOptions, "load", lambda options, console: llm)
        return llm

    return install


@pytest.fixture
def failing_load(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    def install(error: BaseException) -> None:
        def load(options: ModelOptions, console: object) -> None:
            raise error

        monkeypatch.setattr(ModelOptions, "load", load)

    return install


def test_standard_output_carries_the_answer_and_nothing_else(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub()
    assert run_command(["generate", "hello"]) == 0
    out, err = capsys.readouterr()
    assert out == "<U>HELLO\n"
    assert err.splitlines()[0] == (
        "the prompt goes into the chat template (--raw leaves it as it is)"
    )
    assert err.splitlines()[1] == "stub.gguf in float32 on cpu, context 40 tokens"
    assert err.splitlines()[-1] == (
        "prompt 8 tokens at 16.0 tok/s; first token after 0.25 s; "
        "8 tokens at 3.5 tok/s, 250.0 ms each (planned 200.0 ms, +25.0 %); "
        "device peak 3 MiB (planned 4 MiB, -25.0 %); "
        "KV 512 B on the device, 2 KiB on the host (planned 2 KiB, +0.0 %); "
        "per token 2 KiB h2d, 64 B d2h"
    )


def test_quiet_leaves_standard_error_empty(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub()
    assert run_command(["generate", "-q", "hello"]) == 0
    assert capsys.readouterr() == ("<U>HELLO\n", "")


def test_verbose_lists_the_placements(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub()
    assert run_command(["generate", "-v", "hello"]) == 0
    err = capsys.readouterr().err
    assert "KV cache resident for layers 0 (" in err
    assert "KV cache host for layers 1 (" in err
    assert "finish reason: eos" in err


def test_where_nothing_was_planned_the_line_has_no_plans() -> None:
    stats = replace(
        a_completion("ab", [1], "eos", 0).stats,
        decode_ms=None,
        planned_decode_ms=None,
        planned_peak_device_bytes=None,
        planned_host_kv_bytes=0,
    )
    assert stats_line(stats) == (
        "prompt 1 tokens at 2.0 tok/s; first token after 0.25 s; 2 tokens at 0.5 tok/s; "
        "device peak 3 MiB; KV 512 B on the device, 2 KiB on the host; "
        "per token 2 KiB h2d, 64 B d2h"
    )


def test_layers_are_listed_as_ranges() -> None:
    assert format_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert format_ranges([]) == ""


def test_raw_sends_the_prompt_as_it_is(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub()
    assert run_command(["generate", "--raw", "hello"]) == 0
    assert capsys.readouterr().out == "HELLO\n"


def test_a_model_without_template_gets_the_raw_prompt_and_says_so(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(template=None)
    assert run_command(["generate", "hello"]) == 0
    out, err = capsys.readouterr()
    assert out == "HELLO\n" and "name no chat template" in err


def test_system_goes_in_front_of_the_prompt(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub()
    assert run_command(["generate", "--system", "be brief", "hello"]) == 0
    assert capsys.readouterr().out == "<S>BE BRIEF<U>HELLO\n"


def test_json_prints_one_object_with_the_documented_keys(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub()
    assert run_command(["generate", "--json", "--raw", "é", "--seed", "3"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {
        *("text", "token_ids", "prompt_token_ids", "finish_reason"),
        *("seed", "stats", "placements"),
    }
    assert answer["text"] == "É" and answer["seed"] == 3
    stats = answer["stats"]
    assert stats["h2d_bytes_per_step"] == 2048
    assert (stats["decode_ms"], stats["planned_decode_ms"]) == (250, 200)
    assert (
        stats["planned_peak_device_bytes"] == 4 * 2**20 and stats["peak_device_bytes"] == 3 * 2**20
    )
    assert stats["planned_host_kv_bytes"] == stats["host_kv_bytes"] == 2048
    assert [p["store"] for p in answer["placements"]] == ["resident", "host"]


def test_the_end_by_length_is_said(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub()
    assert run_command(["generate", "--raw", "hello", "--max-tokens", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == "HE\n" and "stopped at --max-tokens 2" in err


def test_max_tokens_is_512_unless_given(stub: Stub) -> None:
    llm = stub()
    run_command(["generate", "hello"])
    assert llm.seen[0][1].max_tokens == 512


def test_an_answer_that_ends_its_line_gets_no_second_line_end(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(answer="done\n")
    run_command(["generate", "hello"])
    assert capsys.readouterr().out == "done\n"


def test_a_seed_drawn_by_the_program_is_reported(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    """B40: unseeded runs say which seed repeats them."""
    stub()
    run_command(["generate", "hello", "--temperature", "0.8"])
    assert "drawn with --seed 77" in capsys.readouterr().err
    run_command(["generate", "hello", "--temperature", "0.8", "--seed", "5"])
    run_command(["generate", "hello"])
    assert "--seed" not in capsys.readouterr().err


ALL_OPTIONS = [
    pytest.param(command, option, id=f"{command.name} {option.opts[-1]}")
    for command in module.cli.commands.values()
    for option in command.params
    if isinstance(option, click.Option)
]


@pytest.mark.parametrize(("command", "option"), ALL_OPTIONS)
def test_every_option_has_a_variable_and_help_names_it(
    command: click.Command, option: click.Option
) -> None:
    name = max(option.opts, key=len).removeprefix("--").replace("-", "_").upper()
    assert option.envvar == f"OFFLOAD_LLAMA_{name}"
    assert option.help
    text = command.get_help(click.Context(command))
    assert option.envvar in text.replace("\n", "").replace(" ", "")


def test_a_variable_is_the_option(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = stub()
    for name, value in {
        "MAX_TOKENS": "3",
        "STOP": "two words",
        "CHAT": "0",
        "TEMPERATURE": "0.5",
        "TOP_K": "7",
        "IGNORE_EOS": "1",
    }.items():
        monkeypatch.setenv(f"OFFLOAD_LLAMA_{name}", value)
    assert run_command(["generate", "hello"]) == 0
    [(text, params)] = llm.seen
    assert text == "hello"
    assert params.stop == ("two words",)
    assert (params.max_tokens, params.temperature, params.top_k) == (3, 0.5, 7)
    assert params.ignore_eos


def test_the_command_line_wins_over_a_variable(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = stub()
    monkeypatch.setenv("OFFLOAD_LLAMA_MAX_TOKENS", "3")
    run_command(["generate", "hello", "--max-tokens", "4"])
    assert llm.seen[0][1].max_tokens == 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["generate"], "no prompt"),
        (["generate", "a", "b"], "unexpected extra argument"),
        (["generate", "a", "--batch-file", "b"], "give one of"),
        (["generate", "a", "--prompt-file", "b"], "give one of"),
        (["generate", "a", "--nonsense"], "No such option"),
        (["generate", "a", "--raw", "--system", "s"], "--system needs --chat"),
        (["generate", "a", "-q", "-v"], "--quiet or --verbose"),
        (["generate", "a", "--dtype", "fp8"], "'fp8' is none of auto, fp32, bf16, fp16"),
        (["generate", "a", "--max-batch-size", "0"], "--max-batch-size"),
        (["generate", "a", "--prefill-chunk", "-1"], "--prefill-chunk"),
        (["generate", "a", "--ctx", "none"], "--ctx"),
        (["generate", "a", "--ctx", "0"], "'0' is no number of tokens above 0"),
        (["generate", "a", "--max-batch-size", "many"], "'many' is no whole number above 0"),
        (["generate", "a", "--vram", "8 gigs"], "cannot read '8 gigs' as a size"),
        (["generate", "a", "--reserve", "0"], "it must be more than 0"),
        (["generate", "a", "--weights", "int3"], "'int3' is none of auto, fp32"),
        (["generate", "a", "--kv-dtype", "q4_k"], "'q4_k' is none of auto, fp32"),
        (["generate", "a", "--max-tokens", "0"], "--max-tokens must be 1 or more"),
        (["generate", "a", "--temperature", "-1"], "--temperature must be 0 or more, got -1.0"),
        (["generate", "a", "--temperature", "nan"], "--temperature must be 0 or more, got nan"),
        (["generate", "a", "--top-p", "0"], "--top-p"),
        (["generate", "a", "--top-k", "0"], "--top-k"),
        (["generate", "a", "--stop", ""], "--stop must not be an empty string"),
        (["generate", "--prompt-file", "/no/such/file"], "cannot read /no/such/file: No such file"),
        (["generate", "--batch-file", "/no/such/file"], "cannot read /no/such/file: No such file"),
        (["genrate"], "genrate"),
    ],
)
def test_a_usage_error_is_one_line_before_anything_is_loaded(
    line: list[str],
    words: str,
    failing_load: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B25, B41: a bad value names its flag, ends with code 2, and no model is read for it."""
    failing_load(AssertionError("the model must not be loaded"))
    assert run_command(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("offload-llama: error: ") and err.count("\n") == 1


def test_explain_lists_the_placements_without_more_words(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub()
    assert run_command(["generate", "--explain", "hello"]) == 0
    err = capsys.readouterr().err
    assert "KV cache host for layers 1 (" in err and "finish reason" not in err


def test_without_a_command_the_help_is_shown_as_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Usage: offload-llama" in err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"offload-llama {module.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("something\nwith two lines"), 1),
        (ConfigError("c"), 2),
        (DoesNotFit("d", needed_bytes=2, available_bytes=1), 3),
        (CheckpointError("c"), 4),
        (TokenizerError("t"), 4),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), 5),
        (MemoryError(), 5),
        (CapacityError("c"), 6),
        (PromptTooLong("p", prompt_tokens=9, max_seq_len=8), 6),
        (DeviceError("d"), 7),
        (ModuleNotFoundError("No module named 'torch'"), 7),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_error_is_one_line_and_its_exit_code(
    error: BaseException,
    code: int,
    failing_load: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing_load(error)
    assert run_command(["generate", "hello"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("offload-llama: error: ") and err.count("\n") == 1


def test_the_debug_variable_shows_the_traceback(
    failing_load: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing_load(RuntimeError("boom"))
    assert run_command(["generate", "hello"]) == 1
    err = capsys.readouterr().err
    assert "OFFLOAD_LLAMA_DEBUG=1" in err and "Traceback" not in err
    monkeypatch.setenv("OFFLOAD_LLAMA_DEBUG", "1")
    assert run_command(["generate", "hello"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("offload-llama: error: ")


def test_an_error_in_mid_answer_begins_its_own_line(
    stub: Stub, capfd: pytest.CaptureFixture[str]
) -> None:
    stub(interrupt_after=2, fail_with=torch.OutOfMemoryError("no more"))
    assert run_command(["generate", "--raw", "hello"]) == 5
    out, err = capfd.readouterr()
    assert out == "HE\n" and "out of memory in spite of the plan: no more" in err


def test_ctrl_c_prints_what_there_is(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub(interrupt_after=2)
    assert run_command(["generate", "--raw", "hello"]) == 130
    out, err = capsys.readouterr()
    assert out == "HEL\n"  # and what was held back as a possible stop string
    assert "interrupted after 3 tokens" in err


def test_ctrl_c_prints_what_there_is_as_json(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(interrupt_after=2)
    assert run_command(["generate", "--raw", "hello", "--json"]) == 130
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["finish_reason"]) == ("HEL", "interrupted")


def test_ctrl_c_before_the_first_token_prints_nothing(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(interrupt_after=0)
    assert run_command(["generate", "hello"]) == 130
    out, err = capsys.readouterr()
    assert out == "" and "interrupted before the first token" in err


def test_a_reader_that_has_enough_is_no_error(
    stub: Stub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(answer="x" * 30)
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        assert run_command(["generate", "-q", "hello"]) == 0
    assert capfd.readouterr() == ("", "")
