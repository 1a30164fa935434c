"""The chat command: turns, commands, Ctrl-C, a full context, a pipe and a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from offload_llama import LLM, SamplingParams
from offload_llama.chat import HELP, INTERRUPTED, Chat, ChatJob, run
from offload_llama.cli import run_command
from offload_llama.console import Console
from offload_llama.errors import ConfigError, PromptTooLong
from tests.helpers_cli import StubLLM

CONTEXT = 256


class ScriptedLines:
    """Somebody who types these lines; an exception is raised in place of a line."""

    def __init__(self, *lines: str | BaseException, interactive: bool = True) -> None:
        self.lines, self.interactive = list(lines), interactive
        self.prompts: list[str] = []

    def read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM.load(str(smollm2_path), device="cpu", ctx=CONTEXT)


@pytest.fixture
def talk(llm: LLM) -> Callable[..., int]:
    def talk(*lines: str | BaseException, interactive: bool = True, **changes: Any) -> int:
        settings: dict[str, Any] = {
            "load": lambda: contextlib.nullcontext(llm),
            "system": None,
            "overflow": None,
            "params": SamplingParams(max_tokens=12),
            "console": Console(),
        }
        return run(ChatJob(**settings | changes), ScriptedLines(*lines, interactive=interactive))

    return talk


def answers(llm: LLM, *questions: str, system: str | None = None) -> list[str]:
    """Return what the model says to each message, every turn computed from the start."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = llm.chat(messages, SamplingParams(max_tokens=12)).text
        messages.append({"role": "assistant", "content": text})
        found.append(text)
    return found


def test_turns_are_answered_as_if_each_were_computed_from_the_start(
    llm: LLM, talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    questions = ("Name a colour.", "Another one?", "And a third?")
    assert talk(*questions) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"{text}\n" for text in answers(llm, *questions))
    meters = re.findall(r"^\[(\d+) of 256 tokens; 30 layers on the device", err, re.MULTILINE)
    assert len(meters) == 3 and sorted(map(int, meters)) == [int(n) for n in meters]


