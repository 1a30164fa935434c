"""The options that commands share: which model runs where, how tokens are chosen, what is said.

Each decorator adds its options to a command and hands them over together as one value. Nothing
here imports torch before a model is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from offload_llama.config import SamplingParams
from offload_llama.console import Console
from offload_llama.cost import KV_BITS, RUNNABLE_KV, RUNNABLE_WEIGHTS, SHORT_NAMES, WEIGHT_BITS
from offload_llama.errors import CheckpointError, ConfigError
from offload_llama.options.kinds import (
    BatchSize,
    ByteSize,
    Command,
    ContextTokens,
    OneOf,
    OneText,
    gathered,
    mixed,
    option,
)
from offload_llama.policy import POLICY_HELP

if TYPE_CHECKING:
    from offload_llama.llm import LLM
    from offload_llama.options.saved import SavedPlan


DEFAULT_MODEL = "smollm2-135m"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LONG_DTYPES = {long: long for long in _DTYPES.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model runs where: what `model_options` and `plan_options` add to a command.

    `ctx` None is what the model allows. `given` are the names the user set, by option or variable.
    """

    model: str
    device: str
    weights: str
    kv_dtype: str
    dtype: str
    kv_policy: str
    ctx: int | None
    max_batch_size: int | str
    prefill_chunk: int
    reserve: int | None
    ram: int | None
    vram: int | None
    plan: str | None
    explain: bool
    allow_lossy: bool = False
    no_fallback: bool = False
    chat_template: str | None = None
    no_pin: bool = False
    given: frozenset[str] = frozenset()

    def saved_plan(self) -> SavedPlan | None:
        """Return the plan that --plan names.

        Raises:
            ConfigError: the file is no saved plan, or an option contradicts it.
        """
        if self.plan is None:
            return None
        from offload_llama.options.saved import read_plan

        return read_plan(self.plan)

    def replaying(self, saved: SavedPlan | None) -> ModelOptions:
        """Return these options with what a saved plan has settled.

        Raises:
            ConfigError: an option contradicts it.
        """
        if saved is None:
            return self
        return replace(self, **saved.settings({name: getattr(self, name) for name in self.given}))

    def runnable_dtype(self) -> str:
        """Return the dtype to run in: the one kind of numbers that the options name, or "auto".

        Raises:
            ConfigError: they name one that does not run yet, or several.
        """
        for flag, name, runnable in (
            ("--weights", self.weights, RUNNABLE_WEIGHTS),
            ("--kv-dtype", self.kv_dtype, RUNNABLE_KV),
        ):
            if name not in ("auto", *runnable):
                raise ConfigError(
                    f"{flag} {name} is not yet runnable; use {', '.join(runnable)}, or see what "
                    f"it would take: offload-llama plan {self.model} {flag} {name}"
                )
        short = SHORT_NAMES.get(self.dtype, self.dtype)
        # Packed weights go with any numbers that are computed with.
        plain = self.weights if self.weights in _DTYPES else "auto"
        named = {plain, self.kv_dtype, short} - {"auto"}
        if len(named) > 1:
            raise ConfigError(
                f"{mixed(self.weights, self.kv_dtype, short)} is not yet runnable: a model runs in "
                "one kind of numbers; give --dtype alone"
            )
        return _DTYPES[named.pop()] if named else "auto"

    def load(self, console: Console) -> LLM:
        """Return the loaded model.

        Raises:
            OffloadLlamaError: an option is not possible, or the model cannot be loaded.
        """
        saved = self.saved_plan()
        options = self.replaying(saved)
        dtype = options.runnable_dtype()
        if saved is not None:
            from offload_llama.checkpoint.headers import model_shape

            with contextlib.suppress(CheckpointError):  # a repository not fetched yet, perhaps
                saved.check_model(model_shape(options.model).config, options.model)
        from offload_llama.llm import LLM

        return LLM.load(
            options.model,
            device=options.device,
            weights=options.weights,
            kv_dtype=options.kv_dtype,
            dtype=dtype,
            kv_policy=options.kv_policy,
            ctx=options.ctx,
            max_batch_size=options.max_batch_size,
            prefill_chunk=options.prefill_chunk,
            reserve_bytes=options.reserve,
            ram_bytes=options.ram,
            vram_bytes=options.vram,
            fallback=not options.no_fallback,
            plan=None if saved is None else saved.data,
            chat_template=options.chat_template,
            pin=not options.no_pin,
            progress=console.shows_progress,
            notify=console.say,
        )


