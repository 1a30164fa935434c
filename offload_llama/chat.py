"""The `chat` command: a conversation, typed in a terminal or read from a pipe line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import platformdirs

from offload_llama.answer import explain_end, introduce, show
from offload_llama.config import SamplingParams
from offload_llama.console import Console, report_error, stats_line
from offload_llama.conversation import ContextFull, Conversation
from offload_llama.errors import ConfigError, OffloadLlamaError
from offload_llama.generate import Completion
from offload_llama.hardware import format_bytes
from offload_llama.llm import LLM
from offload_llama.prompts import decode_text

INTERRUPTED = 130
HELP = """\
/help          this list
/stats         figures of the last answer
/plan          where each layer's keys and values are, and why
/ctx           how full the context is, and where it lies
/system TEXT   set the system message; without TEXT, show it
/retry         ask the last message again
/undo          forget the last message and its answer
/clear         forget all messages but the system message
/exit          leave, as Ctrl-D does
A line that ends in a backslash goes on in the next one, and // in front sends a message that
begins with /. Ctrl-C ends an answer early."""


class Lines(Protocol):
    """Where messages come from. `interactive` says that somebody sits there and can go on."""

    interactive: bool

    def read(self, prompt: str) -> str:
        """Return the next line without its end.

        Raises:
            EOFError: there is none.
            KeyboardInterrupt: somebody typed Ctrl-C.
        """
        ...


class PipedLines:
    """Lines of standard input."""

    interactive = False

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._noticed = False

    def read(self, prompt: str) -> str:
        """Return the next line."""
        data = sys.stdin.buffer.readline()
        if not data:
            raise EOFError
        text, encoding = decode_text(data)
        if encoding == "cp1252" and not self._noticed:
            self._noticed = True
            self._notice("standard input is not UTF-8; it was read as Windows-1252")
        return text.removesuffix("\n")


class TypedLines:
    """Lines typed in a terminal, with editing, and with those of earlier conversations at hand."""

    interactive = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory

        history: History = InMemoryHistory()
        folder = Path(platformdirs.user_state_dir("offload-llama"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "chat_history"
            path.touch(mode=0o600)
            history = FileHistory(str(path))
        except OSError:
            pass  # a home that cannot be written: this conversation's lines alone
        self._session: PromptSession[str] = PromptSession(history=history)

    def read(self, prompt: str) -> str:
        """Return the next line; what was pasted may be several."""
        return self._session.prompt(prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob:
    """What the user asked of `chat`.

    `load` returns the loaded model. `overflow` None asks at a terminal. `explain` says why each
    layer's cache is where it is.

    Raises:
        ConfigError: the options contradict each other.
    """

    load: Callable[[], LLM]
    system: str | None
    overflow: str | None
    params: SamplingParams
    console: Console
    explain: bool = False

    def __post_init__(self) -> None:
        if self.console.quiet and self.console.verbose:
            raise ConfigError("give --quiet or --verbose, not both")


def run(job: ChatJob, lines: Lines | None = None) -> int:
    """Talk until the input ends, and return the exit code.

    Raises:
        OffloadLlamaError: the model cannot be loaded, or a message that came through a pipe cannot
            be answered.
    """
    with job.load() as llm:
        if llm.chat_template is None:
            raise ConfigError(
                "chat needs a chat template, and the model's files name none: give "
                "--chat-template, or let generate go on from plain text"
            )
        introduce(llm, job.console, explain=job.explain)
        if lines is None:
            terminal = sys.stdin.isatty() and sys.stdout.isatty()
            lines = TypedLines() if terminal else PipedLines(job.console.say)
        return Chat(job, llm, lines).run()


class Chat:
    """One conversation with its commands."""

    def __init__(self, job: ChatJob, llm: LLM, lines: Lines) -> None:
        self._job, self._llm, self._lines, self._console = job, llm, lines, job.console
        self._talk = Conversation(
            llm, system=job.system, overflow=job.overflow or "error", notify=job.console.say
        )
        self._undecided = job.overflow is None
        self._last: Completion | None = None
        self._interrupted = False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._console.write(HELP + "\n"),
            "stats": lambda _: self._stats(),
            "plan": lambda _: self._plan(),
            "ctx": lambda _: self._console.write(self.meter() + "\n"),
            "system": self._system,
            "retry": lambda _: self._retry(),
            "undo": lambda _: self._undo(),
            "clear": lambda _: self._clear(),
        }

    def run(self) -> int:
        """Answer until the input ends, and return the exit code."""
        if self._lines.interactive:
            self._console.say("/help lists the commands, Ctrl-D leaves")
        while True:
            try:
                text = self._read()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if not self._lines.interactive:
                    return INTERRUPTED
                self._console.say("/exit or Ctrl-D leaves")
                continue
            if not text.strip():
                continue
            if text.strip() == "/exit":
                return 0
            try:
                self._take(text)
            except OffloadLlamaError as error:
                if not self._lines.interactive:
                    raise
                report_error(str(error))
            if self._interrupted and not self._lines.interactive:
                return INTERRUPTED

    def _take(self, text: str) -> None:
        """Do what a line asks for."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text[1:].strip().partition(" ")
            if name not in self._commands:
                raise ConfigError(f"there is no command /{name}; /help lists them")
            self._commands[name](rest.strip())
        else:
            self._ask(text[text.startswith("//") :])

    def meter(self) -> str:
        """Return how full the context is, and where its keys and values lie."""
        cache = self._llm.cache
        held = cache.stats()
        n_host = sum(placement.store == "host" for placement in cache.placements)
        n_device = len(cache.placements) - n_host
        return (
            f"{cache.lengths[0]:,} of {cache.max_seq_len:,} tokens; {_layers(n_device)} on the "
            f"device {format_bytes(held.device_kv_bytes)}, {_layers(n_host)} on the host "
            f"{format_bytes(held.host_kv_bytes)}"
        )

    def _read(self) -> str:
        """Return the next message; a line that ends in a backslash goes on in the next."""
        text = self._lines.read("> ")
        while text.endswith("\\"):
            try:
                text = text[:-1] + "\n" + self._lines.read(". ")
            except EOFError:
                text = text[:-1]
        return text

    def _ask(self, text: str) -> None:
        """Answer one message."""
        params = self._job.params
        try:
            answer = self._talk.stream(text, params)
        except ContextFull as error:
            if not self._undecided or not self._lines.interactive:
                raise
            if not self._may_drop(error):
                return
            self._undecided, self._talk.overflow = False, "drop-oldest"
            answer = self._talk.stream(text, params)
        show(answer, self._console.write)
        completion = answer.completion
        self._interrupted = completion is None or completion.finish_reason == "interrupted"
        if completion is None:
            self._console.say("interrupted before the first token")
            return
        self._last = completion
        explain_end(self._last, params, self._llm, self._console)
        tell = self._console.say if self._lines.interactive else self._console.detail
        tell(f"[{self.meter()}]")
        self._console.detail(stats_line(self._last.stats))

    def _may_drop(self, error: ContextFull) -> bool:
        """Ask whether the oldest exchanges may go."""
        self._console.write(f"{error}\n")
        try:
            reply = self._lines.read("drop the oldest exchanges from now on? [Y/n] ")
        except (EOFError, KeyboardInterrupt):
            return False
        return reply.strip().lower() in ("", "y", "yes")

    def _stats(self) -> None:
        last = self._last
        text = "nothing was answered yet" if last is None else stats_line(last.stats)
        self._console.write(text + "\n")

    def _plan(self) -> None:
        introduce(self._llm, replace(self._console, quiet=False), explain=True)

    def _system(self, text: str) -> None:
        if text:
            self._talk.system = text
        else:
            self._console.write(f"{self._talk.system or 'there is no system message'}\n")

    def _retry(self) -> None:
        before = self._talk.messages
        question = self._talk.undo()
        if question is None:
            raise ConfigError("there is no message to ask again")
        try:
            self._ask(question)
        finally:
            if len(self._talk.messages) < len(before):
                self._talk.messages = before  # nothing came of it

    def _undo(self) -> None:
        if self._talk.undo() is None:
            raise ConfigError("there is no message to take back")

    def _clear(self) -> None:
        self._talk.clear()


def _layers(n: int) -> str:
    return f"{n} layer" if n == 1 else f"{n} layers"
