"""The sandbox that chat templates run in, with the extras that model files rely on.

Source: the template section of the Hugging Face chat documentation: the sandbox, white space
control, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls and the
`generation` block, which marks an assistant's text and prints it unchanged.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from offload_llama.errors import TokenizerError


class Refusal(Exception):
    """A template called `raise_exception`: it does not take these messages."""


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` prints what stands between."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance's set

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def compile_template(source: str) -> Callable[..., str]:
    """Return a function that renders a chat template with the variables it is given.

    The function raises `Refusal` where the template does, and TokenizerError, in one line, for
    every other failure of the template.

    Raises:
        TokenizerError: the template's syntax is wrong; the message names the line.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    try:
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(
            f"the chat template is wrong in line {error.lineno}: {error.message}; give another "
            "with --chat-template FILE"
        ) from error

    def render(**variables: Any) -> str:
        try:
            return template.render(**variables)
        except Refusal:
            raise
        except Exception as error:  # whatever a template's expressions run into
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TokenizerError(
                f"the chat template failed ({reason}); give another with --chat-template FILE"
            ) from error

    return render


def _refuse(message: str) -> None:
    raise Refusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
