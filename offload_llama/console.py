"""What people read: the answer goes to standard output, everything else to standard error."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from offload_llama.hardware import format_bytes

if TYPE_CHECKING:
    from offload_llama.generate import RunStats

PROGRAM = "offload-llama"


def prepare_streams() -> None:
    """Set standard output and error so that no character of an answer can stop the program.

    A terminal keeps its encoding and shows what it cannot spell as "?". Anything else (a file,
    a pipe) gets UTF-8, whatever the locale says.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if stream.isatty():
                stream.reconfigure(errors="replace")
            else:
                stream.reconfigure(encoding="utf-8", errors="replace")


def drop_stdout() -> None:
    """Point standard output at nothing: its reader has gone, and a flush at exit would complain."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def one_line(text: str) -> str:
    """Return `text` on one line."""
    return " ".join(text.split())


def report_error(message: str) -> None:
    """Write one line on standard error in the form every error of the program has."""
    print(f"{PROGRAM}: error: {one_line(message)}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """How much is said on standard error, and the writing of both streams."""

    quiet: bool = False
    verbose: bool = False

    @property
    def shows_progress(self) -> bool:
        """True where a progress bar helps: on a terminal, or when asked to say more."""
        return not self.quiet and (self.verbose or sys.stderr.isatty())

    def say(self, text: str) -> None:
        """Write a line on standard error, unless asked to be quiet."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """Write a line on standard error if asked to say more."""
        if self.verbose:
            print(text, file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        """Write a piece of the answer on standard output, at once."""
        write_all(sys.stdout, text)


def write_all(stream: TextIO, text: str) -> None:
    """Write `text` and flush it.

    Raises:
        BrokenPipeError: the reader has gone.
    """
    if text:
        stream.write(text)
        stream.flush()


def json_is_ascii() -> bool:
    """True if JSON must escape what is not ASCII, because standard output cannot spell it."""
    return (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"


def format_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges: `0-3, 7`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def rate(tokens: int, seconds: float) -> str:
    """Return tokens per second, or a dash where nothing was timed."""
    return f"{tokens / seconds:.1f} tok/s" if seconds > 0 and tokens > 0 else "- tok/s"


def stats_line(stats: RunStats) -> str:
    """Return one run's figures on one line, with what was planned for it beside them.

    The decode rate counts the tokens after the first: the first one comes out of the prefill.
    """
    step = ""
    if stats.decode_ms is not None:
        step = f", {stats.decode_ms:.1f} ms each"
        step += planned(stats.decode_ms, stats.planned_decode_ms, "{:.1f} ms".format)
    new = stats.prompt_tokens - stats.cached_tokens
    kept = f", {stats.cached_tokens} of them kept, the rest" if stats.cached_tokens else ""
    parts = [
        f"prompt {stats.prompt_tokens} tokens{kept} at {rate(new, stats.prefill_s)}",
        f"first token after {stats.ttft_s:.2f} s",
        f"{stats.generated_tokens} tokens at {rate(stats.generated_tokens - 1, stats.decode_s)}"
        + step,
        memory_part([stats]),
        f"per token {format_bytes(stats.h2d_bytes_per_step)} h2d, "
        f"{format_bytes(stats.d2h_bytes_per_step)} d2h",
    ]
    return "; ".join(parts) + (" [simulated]" if stats.simulated else "")


def planned(actual: float, plan: float | None, show: Callable[[float], str]) -> str:
    """Return what stands behind a figure that was planned: the plan, and how far off it is."""
    if not plan:
        return ""
    error = round(100 * (actual / plan - 1), 1) + 0.0  # never "-0.0"
    return f" (planned {show(plan)}, {error:+.1f} %)"


def memory_part(runs: Sequence[RunStats]) -> str:
    """Return the device's peak and where the KV cache lies, the most of several runs."""
    most = max(runs, key=lambda stats: stats.peak_device_bytes)
    peak = format_bytes(most.peak_device_bytes)
    peak += planned(most.peak_device_bytes, most.planned_peak_device_bytes, format_bytes)
    most = max(runs, key=lambda stats: stats.host_kv_bytes)
    host = f"{format_bytes(most.host_kv_bytes)} on the host"
    host += planned(most.host_kv_bytes, most.planned_host_kv_bytes, format_bytes)
    device_bytes = max(stats.device_kv_bytes for stats in runs)
    return f"device peak {peak}; KV {format_bytes(device_bytes)} on the device, {host}"
