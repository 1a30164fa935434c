"""One `generate` command: prompts in, the answer out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload_llama.config import SamplingParams
from offload_llama.console import (
    Console,
    format_ranges,
    json_is_ascii,
    memory_part,
    report_error,
    stats_line,
)
from offload_llama.errors import ConfigError, OffloadLlamaError, RequestError, TokenizerError
from offload_llama.hardware import format_bytes
from offload_llama.prompts import BatchLine, read_batch, read_prompt

if TYPE_CHECKING:
    from offload_llama.conversation import Answer
    from offload_llama.generate import Completion, RunStats
    from offload_llama.llm import LLM
    from offload_llama.steps import Stream

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the user asked of `generate`.

    `load` returns the loaded model. `chat` None leaves the choice to the model. `explain` says why
    each layer's cache is where it is.

    Raises:
        ConfigError: the options contradict each other.
    """

    load: Callable[[], LLM]
    prompt: str | None
    prompt_file: str | None
    batch_file: str | None
    system: str | None
    chat: bool | None
    params: SamplingParams
    as_json: bool
    console: Console
    explain: bool = False

    def __post_init__(self) -> None:
        sources = [s for s in (self.prompt, self.prompt_file, self.batch_file) if s is not None]
        if not sources:
            raise ConfigError(
                'no prompt: type one in quotes, "-" for standard input, --prompt-file or '
                "--batch-file FILE"
            )
        if len(sources) > 1:
            raise ConfigError("give one of PROMPT, --prompt-file and --batch-file, not several")
        if self.chat is False and self.system is not None:
            raise ConfigError("--system needs --chat: a raw prompt has no system message")
        if self.console.quiet and self.console.verbose:
            raise ConfigError("give --quiet or --verbose, not both")


def run(job: Job) -> int:
    """Answer the job's prompts and return the exit code.

    Raises:
        OffloadLlamaError: whatever keeps the model from loading or a single prompt from running.
    """
    console = job.console
    lines: list[BatchLine] = []
    prompt = job.prompt or ""
    if job.batch_file is not None:
        lines = read_batch(job.batch_file, job.params, console.say)
    elif job.prompt_file is not None or prompt == "-":
        prompt = read_prompt(job.prompt_file or "-", console.say)
    with job.load() as llm:
        chat = _wants_chat(job, llm)
        introduce(llm, console, explain=job.explain)
        if job.batch_file is not None:
            return _Batch(job, llm, chat, lines).run()
        messages = [("user", prompt)] if chat else None
        return _answer_one(job, llm, _encoded(llm, job.system, prompt, messages))


def _wants_chat(job: Job, llm: LLM) -> bool:
    """Return whether plain prompts are wrapped in the chat template, and say so."""
    has_template = llm.chat_template is not None
    if job.chat is not None:
        return job.chat
    if job.system is not None and not has_template:
        raise ConfigError(
            "--system: the model's files name no chat template; add --chat or --chat-template"
        )
    job.console.say(
        "the prompt goes into the chat template (--raw leaves it as it is)"
        if has_template
        else "the prompt stays as it is: the model's files name no chat template (--chat or "
        "--chat-template wraps it)"
    )
    return has_template


def introduce(llm: LLM, console: Console, *, explain: bool) -> None:
    """Say what runs where; if asked to explain or to say more, each layer's cache and why too."""
    simulated = "; simulated: real text, modelled times and bytes" if llm.device.simulated else ""
    console.say(
        f"{llm.checkpoint.path.name} in {str(llm.cache.dtype).removeprefix('torch.')} on "
        f"{llm.device.name}, context {llm.cache.max_seq_len} tokens{simulated}"
    )
    chosen: dict[tuple[str, str], list[int]] = {}
    for placement in llm.placements:
        chosen.setdefault((placement.store, placement.reason), []).append(placement.layer)
    for (store, reason), layers in chosen.items():
        tell = console.say if explain else console.detail
        tell(f"KV cache {store} for layers {format_ranges(layers)} ({reason})")


def _encoded(
    llm: LLM, system: str | None, prompt: str, messages: Sequence[tuple[str, str]] | None
) -> str | list[int]:
    """Return what the model is given: the ids of the messages, or the prompt where there are none.

    Args:
        system: is put in front of the messages unless they begin with a system message.
    """
    if messages is None:
        return prompt
    if system is not None and messages[0][0] != "system":
        messages = [("system", system), *messages]
    return llm.encode_chat([{"role": role, "content": content} for role, content in messages])


def show(tokens: Stream | Answer, write: Callable[[str], None]) -> None:
    """Write an answer as it comes, and a line end; Ctrl-C closes it and keeps what there is."""
    shown = ""
    try:
        for token in tokens:
            write(token.text)
            shown += token.text
    except KeyboardInterrupt:
        tokens.close()
        if tokens.completion is not None:
            rest = tokens.completion.text[len(shown) :]  # held back as a possible stop string
            write(rest)
            shown += rest
    finally:
        if shown and not shown.endswith("\n"):
            write("\n")