def test_a_second_turn_computes_only_what_is_new(
    talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    talk("Name a colour.", "Another one?", "/stats")
    found = re.search(r"prompt (\d+) tokens, (\d+) of them kept", capsys.readouterr().out)
    assert found is not None
    n_prompt, n_kept = map(int, found.groups())
    # The last token of the first answer, the end of its message, the new message, the next header.
    assert 8 < n_prompt - n_kept < 24


def test_a_line_that_ends_in_a_backslash_goes_on(
    llm: LLM, talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    talk("Name a\\", "colour.")
    assert capsys.readouterr().out == answers(llm, "Name a\ncolour.")[0] + "\n"
    talk("Name a colour.\\")
    assert capsys.readouterr().out == answers(llm, "Name a colour.")[0] + "\n"


def test_two_slashes_send_a_message_that_begins_with_one(
    llm: LLM, talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    talk("//exit is a command")
    assert capsys.readouterr().out == answers(llm, "/exit is a command")[0] + "\n"


def test_help_names_every_command_and_each_exists(llm: LLM, talk: Callable[..., int]) -> None:
    job = ChatJob(
        load=lambda: llm, system=None, overflow=None, params=SamplingParams(), console=Console()
    )
    known = set(Chat(job, llm, ScriptedLines())._commands)
    assert set(re.findall(r"^/(\w+)", HELP, re.MULTILINE)) == known | {"exit"}


def test_the_system_message_is_shown_and_changed(
    llm: LLM, talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    french = "Always answer in French."
    talk("/system", f"/system {french}", "/system", "Name a colour.")
    [answer] = answers(llm, "Name a colour.", system=french)
    assert capsys.readouterr().out == f"there is no system message\n{french}\n{answer}\n"


def test_retry_undo_and_clear_change_what_the_model_is_shown(
    llm: LLM, talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    talk("Name a colour.", "/retry", "Another one?", "/undo", "Another one?", "/clear", "Hello!")
    first, second = answers(llm, "Name a colour.", "Another one?")
    [hello] = answers(llm, "Hello!")
    expected = [first, first, second, second, hello]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    talk("/undo", "/retry")
    err = capsys.readouterr().err
    assert "there is no message to take back" in err and "no message to ask again" in err


def test_the_meter_and_the_plan_can_be_asked_for(
    talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    talk("/ctx", "/stats", "/plan", console=Console(quiet=True))
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("0 of 256 tokens; 30 layers on the device")
    assert out.splitlines()[1] == "nothing was answered yet"
    assert "KV cache resident for layers 0-29" in err


def test_a_command_that_is_not_there_is_named(
    talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("/quit", "/exit", "never read") == 0
    assert "there is no command /quit; /help lists them" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no command /quit"):
        talk("/quit", interactive=False)


class Interrupting(Console):
    """Ctrl-C as the third piece of an answer is written."""

    written: ClassVar[list[str]] = []

    def write(self, text: str) -> None:
        super().write(text)
        if text.strip() and not text.startswith("prompt"):
            self.written.append(text)
            if len(self.written) == 3:
                raise KeyboardInterrupt


def test_ctrl_c_ends_an_answer_and_not_the_program(
    llm: LLM, talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    Interrupting.written.clear()
    assert talk("Name a colour.", "Another one?", "/stats", console=Interrupting()) == 0
    out, err = capsys.readouterr()
    assert "interrupted after" in err
    assert re.search(r"of them kept", out), "what was said before is still in the cache"
    Interrupting.written.clear()
    assert talk("Name a colour.", "x", interactive=False, console=Interrupting()) == INTERRUPTED


def test_ctrl_c_at_the_prompt_says_how_to_leave(
    talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(KeyboardInterrupt(), "/exit") == 0
    assert "/exit or Ctrl-D leaves" in capsys.readouterr().err
    assert talk(KeyboardInterrupt(), interactive=False) == INTERRUPTED


LONG = "please tell me about the sea and all that lives in it " * 6


def test_a_full_context_is_asked_about_once(
    talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """B49: nothing is dropped unseen."""
    assert talk(LONG, LONG, LONG, "y", LONG, LONG, "/ctx") == 0
    out, err = capsys.readouterr()
    assert out.count("exceeds the context of 256") == 1
    assert err.count("the oldest exchange was dropped") >= 2


@pytest.mark.parametrize("reply", ["n", KeyboardInterrupt(), EOFError()])
def test_who_refuses_keeps_the_conversation_as_it_was(
    reply: str | BaseException, talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(LONG, LONG, LONG, reply, "/undo", "/undo", "/undo") == 0
    assert "there is no message to take back" in capsys.readouterr().err


def test_a_pipe_is_refused_unless_it_says_otherwise(
    talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PromptTooLong, match="--overflow drop-oldest"):
        talk(LONG, LONG, LONG, LONG, interactive=False)
    assert talk(LONG, LONG, LONG, LONG, interactive=False, overflow="drop-oldest") == 0
    assert "the oldest exchange was dropped" in capsys.readouterr().err


def test_a_message_that_never_fits_leaves_the_conversation_as_it_was(
    llm: LLM, talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("Name a colour.", "word " * 400, "Another one?") == 0
    out, err = capsys.readouterr()
    assert "shorten it, or raise --ctx" in err
    assert out == "".join(f"{t}\n" for t in answers(llm, "Name a colour.", "Another one?"))


def test_a_model_without_chat_template_is_refused() -> None:
    job = ChatJob(
        load=lambda: StubLLM(template=None),  # type: ignore[arg-type,return-value]
        system=None,
        overflow=None,
        params=SamplingParams(),
        console=Console(),
    )
    with pytest.raises(ConfigError, match="give --chat-template, or let generate"):
        run(job, ScriptedLines())


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("chat --overflow sometimes", "none of error, drop-oldest"),
        ("chat -q -v", "--quiet or --verbose"),
        ("chat no-such-model", "no-such-model"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    line: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(line.split()) in (2, 4)
    err = capsys.readouterr().err
    assert wrong in err and err.count("\n") == 1


COMMAND = ("chat", "--device", "cpu", "--ctx", "256", "--max-tokens", "12")


def test_each_line_of_a_pipe_is_a_message(llm: LLM) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offload_llama", *COMMAND, "-q"],
        input=b"Name a colour.\r\n\nAnother one?",
        capture_output=True,
        check=True,
    )
    expected = answers(llm, "Name a colour.", "Another one?")
    assert done.stdout.decode() == "".join(f"{text}\n" for text in expected)
    assert done.stderr == b""


def in_a_terminal(command: Sequence[str], script: Sequence[tuple[str, bytes]]) -> tuple[str, int]:
    """Run a command in a terminal, type each text once what goes before it is shown."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(command[0], command)
    shown, seen, deadline = "", 0, time.monotonic() + 120
    waiting = list(script)
    while time.monotonic() < deadline:
        # Typed earlier, before the prompt is there, it would meet a terminal in another mode.
        ready = (
            re.compile(re.escape(waiting[0][0]) + r".*?\[\?2004h", re.DOTALL) if waiting else None
        )
        if ready and (found := ready.search(shown, seen)):
            seen = found.end()
            os.write(terminal, waiting.pop(0)[1])
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:
            break
        if not data:
            break
        if b"\x1b[6n" in data:
            os.write(terminal, b"\x1b[1;1R")  # where the cursor is, as a terminal answers
        shown += data.decode(errors="replace")
    os.close(terminal)
    return shown, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_it_can_be_typed_in_a_terminal(llm: LLM, tmp_path: Path) -> None:
    os.environ["XDG_STATE_HOME"] = str(tmp_path)
    try:
        shown, code = in_a_terminal(
            [sys.executable, "-m", "offload_llama", *COMMAND],
            [
                ("Ctrl-D leaves", b"Name a colour.\r"),
                ("on the host", b"/ctx\r"),
                ("on the host", b"\x04"),
            ],
        )
    finally:
        del os.environ["XDG_STATE_HOME"]
    assert code == 0, shown
    assert answers(llm, "Name a colour.")[0].split()[0] in shown
    assert (tmp_path / "offload-llama" / "chat_history").read_text().count("+Name a colour.") == 1