def _placing_options() -> list[Callable[[Command], Command]]:
    """Return the options that a plan and a run have in common."""
    return [
        option(
            "--device",
            default="auto",
            help="auto, cuda, cuda:N, xpu, cpu, or a simulated card like sim:rtx-3060-12gb.",
        ),
        option(
            "--weights",
            type=OneOf(("auto", *WEIGHT_BITS)),
            default="auto",
            help="How weights are kept: auto is --dtype. fp32, bf16, fp16, int8 and int4 run; "
            "planned only: the GGUF types q8_0 to q2_k.",
        ),
        option(
            "--kv-dtype",
            type=OneOf(("auto", *KV_BITS)),
            default="auto",
            help="How keys and values are kept: auto is --dtype; int8 and int4 are planned only.",
        ),
        option(
            "--dtype",
            type=OneOf(("auto", *_DTYPES), _DTYPES | _LONG_DTYPES),
            default="auto",
            help="Numbers that are computed with.",
        ),
        option(
            "--kv-policy",
            default="auto",
            help=f"Where the KV cache of each layer is: {POLICY_HELP}.",
        ),
        option(
            "--ctx",
            type=ContextTokens(),
            help="Tokens of context, like 4096 or 32k; left out or max: what the model allows, or "
            "less where that does not fit.",
        ),
        option(
            "--max-batch-size",
            "--batch",
            type=BatchSize(),
            default=1,
            help="Prompts run at the same time; auto is as many as fit.",
        ),
        option(
            "--prefill-chunk",
            type=click.IntRange(min=1),
            default=512,
            help="Prompt tokens in one pass.",
        ),
        option("--reserve", type=ByteSize(), help="Device memory to keep free, like 300MiB."),
        option("--ram", type=ByteSize(), help="Host memory that may be used, like 16GiB."),
        option("--vram", type=ByteSize(), help="Device memory that may be used, like 8GiB."),
        option("--plan", metavar="FILE", help="Replay a plan saved with plan --json."),
        option("--explain", is_flag=True, help="Say where each layer's cache is, and why."),
    ]


def plan_options(command: Command) -> Command:
    """Add what says how a model would run; the command takes `model_options` and a `model`."""
    options = [
        *_placing_options(),
        option(
            "--allow-lossy",
            is_flag=True,
            help="Also offer keys and values in fewer bits; none of them runs yet.",
        ),
    ]
    return gathered(ModelOptions, "model_options", options, command)


def model_options(command: Command) -> Command:
    """Add the options that say which model runs where; the command takes `model_options`."""
    model = option(
        "--model",
        default=DEFAULT_MODEL,
        help="Folder, .gguf file, repository id, or the name of an installed model.",
    )
    return gathered(ModelOptions, "model_options", [model, *_running_options()], command)


def running_options(command: Command) -> Command:
    """Add those of `model_options` but the model; the command has a `model` of its own."""
    return gathered(ModelOptions, "model_options", _running_options(), command)


def _running_options() -> list[Callable[[Command], Command]]:
    """Return the options of a run, but for its model."""
    return [
        *_placing_options(),
        option(
            "--no-fallback",
            is_flag=True,
            help="Fail where memory runs out, instead of moving a layer's cache to the host.",
        ),
        option(
            "--chat-template",
            help="Instead of the model's own: a jinja file, llama-2 or llama-3.",
        ),
        option("--no-pin", is_flag=True, help="Never page-lock host memory (copies are slower)."),
    ]


def sampling_options(command: Command) -> Command:
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
    return gathered(SamplingParams, "params", options, command)


def console_options(command: Command) -> Command:
    """Add --quiet and --verbose; the command takes `console`."""
    options = [
        option("-q", "--quiet", is_flag=True, help="Nothing on standard error but errors."),
        option("-v", "--verbose", is_flag=True, help="More on standard error."),
    ]
    return gathered(Console, "console", options, command)
