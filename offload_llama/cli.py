"""The command line: `offload-llama generate` and `offload-llama doctor`.

Modules that carry torch are imported inside the functions that need them, so that `--help` and
usage errors answer at once.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from offload_llama import __version__
from offload_llama.config import SamplingParams
from offload_llama.console import (
    PROGRAM,
    Console,
    drop_stdout,
    prepare_streams,
    report_error,
)
from offload_llama.errors import OffloadLlamaError
from offload_llama.policy import POLICY_HELP
from offload_llama.prompts import clean_argument

if TYPE_CHECKING:
    from offload_llama.llm import LLM

    _TextType = click.ParamType[str]
else:
    _TextType = click.ParamType  # not generic before click 8.5

OUT_OF_MEMORY, ENVIRONMENT, INTERRUPTED = 5, 7, 130
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class OneText(_TextType):
    """Text that an environment variable gives whole: stop strings may hold spaces."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text, also where the locale could not decode it."""
        return clean_argument(str(value))

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """Return the variable as one value."""
        return [rv]


def _dtype(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Return the long name of a dtype given in its short or long spelling."""
    name = _DTYPES.get(value, value)
    if name not in ("auto", *_DTYPES.values()):
        raise click.BadParameter(f"{value!r} is none of auto, {', '.join(_DTYPES)}.", ctx, param)
    return name


def option(*names: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a click option whose environment variable is OFFLOAD_LLAMA_ and its first name."""
    long_name = next(name for name in names if name.startswith("--")).partition("/")[0]
    variable = "OFFLOAD_LLAMA_" + long_name.removeprefix("--").replace("-", "_").upper()
    settings.setdefault("show_default", settings.get("default") is not None)
    return click.option(*names, envvar=variable, show_envvar=True, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model runs where: the options that `model_options` adds to a command."""

    model: str
    device: str
    dtype: str
    kv_policy: str
    ctx: int | None
    max_batch_size: int
    prefill_chunk: int
    chat_template: str | None
    no_pin: bool

    def load(self, console: Console) -> LLM:
        """Return the loaded model.

        Raises:
            OffloadLlamaError: an option is not possible, or the model cannot be loaded.
        """
        from offload_llama.llm import LLM

        return LLM.load(
            self.model,
            device=self.device,
            dtype=self.dtype,
            kv_policy=self.kv_policy,
            ctx=self.ctx,
            max_batch_size=self.max_batch_size,
            prefill_chunk=self.prefill_chunk,
            chat_template=self.chat_template,
            pin=not self.no_pin,
            progress=console.shows_progress,
            notify=console.say,
        )


def _gathered(
    cls: Any, keyword: str, options: Sequence[Callable[..., Any]], command: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `command` with options added, whose values reach it together as one `cls`."""

    @functools.wraps(command)
    def with_options(**values: Any) -> Any:
        given = {f.name: values.pop(f.name) for f in fields(cls) if f.name in values}
        return command(**{keyword: cls(**given)}, **values)

    wrapped: Callable[..., Any] = with_options
    for add in reversed(options):
        wrapped = add(wrapped)
    return wrapped


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which model runs where; the command takes `model_options`."""
    size = click.IntRange(min=1)
    options = [
        option(
            "--model",
            default="smollm2-135m",
            help="Folder, .gguf file, repository id, or the name of an installed model.",
        ),
        option(
            "--device",
            default="auto",
            help="auto, cuda, cuda:N, xpu, cpu, or a simulated card like sim:rtx-3060-12gb.",
        ),
        option(
            "--dtype",
            metavar=f"[{'|'.join(('auto', *_DTYPES))}]",
            default="auto",
            callback=_dtype,
            help="Numbers of weights and KV cache.",
        ),
        option(
            "--kv-policy",
            default="gpu",
            help=f"Where the KV cache of each layer is: {POLICY_HELP}.",
        ),
        option("--ctx", type=size, help="Tokens of context; left out, what the model allows."),
        option("--max-batch-size", type=size, default=1, help="Prompts run at the same time."),
        option("--prefill-chunk", type=size, default=512, help="Prompt tokens in one pass."),
        option(
            "--chat-template",
            help="Instead of the model's own: a jinja file, llama-2 or llama-3.",
        ),
        option("--no-pin", is_flag=True, help="Never page-lock host memory (copies are slower)."),
    ]
    return _gathered(ModelOptions, "model_options", options, command)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how tokens are chosen; the command takes `params`."""
    options = [
        option("--max-tokens", type=int, default=512, help="Most tokens to generate."),
        option("--temperature", type=float, default=0.0, help="0 is greedy."),
        option("--top-p", type=float, default=1.0, help="Likeliest tokens that reach this share."),
        option("--top-k", type=int, help="Only this many of the likeliest tokens."),
        option("--min-p", type=float, default=0.0, help="Tokens this likely beside the likeliest."),
        option("--repetition-penalty", type=float, default=1.0, help="Above 1: repeat less."),
        option("--seed", type=int, help="Same seed, same text; left out, a fresh one."),
        option(
            "--stop", type=OneText(), multiple=True, help="Text that ends the answer; repeatable."
        ),
        option("--ignore-eos", is_flag=True, help="Go on after the model ends its text."),
    ]
    return _gathered(SamplingParams, "params", options, command)


def console_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --quiet and --verbose; the command takes `console`."""
    options = [
        option("-q", "--quiet", is_flag=True, help="Nothing on standard error but errors."),
        option("-v", "--verbose", is_flag=True, help="More on standard error."),
    ]
    return _gathered(Console, "console", options, command)


@click.group(invoke_without_command=True, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run Llama-family models with the KV cache in host memory.

    Exit codes: 0 fine; 1 unexpected; 2 usage; 3 does not fit; 4 model problem; 5 out of memory in
    spite of the plan; 6 prompt exceeds the context; 7 environment; 130 interrupted.
    OFFLOAD_LLAMA_DEBUG=1 shows the traceback of any error.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


@cli.command(context_settings=_SETTINGS)
@click.argument("prompt", required=False, metavar="[PROMPT|-]", type=OneText())
@option("--prompt-file", metavar="FILE", help="Read the prompt from a file instead.")
@option(
    "--batch-file",
    metavar="FILE",
    help='JSON lines in ({"prompt": ...} or {"messages": [...]}), JSON lines out; - reads stdin.',
)
@option("--system", type=OneText(), help="System message of the chat.")
@option(
    "--chat/--raw",
    default=None,
    help="Wrap the prompt in the chat template, or not; left out, chat if the model has one.",
)
@model_options
@sampling_options
@option("--json", "as_json", is_flag=True, help="Print JSON: one object, or a list for a batch.")
@console_options
def generate(model_options: ModelOptions, console: Console, **arguments: Any) -> None:
    """Answer a prompt, or go on with it.

    PROMPT is the text; - reads it from standard input. Standard output carries the answer (or the
    JSON) and nothing else.
    """
    from offload_llama.answer import Job, run

    load = functools.partial(model_options.load, console)
    click.get_current_context().exit(run(Job(load=load, console=console, **arguments)))


@cli.command(context_settings=_SETTINGS)
@option("--device", default="auto", help="The device to look at, a simulated card too.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(device: str, as_json: bool) -> None:
    """Show what is here: Python, torch, card, memory, page-locking, default model."""
    from offload_llama.doctor import examine, render

    report = examine(device)
    Console().write(json.dumps(report) + "\n" if as_json else render(report))


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; every error becomes one line."""
    prepare_streams()
    try:
        args = list(sys.argv[1:] if arguments is None else arguments)
        with cli.make_context(PROGRAM, args) as ctx:
            cli.invoke(ctx)
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except BrokenPipeError:
        drop_stdout()  # `| head` has read enough; that is not an error
    except (KeyboardInterrupt, click.Abort):
        report_error("interrupted")
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("OFFLOAD_LLAMA_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        code, message = describe(error)
        report_error(message)
        return code
    return 0


def describe(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message of an error."""
    torch = sys.modules.get("torch")
    if isinstance(error, OffloadLlamaError):
        return error.exit_code, str(error)
    if isinstance(error, click.ClickException):
        ctx = getattr(error, "ctx", None)
        hint = f" (see {ctx.command_path} --help)" if ctx else ""
        return 2, error.format_message() + hint
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return OUT_OF_MEMORY, (
            f"out of memory in spite of the plan: {str(error) or 'no host memory left'}; "
            "try a smaller --ctx, --max-batch-size or --prefill-chunk, or --kv-policy offload"
        )
    if isinstance(error, ImportError):
        return ENVIRONMENT, (
            f"{error}; this environment is not complete: run pip install offload-llama in it again"
        )
    return 1, (
        f"unexpected {type(error).__name__}: {error}; "
        "OFFLOAD_LLAMA_DEBUG=1 before the command shows where"
    )


def main() -> None:
    """Run the program; the console script calls this."""
    sys.exit(run_command())
