"""Prompts from standard input and files, and files of JSON lines."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from offload_llama.cli import ModelOptions, cli, run_command
from offload_llama.prompts import clean_argument, decode_text
from tests.helpers_cli import StubLLM, write_lines

Stub = Callable[..., StubLLM]
BOM = b"\xef\xbb\xbf"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """A function that puts a stand-in without chat template where the model would be loaded."""

    def install(**settings: Any) -> StubLLM:
        llm = StubLLM(template=None, **settings)
        monkeypatch.setattr(ModelOptions, "load", lambda options, console: llm)
        return llm

    return install


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        ("π 😀".encode(), "π 😀"),
        (BOM + b"a\r\nb\r\n", "a\nb\n"),
        (b"old\rmac", "old\nmac"),
        ("powershell".encode("utf-16"), "powershell"),
        (b"\xfe\xff\x00h\x00i", "hi"),
        (b"\x93quoted\x94", "\u201cquoted\u201d"),
        (b"\x81 undefined", "\ufffd undefined"),
    ],
)
def test_text_is_decoded_whatever_wrote_it(data: bytes, text: str) -> None:
    """B64: bytes from any editor or shell become text without an exception."""
    assert decode_text(data)[0] == text


def test_an_argument_the_locale_could_not_decode_becomes_text_again() -> None:
    """B64: in the C locale arguments arrive as surrogates."""
    assert clean_argument("π".encode().decode("ascii", "surrogateescape")) == "π"
    assert clean_argument("plain π") == "plain π"


@pytest.mark.parametrize("data", [b"hello", b"hello\n", BOM + b"hello\r\n"])
def test_a_dash_reads_the_prompt_from_standard_input_without_its_line_end(
    data: bytes, stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub()
    feed(monkeypatch, data)
    assert run_command(["generate", "-"]) == 0
    assert capsys.readouterr().out == "HELLO\n"


def test_smart_quotes_on_standard_input_are_read_and_said(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B64: bytes 0x93 and 0x94 on standard input."""
    stub()
    feed(monkeypatch, b"\x93hi\x94\n")
    assert run_command(["generate", "-"]) == 0
    out, err = capsys.readouterr()
    assert out == "\u201cHI\u201d\n"
    assert "standard input is not UTF-8; it was read as Windows-1252" in err


