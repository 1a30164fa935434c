"""The command line: `offload-llama generate`, `chat`, `plan`, `quantize` and `doctor`.

Modules that carry torch are imported inside the functions that need them, so that `--help`, `plan`
and usage errors answer at once.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from offload_llama import __version__
from offload_llama.console import (
    PROGRAM,
    Console,
    drop_stdout,
    prepare_streams,
    report_error,
)
from offload_llama.cost.packing import PACKED
from offload_llama.errors import ConfigError, OffloadLlamaError
from offload_llama.options import (
    DEFAULT_MODEL,
    ModelOptions,
    console_options,
    model_options,
    plan_options,
    running_options,
    sampling_options,
)
from offload_llama.options.kinds import OneOf, OneText, option

OUT_OF_MEMORY, ENVIRONMENT, INTERRUPTED = 5, 7, 130
_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


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
    click.get_current_context().exit(
        run(Job(load=load, console=console, explain=model_options.explain, **arguments))
    )


@cli.command(context_settings=_SETTINGS)
@click.argument("model", default=DEFAULT_MODEL, envvar="OFFLOAD_LLAMA_MODEL")
@option("--system", type=OneText(), help="System message.")
@option(
    "--overflow",
    type=OneOf(("error", "drop-oldest")),
    help="When the context is full: refuse the message, or drop the oldest exchanges. Left out, a "
    "terminal asks once, and a pipe refuses.",
)
@running_options
@sampling_options
@console_options
def chat(model_options: ModelOptions, console: Console, **arguments: Any) -> None:
    """Talk with a model, turn by turn; /help lists what can be typed beside messages.

    MODEL is a folder, a .gguf file, a repository id or an installed model. Without a terminal each
    line of standard input is a message. A line that ends in a backslash goes on in the next one.
    """
    from offload_llama.chat import ChatJob, run

    load = functools.partial(model_options.load, console)
    click.get_current_context().exit(
        run(ChatJob(load=load, console=console, explain=model_options.explain, **arguments))
    )


@cli.command(context_settings=_SETTINGS)
@click.argument("model", default=DEFAULT_MODEL, envvar="OFFLOAD_LLAMA_MODEL")
@option("--gpu", metavar="NAME", help="Plan for this card, like rtx-4060; there need not be one.")
@plan_options
@option("--min-tps", type=float, help="Tokens a second; with --ctx max, the context it allows.")
@option("--frontier", is_flag=True, help="Latency against memory, over policies and contexts.")
@option("--plot", metavar="FILE", help="With --frontier: draw it, into out.png for example.")
@option("--check", is_flag=True, help="End with exit code 3 if it does not fit.")
@option("--learn", is_flag=True, help="Run it briefly here, and keep what it took beyond the plan.")
@option("--json", "as_json", is_flag=True, help="Print JSON, which --plan replays.")
def plan(model_options: ModelOptions, gpu: str | None, learn: bool, **arguments: Any) -> None:
    """Show what would fit, how fast it would be, and what else there is.

    MODEL is a preset (llama-3.1-8b), a folder, a file or an installed model. Neither a card nor a
    download is needed.
    """
    from offload_llama.report.command import PlanJob, run

    saved = model_options.saved_plan()
    options = model_options.replaying(saved)
    if learn:
        if gpu is not None:
            raise ConfigError("--learn measures the card in this computer: leave --gpu out")
        from offload_llama.report.learn import learn as learn_from_run

        load = functools.partial(options.load, Console())
        click.get_current_context().exit(learn_from_run(load, options.device, Console()))
    target: dict[str, Any] = {"gpu": gpu, "device": options.device, "vram": options.vram}
    if saved is not None and gpu is None and not options.given & {"vram", "device"}:
        target = saved.target()
    job = PlanJob(
        model=options.model,
        **target,
        ram=options.ram,
        reserve=options.reserve,
        ctx=options.ctx,
        batch=options.max_batch_size,
        weights=options.weights,
        kv_dtype=options.kv_dtype,
        dtype=options.dtype,
        policy=options.kv_policy,
        prefill_chunk=options.prefill_chunk,
        allow_lossy=options.allow_lossy,
        explain=options.explain,
        replayed=saved,
        console=Console(),
        **arguments,
    )
    click.get_current_context().exit(run(job))


@cli.command(context_settings=_SETTINGS)
@option("--device", default="auto", help="The device to look at, a simulated card too.")
@option("--probe", is_flag=True, help="Measure the card, its link and this memory, and keep it.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(device: str, probe: bool, as_json: bool) -> None:
    """Show what is here: Python, torch, card, memory, page-locking, default model."""
    from offload_llama.doctor import examine, render

    report = examine(device, probe=probe)
    Console().write(json.dumps(report) + "\n" if as_json else render(report))


@cli.command(context_settings=_SETTINGS)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@option(
    "--weights",
    type=OneOf(PACKED),
    default="int4",
    help="int8, int4 (groups of 64) or int4-g32 (groups of 32).",
)
@console_options
def quantize(source: str, target: str, weights: str, console: Console) -> None:
    """Save a model with packed weights and its vocabulary, to be loaded like any other.

    SRC is what --model takes elsewhere, DST a folder that is made.
    """
    from offload_llama.saving import save_packed

    code = save_packed(source, target, weights=weights, console=console)
    click.get_current_context().exit(code)


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