def _answer_one(job: Job, llm: LLM, prompt: str | list[int]) -> int:
    """Stream one answer; Ctrl-C ends it early and keeps what there is."""
    console = job.console
    tokens = llm.stream(prompt, job.params)
    show(tokens, console.write if not job.as_json else lambda text: None)
    completion = tokens.completion
    if completion is None:
        console.say("interrupted before the first token")
        return INTERRUPTED
    if job.as_json:
        console.write(_json(completion.as_dict(llm.placements)) + "\n")
    explain_end(completion, job.params, llm, console)
    console.say(stats_line(completion.stats))
    return INTERRUPTED if completion.finish_reason == "interrupted" else 0


def explain_end(completion: Completion, params: SamplingParams, llm: LLM, console: Console) -> None:
    """Say why the answer stops where it does, if not by itself."""
    reason = completion.finish_reason
    if reason == "length":
        console.say(f"stopped at --max-tokens {params.max_tokens}")
    elif reason == "context":
        console.say(
            f"stopped: the context of {llm.cache.max_seq_len} tokens is full; --ctx sets its size"
        )
    elif reason == "interrupted":
        console.say(f"interrupted after {completion.stats.generated_tokens} tokens")
    if params.temperature > 0 and params.seed is None:
        console.say(f"drawn with --seed {completion.seed}")
    console.detail(f"finish reason: {reason}")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=json_is_ascii())


class _Batch:
    """Many prompts, answered in order, `--max-batch-size` at a time.

    A prompt that cannot be served (too long, empty) gets an object with `error` in its place, and
    the others go on.
    """

    def __init__(self, job: Job, llm: LLM, chat: bool, lines: Sequence[BatchLine]) -> None:
        self.job, self.llm, self.chat, self.lines = job, llm, chat, lines
        self.stats: list[RunStats] = []
        self.errors: list[OffloadLlamaError] = []
        self._objects: list[dict[str, Any] | None] = [None] * len(lines)
        self._written = 0

    def run(self) -> int:
        """Answer every line and return the exit code: that of the first error, if any."""
        from tqdm import tqdm

        from offload_llama.steps import Interrupted

        console = self.job.console
        began_s = time.perf_counter()
        prompts, places = self._prompts()
        interrupted = False
        with tqdm(total=len(prompts), unit="prompt", disable=console.quiet) as bar:

            def done(index: int, completion: Completion) -> None:
                self.stats.append(completion.stats)
                self._put(places[index], completion.as_dict(self.llm.placements))
                bar.update()

            try:
                self.llm.generate(
                    prompts, [self.lines[place].params for place in places], on_done=done
                )
            except Interrupted as error:
                interrupted = True
                for index, completion in enumerate(error.completions):
                    if self._objects[places[index]] is None:
                        done(index, completion)
        if self.job.as_json:
            console.write(_json([found for found in self._objects if found is not None]) + "\n")
        for problem in self.errors:
            report_error(str(problem))
        self._say_totals(time.perf_counter() - began_s)
        if interrupted:
            return INTERRUPTED
        return self.errors[0].exit_code if self.errors else 0

    def _prompts(self) -> tuple[list[str | list[int]], list[int]]:
        """Return what can be run, and which line each is; the other lines get their error."""
        prompts: list[str | list[int]] = []
        places: list[int] = []
        for place, line in enumerate(self.lines):
            messages = line.messages
            if messages is None and self.chat:
                messages = (("user", line.prompt or ""),)
            try:
                prompt = _encoded(self.llm, self.job.system, line.prompt or "", messages)
                self.llm.check(self.llm.encode(prompt))
            except (RequestError, TokenizerError) as error:
                error.args = (f"{line.name}: {error}",)
                self.errors.append(error)
                self._put(place, {"error": str(error)})
            else:
                prompts.append(prompt)
                places.append(place)
        return prompts, places

    def _put(self, place: int, answer: dict[str, Any]) -> None:
        """Take down one line's answer, and write all that are next in order."""
        line = self.lines[place]
        self._objects[place] = {"id": line.id, **answer} if line.has_id else answer
        while not self.job.as_json and self._written < len(self.lines):
            answer_or_none = self._objects[self._written]
            if answer_or_none is None:
                break
            self.job.console.write(_json(answer_or_none) + "\n")
            self._written += 1

    def _say_totals(self, seconds: float) -> None:
        stats = self.stats
        if not stats:
            return
        self.job.console.say(
            f"{len(stats)} of {len(self.lines)} prompts answered in {seconds:.1f} s; "
            f"{sum(s.prompt_tokens for s in stats)} prompt tokens, "
            f"{sum(s.generated_tokens for s in stats)} generated; {memory_part(stats)}; "
            f"per step {format_bytes(max(s.h2d_bytes_per_step for s in stats))} h2d, "
            f"{format_bytes(max(s.d2h_bytes_per_step for s in stats))} d2h"
            + (" [bytes simulated]" if stats[0].simulated else "")
        )
