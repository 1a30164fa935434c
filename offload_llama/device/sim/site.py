"""Which line of the engine asked for an operation."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import torch

# Frames below these folders are machinery, not the engine's own line.
_MACHINERY = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_is_machinery: dict[str, bool] = {}


class Site(NamedTuple):
    """A line of code, kept unformatted: most are never printed."""

    code: CodeType | None
    line: int

    def __str__(self) -> str:
        if self.code is None:
            return "?"
        return f"{Path(self.code.co_filename).name}:{self.line}"


def caller() -> Site:
    """Return the innermost line outside torch and the device seam."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file_name = code.co_filename
        skip = _is_machinery.get(file_name)
        if skip is None:
            skip = _is_machinery[file_name] = file_name.startswith(_MACHINERY)
        if not skip:
            return Site(code, frame.f_lineno)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return Site(None, 0)
