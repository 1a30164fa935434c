"""Files that are not what their name says, told apart before any library reads them.

Every message has the path, the size found and the likely cause.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offload_llama.errors import CheckpointError

_LFS_MARK = b"version https://git-lfs.github.com/spec/"
_HTML_MARKS = (b"<!doctype", b"<html", b"<?xml")


def bad_file(path: Path, size_bytes: int, problem: str) -> CheckpointError:
    """Return the error for a damaged file, in the one form all of them have."""
    return CheckpointError(f"{path} ({size_bytes:,} bytes): {problem}")


def check_is_data(path: Path) -> int:
    """Return the size of a file that could be model data.

    Raises:
        CheckpointError: it cannot be read, is empty, is a Git LFS pointer or a web page.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(256)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not size_bytes:
        raise bad_file(path, 0, "empty file, the download never started; fetch it again")
    if head.startswith(_LFS_MARK):
        raise bad_file(
            path,
            size_bytes,
            "Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or "
            "download the file",
        )
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_HTML_MARKS):
        raise bad_file(
            path,
            size_bytes,
            "web page, not model data; the download needs a login or a direct link",
        )
    return size_bytes


def cut_short(path: Path, size_bytes: int, expected_bytes: int) -> CheckpointError:
    """Return the error for a file that ends too early."""
    return bad_file(
        path,
        size_bytes,
        f"cut short, {expected_bytes:,} bytes expected; the download stopped early, fetch it again",
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: the file is damaged, is not JSON, or holds something else than an object.
    """
    size_bytes = check_is_data(path)
    try:
        value = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise bad_file(path, size_bytes, f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise bad_file(path, size_bytes, f"a JSON object is expected, not a {type(value).__name__}")
    return value
