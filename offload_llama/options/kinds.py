"""How values of options are read, and how options are added to a command."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from offload_llama.errors import ConfigError
from offload_llama.hardware import parse_bytes
from offload_llama.prompts import clean_argument

if TYPE_CHECKING:
    _TextType = click.ParamType[str]
    _AnyType = click.ParamType[Any]
else:
    _TextType = _AnyType = click.ParamType  # not generic before click 8.5

Command = Callable[..., Any]


class OneText(_TextType):
    """Text that an environment variable gives whole: stop strings may hold spaces."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text, also where the locale could not decode it."""
        return clean_argument(str(value))

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """Return the variable as one value."""
        return [rv]


class ByteSize(_AnyType):
    """A size such as 8GiB (2**30) or 8GB (10**9)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes."""
        if isinstance(value, int):
            return value
        try:
            size_bytes = parse_bytes(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        if size_bytes == 0:
            self.fail("it must be more than 0; write for example 8GiB, 512MiB or 8GB.", param, ctx)
        return size_bytes


class ContextTokens(_AnyType):
    """A number of tokens: 4096, 4k (times 1024), or max for what the model allows."""

    name = "tokens"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """Return the tokens; None stands for the model's own limit."""
        if isinstance(value, int):
            return value
        text = value.strip().lower()
        if text == "max":
            return None
        match = re.fullmatch(r"(\d+)(k?)", text, re.ASCII)
        tokens = int(match[1]) * (1024 if match[2] else 1) if match else 0
        if tokens < 1:
            self.fail(
                f"{value!r} is no number of tokens above 0; write for example 4096, 32k or max.",
                param,
                ctx,
            )
        return tokens


class BatchSize(_AnyType):
    """A number of sequences, or auto."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Return the number, or "auto"."""
        if isinstance(value, int):
            return value
        if value == "auto":
            return "auto"
        if not re.fullmatch(r"\d+", value, re.ASCII) or int(value) < 1:
            self.fail(f"{value!r} is no whole number above 0; write for example 4, or auto.")
        return int(value)


class OneOf(_AnyType):
    """A name of a short list; some have a longer spelling that means the same."""

    name = "name"

    def __init__(self, names: Sequence[str], longer: dict[str, str] | None = None) -> None:
        self.names, self.longer = tuple(names), longer or {}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name, in lower case and in its long spelling if it has one."""
        name = self.longer.get(str(value).lower(), str(value).lower())
        if name not in self.names and name not in self.longer.values():
            self.fail(f"{value!r} is none of {', '.join(self.names)}.", param, ctx)
        return name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return what help shows."""
        return f"[{'|'.join(self.names)}]" if len(self.names) <= 7 else "NAME"


def option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """Return a click option whose environment variable is OFFLOAD_LLAMA_ and its first name."""
    long_name = next(name for name in names if name.startswith("--")).partition("/")[0]
    variable = "OFFLOAD_LLAMA_" + long_name.removeprefix("--").replace("-", "_").upper()
    settings.setdefault("show_default", settings.get("default") is not None)
    return click.option(*names, envvar=variable, show_envvar=True, **settings)


def gathered(
    cls: Any, keyword: str, options: Sequence[Callable[[Command], Command]], command: Command
) -> Command:
    """Return `command` with options added, whose values reach it together as one `cls`.

    A field `given` gets the names of those that were not left at their default.
    """
    names = {field.name for field in fields(cls)}

    @functools.wraps(command)
    def with_options(**values: Any) -> Any:
        taken = {name: values.pop(name) for name in sorted(names) if name in values}
        if "given" in names:
            ctx = click.get_current_context()
            taken["given"] = frozenset(
                name
                for name in taken
                if ctx.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)
            )
        return command(**{keyword: cls(**taken)}, **values)

    wrapped: Command = with_options
    for add in reversed(options):
        wrapped = add(wrapped)
    return wrapped


def mixed(weights: str, kv_dtype: str, dtype: str) -> str:
    """Return the options that name several kinds of numbers, as they are typed."""
    flags = {"--weights": weights, "--kv-dtype": kv_dtype, "--dtype": dtype}
    return " with ".join(f"{flag} {name}" for flag, name in flags.items() if name != "auto")
