"""Small guarded readers of system files and of what programs print."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

Run = Callable[[Sequence[str]], "str | None"]
"""Runs a program and returns what it printed, None if it is not here or failed."""

_RUN_LIMIT_S = 10.0


def run_program(command: Sequence[str]) -> str | None:
    """Return what a program printed, None if it is not here, failed or took too long."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_RUN_LIMIT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def read(path: Path) -> str:
    """Return a file's text without the white space around it, empty if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def read_int(path: Path) -> int | None:
    """Return the number that a file holds, None if there is none."""
    return as_int(read(path))


def as_int(text: str | None) -> int | None:
    """Return the number that a text is, None for anything else such as "[N/A]"."""
    return int(text) if text and re.fullmatch(r"\d+", text, re.ASCII) else None


def as_mib(text: str | None) -> int | None:
    """Return the bytes that a text names in MiB, None if it names none."""
    size = as_int(text)
    return None if size is None else size * 2**20