def test_a_prompt_file_may_have_a_byte_order_mark_and_windows_line_ends(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B64: prompt file with BOM and CRLF, under a name that is not ASCII."""
    stub()
    path = tmp_path / "прompt file.txt"
    path.write_bytes(BOM + b"a\r\nb\r\n")
    assert run_command(["generate", "--prompt-file", str(path)]) == 0
    assert capsys.readouterr().out == "A\nB\n"


@pytest.mark.parametrize("data", [b"", b"\n"])
def test_an_empty_pipe_is_a_usage_error_without_a_begin_token(
    data: bytes, stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B34: an empty standard input ends with one line."""
    stub()
    feed(monkeypatch, data)
    assert run_command(["generate", "-"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1] == "offload-llama: error: the prompt is empty"


def test_a_batch_is_answered_in_order_although_it_finishes_in_another(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B41: byte order mark, Windows line ends and blank lines in a prompt file."""
    stub()
    path = write_lines(
        tmp_path / "in.jsonl",
        '{"id": "first", "prompt": "a"}',
        "",
        '"b"',
        "   ",
        '{"id": null, "prompt": "c"}',
        prefix=BOM,
        end="\r\n",
    )
    assert run_command(["generate", "--batch-file", path]) == 0
    answers = rows(capsys)
    assert [answer["text"] for answer in answers] == ["A", "B", "C"]
    assert answers[0]["id"] == "first" and "id" not in answers[1] and answers[2]["id"] is None


def test_a_batch_as_json_is_one_list(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub()
    path = write_lines(tmp_path / "in.jsonl", '"a"', '"b"')
    assert run_command(["generate", "--batch-file", path, "--json"]) == 0
    out, err = capsys.readouterr()
    assert [answer["text"] for answer in json.loads(out)] == ["A", "B"]
    assert "2/2" in err  # the progress bar
    assert "2 of 2 prompts answered" in err


def test_a_quiet_batch_shows_no_progress(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub()
    path = write_lines(tmp_path / "in.jsonl", '"a"')
    assert run_command(["generate", "-q", "--batch-file", path]) == 0
    assert capsys.readouterr().err == ""


def test_a_batch_may_come_from_standard_input(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub()
    feed(monkeypatch, b'"a"\n')
    assert run_command(["generate", "--batch-file", "-"]) == 0
    assert rows(capsys)[0]["text"] == "A"


def test_a_line_has_its_own_settings_over_those_of_the_command(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = stub()
    path = write_lines(
        tmp_path / "in.jsonl",
        '{"prompt": "a", "max_tokens": 9, "seed": 4, "temperature": 1, "stop": "x"}',
        '{"prompt": "b", "stop": ["y", "z"], "ignore_eos": true, "top_k": null}',
    )
    line = ["generate", "--batch-file", path, "--max-tokens", "5", "--top-k", "3"]
    assert run_command(line) == 0
    first, second = (params for _, params in llm.seen)
    assert (first.max_tokens, first.seed, first.temperature, first.stop) == (9, 4, 1.0, ("x",))
    assert (second.max_tokens, second.stop, second.top_k) == (5, ("y", "z"), 3)
    assert second.ignore_eos and not first.ignore_eos


def test_messages_go_through_the_template_and_prompts_as_the_command_says(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub().chat_template = "template"
    path = write_lines(
        tmp_path / "in.jsonl",
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]}',
        '"c"',
    )
    assert run_command(["generate", "--batch-file", path, "--system", "s"]) == 0
    assert [a["text"] for a in rows(capsys)] == ["<S>S<U>A", "<S>OWN<U>B", "<S>S<U>C"]
    assert run_command(["generate", "--batch-file", path, "--raw"]) == 0
    assert [a["text"] for a in rows(capsys)] == ["<U>A", "<S>OWN<U>B", "C"]


def test_a_prompt_that_cannot_be_served_leaves_the_others_unaffected(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B34, B17: an empty and a too long prompt in a batch get an error in their place."""
    stub()
    path = write_lines(tmp_path / "in.jsonl", '"a"', '{"id": 7, "prompt": ""}', f'"{"x" * 50}"')
    assert run_command(["generate", "--batch-file", path]) == 2
    out, err = capsys.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert answers[0]["text"] == "A"
    assert answers[1] == {"id": 7, "error": f"{path} line 2: the prompt is empty"}
    assert answers[2] == {"error": f"{path} line 3: the prompt has 50 tokens"}
    errors = [line for line in err.splitlines() if line.startswith("offload-llama: error: ")]
    assert len(errors) == 2


def test_only_a_too_long_prompt_gives_that_exit_code(stub: Stub, tmp_path: Path) -> None:
    """B17: the exit code tells a prompt that is too long from other errors."""
    stub()
    path = write_lines(tmp_path / "in.jsonl", '"a"', f'"{"x" * 50}"')
    assert run_command(["generate", "--batch-file", path]) == 6


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_batch_prints_what_there_is(
    as_json: bool, stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(interrupt_after=1)
    path = write_lines(tmp_path / "in.jsonl", '"aaa"', '"bbb"', '"ccc"')
    line = ["generate", "--batch-file", path] + ["--json"] * as_json
    assert run_command(line) == 130
    out = capsys.readouterr().out
    answers = json.loads(out) if as_json else [json.loads(text) for text in out.splitlines()]
    assert [(a["text"], a["finish_reason"]) for a in answers] == [
        ("AAA", "eos"),
        ("B", "interrupted"),
    ]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("hello", "is not JSON"),
        ('{"prompt": "a"', "is not JSON"),
        ("3", "expected an object or a string, got 3"),
        ("{}", 'give either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'give either "prompt" or "messages"'),
        ('{"prompt": 1}', '"prompt" must be a string, got 1'),
        ('{"prompt": "a", "max_token": 1}', "unknown key 'max_token'"),
        ('{"prompt": "a", "max_tokens": "9"}', '"max_tokens" must be a whole number, got "9"'),
        ('{"prompt": "a", "max_tokens": true}', '"max_tokens" must be a whole number, got true'),
        ('{"prompt": "a", "temperature": "hot"}', '"temperature" must be a number'),
        ('{"prompt": "a", "temperature": -1}', "--temperature must be 0 or more, got -1.0"),
        ('{"prompt": "a", "stop": [1]}', '"stop" must be a string or a list of strings'),
        ('{"prompt": "a", "ignore_eos": 1}', '"ignore_eos" must be true or false, got 1'),
        ('{"messages": []}', "at least one message"),
        ('{"messages": ["a"]}', 'message 0 must have "role" and "content"'),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "message 0 has role 'robot'"),
        ('{"messages": [{"role": "user", "content": null}]}', '"content" must be a string'),
    ],
)
def test_a_bad_line_is_named_by_its_number(
    bad: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "in.jsonl", '"fine"', "", bad)
    assert run_command(["generate", "--batch-file", path]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"{path} line 3" in err and words in err


@pytest.mark.parametrize("data", [b"", b"\n \n", BOM])
def test_an_empty_batch_file_is_a_usage_error(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B41, B34: an empty file says what belongs into it."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    assert run_command(["generate", "--batch-file", str(path)]) == 2
    assert "holds no prompts" in capsys.readouterr().err


@pytest.mark.parametrize("command", list(cli.commands.values()), ids=list(cli.commands))
def test_the_documentation_lists_the_options_there_are(command: click.Command) -> None:
    text = (Path(__file__).parents[1] / "docs" / "cli.md").read_text("utf-8")
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    section = sections[str(command.name)]
    names = {param.name for param in command.params}
    if "kv_policy" in names:
        section += sections["Where, and in which numbers"]
    if "temperature" in names:
        section += sections["How tokens are chosen"]
    rows_ = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `-")]
    options = [param for param in command.params if isinstance(param, click.Option)]
    there = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    assert {name for row in rows_ for name in re.findall(r"--?[\w-]+", row)} == there
