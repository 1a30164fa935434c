"""Where prompts come from: the command line, standard input, a file, a file of JSON lines."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload_llama.config import SamplingParams
from offload_llama.errors import ConfigError

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),  # what Windows PowerShell writes with ">"
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_ROLES = ("system", "user", "assistant")


def decode_text(data: bytes) -> tuple[str, str]:
    """Return the text of `data` with plain newlines, and the name of the encoding it was in.

    UTF-8 unless a byte order mark says otherwise; bytes that are not UTF-8 are read as
    Windows-1252, where quotes pasted from a word processor come from.
    """
    encoding = next((name for bom, name in _BOMS if data.startswith(bom)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        encoding = "cp1252"
        text = data.decode(encoding, errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n"), encoding


def clean_argument(text: str) -> str:
    """Return a command-line argument as text, also where the locale could not decode it."""
    if any("\udc80" <= character <= "\udcff" for character in text):
        return decode_text(text.encode("utf-8", "surrogateescape"))[0]
    return text


def read_text(source: str, notice: Callable[[str], None]) -> str:
    """Return what a file (or standard input, for "-") holds.

    Args:
        source: a path, or "-".
        notice: is told in one line when the text was not UTF-8.

    Raises:
        ConfigError: the file cannot be read.
    """
    label = "standard input" if source == "-" else source
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {label}: {error.strerror or error}") from error
    text, encoding = decode_text(data)
    if encoding == "cp1252":
        notice(f"{label} is not UTF-8; it was read as Windows-1252")
    return text


def read_prompt(source: str, notice: Callable[[str], None]) -> str:
    """Return a prompt from a file or standard input, without the line end it closes with.

    Raises:
        ConfigError: the file cannot be read.
    """
    return read_text(source, notice).removesuffix("\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One line of a batch file: a prompt or messages (exactly one of them), and its own settings.

    `name` is how messages call it ("in.jsonl line 3"). `has_id` tells an `id` of null from none.
    """

    name: str
    prompt: str | None
    messages: tuple[tuple[str, str], ...] | None
    params: SamplingParams
    has_id: bool
    id: Any


def read_batch(
    source: str, defaults: SamplingParams, notice: Callable[[str], None]
) -> list[BatchLine]:
    """Return the requests of a file of JSON lines, in order; blank lines are skipped.

    A line is a JSON string (a prompt) or an object with `prompt` or `messages`, and optionally
    `id` and any of the sampling settings.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line of it is wrong (named by number).
    """
    label = "standard input" if source == "-" else source
    lines: list[BatchLine] = []
    for number, text in enumerate(read_text(source, notice).split("\n"), start=1):
        if text.strip():
            name = f"{label} line {number}"
            try:
                lines.append(_parse_line(name, json.loads(text), defaults))
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{name} is not JSON ({error.msg} at column {error.colno}); write "
                    '{"prompt": "..."} or {"messages": [...]} or a string in double quotes'
                ) from error
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    if not lines:
        raise ConfigError(
            f'{label} holds no prompts; write one JSON object a line, like {{"prompt": "Hello"}}'
        )
    return lines


def _parse_line(name: str, value: Any, defaults: SamplingParams) -> BatchLine:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise ConfigError(f"expected an object or a string, got {json.dumps(value)[:40]}")
    unknown = sorted(set(value) - {"id", "prompt", "messages", *_SETTINGS})
    if unknown:
        raise ConfigError(
            f"unknown key {unknown[0]!r}; known are id, prompt, messages, {', '.join(_SETTINGS)}"
        )
    if ("prompt" in value) == ("messages" in value):
        raise ConfigError('give either "prompt" or "messages"')
    prompt = value.get("prompt")
    if "prompt" in value and not isinstance(prompt, str):
        raise ConfigError(f'"prompt" must be a string, got {json.dumps(prompt)[:40]}')
    settings = {
        key: _SETTINGS[key](key, value[key])
        for key in _SETTINGS
        if key in value and value[key] is not None
    }
    return BatchLine(
        name=name,
        prompt=prompt,
        messages=_parse_messages(value["messages"]) if "messages" in value else None,
        params=replace(defaults, **settings),
        has_id="id" in value,
        id=value.get("id"),
    )


def _parse_messages(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError('"messages" must be a list of at least one message')
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ConfigError(f'message {index} must have "role" and "content", and nothing else')
        role, content = message["role"], message["content"]
        if role not in _ROLES:
            raise ConfigError(f"message {index} has role {role!r}; use {', '.join(_ROLES)}")
        if not isinstance(content, str):
            raise ConfigError(f'message {index}: "content" must be a string')
        messages.append((role, content))
    return tuple(messages)


def _integer(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f'"{key}" must be a whole number, got {json.dumps(value)}')
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f'"{key}" must be a number, got {json.dumps(value)}')
    return float(value)


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f'"{key}" must be true or false, got {json.dumps(value)}')
    return value


def _strings(key: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise ConfigError(f'"{key}" must be a string or a list of strings')
    return tuple(values)


_SETTINGS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "repetition_penalty": _number,
    "seed": _integer,
    "stop": _strings,
    "ignore_eos": _boolean,
}
