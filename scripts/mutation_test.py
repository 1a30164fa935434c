"""Removes every wait, record, pin, stream choice and keep-alive in turn, and plants faults.

    python scripts/mutation_test.py [--jobs 2] [--only TEXT] [--sample N]
                                    [--table docs/mutation-test.md]

Finds the calls in `cache/` and `device/` by their syntax tree (not the simulator's, nor the CPU's,
which do nothing), takes each out of the module that holds it (in memory, in a process of its own)
and runs `tests/mutation_suite.py`. A mutant that no scenario notices survived: its call is either
redundant, and to be deleted, or untested. One that runs out of time, or stumbles over its own
change (a name that is gone), counts as survived too: no check noticed it. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "offload_llama"
NO_WAITS = {"cpu.py", "api.py", "open.py", "__init__.py"}
FILES = (
    *sorted((PACKAGE / "cache").glob("*.py")),
    *sorted(p for p in (PACKAGE / "device").glob("*.py") if p.name not in NO_WAITS),
)
LIMIT_S = 150
"""Processor seconds of one mutant, so that a busy machine changes no verdict."""

ORDERING = {"wait_event", "synchronize", "record", "register", "unregister", "set_stream"}
RELEASING = {"clear", "close", "settle"}
KEEPING = {"append", "add"}
KEEPERS = {"_departures", "_leaving"}
UNNOTICED = "? "
"""In front of how a mutant ended that no check noticed."""
STUMBLES = (NameError, AttributeError, TypeError, ImportError, SyntaxError)


@dataclass(frozen=True)
class Mutant:
    """One change: where (`place` is the function), what, and the module's text with it."""

    file: str
    line: int
    place: str
    what: str
    source: str


def owner(call: ast.Call) -> str:
    """Return the name in front of a method call's dot: `_leaving` of `self._leaving.append(x)`."""
    if not isinstance(call.func, ast.Attribute):
        return ""
    value = call.func.value
    return value.attr if isinstance(value, ast.Attribute) else ast.unparse(value)


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def without(call: ast.Call, name: str) -> ast.Call:
    """Return a call without one of its keyword arguments."""
    rest = [keyword for keyword in call.keywords if keyword.arg != name]
    return ast.Call(func=call.func, args=call.args, keywords=rest)


def replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a node may be replaced by: a description and the new node."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        keeps = name in KEEPING and owner(call) in KEEPERS
        if keeps and name == "add":
            # The tensors are not kept; the flush in the first argument still happens.
            yield f"keep-alive removed: {ast.unparse(call)}", ast.Expr(call.args[0])
        elif keeps or name in ORDERING | RELEASING:
            yield f"removed: {ast.unparse(call)}", ast.Pass()
        if ast.unparse(call).startswith("torch.ones(1, device"):
            yield f"error not cleared: {ast.unparse(call)}", ast.Pass()
    if isinstance(node, ast.With):
        what = ast.unparse(node.items[0].context_expr)
        if ".use(" in what:
            yield f"stream choice removed: with {what}", ast.If(ast.Constant(True), node.body, [])
    if isinstance(node, ast.Call):
        yield from replaced_calls(node)


def replaced_calls(call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a call inside an expression may be replaced by."""
    text = ast.unparse(call)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    keywords = {keyword.arg for keyword in call.keywords}
    if name in ("record", "wait_event"):
        for other in other_streams(call):
            yield f"other stream: {text}", other
    if "non_blocking" in keywords:
        yield f"blocking: {text}", without(call, "non_blocking")
    if "pin_memory" in keywords:
        yield f"not pinned: {text}", without(call, "pin_memory")
    if name == "pinned_empty":
        shape, dtype = (ast.unparse(argument) for argument in call.args)
        yield f"not pinned: {text}", expression(f"torch.empty({shape}, dtype={dtype})")
    if name == "query":
        yield f"never done: {text}", ast.Constant(False)
        yield f"always done: {text}", ast.Constant(True)
    if text.startswith(("torch.cuda.Stream(", "torch.Stream(")):
        yield f"one stream for all: {text}", expression("self.current_stream()")
    if text.startswith("torch.cuda.stream("):
        yield f"stream choice removed: {text}", expression("contextlib.nullcontext()")
    if text.startswith("_runtime().cudaHost"):
        yield f"not called: {text}", ast.Constant(0)


def other_streams(call: ast.Call) -> Iterator[ast.expr]:
    """Yield a `record` or `wait_event` on the copy stream where it was compute, or the reverse."""
    text = ast.unparse(call)
    for one, other in (
        ("self._link.stream", "self._device.current_stream()"),
        # A stream with nothing on it: the classes that have no link know of no other.
        ("self._device.current_stream()", "self._device.stream()"),
    ):
        if one in text:
            yield expression(text.replace(one, other))
            return


def place(tree: ast.AST, line: int, prefix: str = "") -> str:
    """Return the dotted name of the innermost function or class that holds a line."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef)
        if named and node.lineno <= line <= (node.end_lineno or node.lineno):
            return place(node, line, f"{prefix}{node.name}.")
    return prefix.rstrip(".")


def removals(path: Path) -> Iterator[Mutant]:
    """Yield one mutant for each replacement in a file."""
    tree = ast.parse(path.read_text("utf-8"))
    name = str(path.relative_to(ROOT))
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            items = value if isinstance(value, list) else [value]
            for index, child in enumerate(items):
                if not isinstance(child, ast.AST):
                    continue
                for what, new in replacements(child):
                    ast.copy_location(new, child)
                    if isinstance(value, list):
                        value[index] = new
                    else:
                        setattr(parent, field, new)
                    source = ast.unparse(ast.fix_missing_locations(tree))
                    line = getattr(child, "lineno", 0)
                    yield Mutant(name, line, place(tree, line), what, source)
                    if isinstance(value, list):
                        value[index] = child
                    else:
                        setattr(parent, field, child)


# file, what, old text, new text
FAULTS = (
    ("host.py", "the tail starts one row late", "span.start - row.host_len\n",
     "max(0, span.start - row.host_len - 1)\n"),
    ("host.py", "a flush is counted one row short", "row.host_len += len(k)",
     "row.host_len += len(k) - 1"),
    ("host.py", "a flush comes one row late", "== self.geometry.flush_tokens",
     "== self.geometry.flush_tokens + 1"),
    ("host.py", "truncation keeps the host rows", "row.host_len = min(row.host_len, length)",
     "row.host_len = row.host_len"),
    ("host.py", "a shared page has one user", "page.users += 1", "page.users += 0"),
    ("host.py", "a copied row has no tail", "        if n:\n            self._tail_writable",
     "        if False:\n            self._tail_writable"),
    ("host.py", "a failed step keeps what it flushed", "self.truncate(row, saved)", "pass"),
    ("host.py", "tail rows overwrite host rows", "slot[:, piece.n_host :].copy_(rows)",
     "slot[:, : rows.shape[1]].copy_(rows)"),
    ("slabs.py", "a shared page is written in place", "if index is None:", "if True:"),
    ("slabs.py", "a flush goes one page row late", "table.runs(first, first + len(k))",
     "table.runs(first - (first > 0), first - (first > 0) + len(k))"),
    ("slabs.py", "values load as keys", "self.link.h2d(half[done : done + run.tokens], host,",
     "self.link.h2d(half[done : done + run.tokens], self.views(run)[0],"),
    ("loads.py", "a part is one row short", "min(n_rows, first + part_tokens)",
     "min(n_rows, first + part_tokens - 1)"),
    ("loads.py", "pieces of a slot overlap", "used += stop - first", "used += n_host"),
    ("loads.py", "a load takes rows that are still in the tail", "min(host_len, stop) - first",
     "stop - first if host_len > first else 0"),
    ("pages.py", "a page's rows start one late", "offset = page.offset + low - first",
     "offset = page.offset + low - first + (low > first)"),
    ("pages.py", "freed halves join with the wrong one", "buddy = offset ^ tokens",
     "buddy = offset + tokens"),
    ("pages.py", "a cut frees the last page in use", "(self.pages) and first < length:",
     "(self.pages) and first + self.pages[kept].tokens <= length:"),
    ("ring.py", "one slot for two loads", "self._taken % len(self._slots)",
     "min(self._taken, 1) % len(self._slots)"),
    ("ring.py", "a slot's next load is queued before it is read",
     "for piece in load.pieces:\n                yield",
     "self._queue_next()\n            for piece in load.pieces:\n                yield"),
    ("resident.py", "a grown part forgets its rows",
     "larger[:, :inside].copy_(parts[index][:, :inside])", "pass"),
)  # fmt: skip


def planted() -> Iterator[Mutant]:
    """Yield the faults planted by hand; each old text occurs exactly once."""
    for file, what, old, new in FAULTS:
        path = PACKAGE / "cache" / file
        text = path.read_text("utf-8")
        if text.count(old) != 1:
            raise SystemExit(f"error: {file}: {old!r} occurs {text.count(old)} times")
        line = text[: text.index(old)].count("\n") + 1
        name = str(path.relative_to(ROOT))
        where = place(ast.parse(text), line)
        yield Mutant(name, line, where, f"planted: {what}", text.replace(old, new))


class Substitute(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module of the package from another text."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = mutant.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        return importlib.util.spec_from_loader(
            name, self, is_package=self._mutant.file.endswith("__init__.py")
        )

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.source, self._mutant.file, "exec"), module.__dict__)


def attempt(mutant: Mutant | None, result: int) -> None:
    """Run the suite in this (forked) process and write what noticed the mutant, if anything."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    sys.path.insert(0, str(ROOT))
    if mutant is not None:
        sys.meta_path.insert(0, Substitute(mutant))
    noticed = ""
    try:
        from tests.mutation_suite import run_all

        run_all()
    except AssertionError as error:
        cause = error.__cause__
        stumbled = f"{UNNOTICED}{type(cause).__name__}: " if isinstance(cause, STUMBLES) else ""
        noticed = f"{stumbled}{error}".partition("\n")[0]
    except BaseException as error:
        noticed = f"{UNNOTICED}{type(error).__name__}: {error}".partition("\n")[0]
    os.write(result, noticed.encode()[:4000])
    os._exit(0)


def run(mutants: Sequence[Mutant | None], jobs: int) -> Iterator[tuple[Mutant | None, str, float]]:
    """Yield each mutant with what noticed it and the seconds it took.

    The text is empty if the suite passed, and begins with `UNNOTICED` if the mutant ended in
    another way than by a check.
    """
    import torch

    # The simulated card's later orders need it; loaded here, every fork has it for nothing.
    importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    waiting, running = list(mutants), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            reader, writer = os.pipe()
            process = os.fork()
            if process == 0:
                os.close(reader)
                attempt(mutant, writer)
            os.close(writer)
            running[process] = (mutant, reader, time.monotonic())
        process, status = os.wait()
        mutant, reader, start_s = running.pop(process)
        with os.fdopen(reader) as pipe:
            noticed = pipe.read()
        if status:
            why = "out of time" if status & 127 == signal.SIGPROF else f"signal {status & 127}"
            noticed = UNNOTICED + why
        yield mutant, noticed, time.monotonic() - start_s


def all_mutants() -> list[Mutant]:
    """Return the removals in file order, then the planted faults."""
    return [m for path in FILES for m in removals(path)] + list(planted())


def killed(noticed: str) -> bool:
    """Return whether a check noticed the mutant."""
    return bool(noticed) and not noticed.startswith(UNNOTICED)


def cells(mutant: Mutant) -> tuple[str, str]:
    """Return how the table names a mutant: where, and the change."""
    where = f"`{mutant.file.removeprefix('offload_llama/')}` {mutant.place}"
    return where, mutant.what.replace("|", "\\|")


def table(results: Sequence[tuple[Mutant, str]]) -> str:
    """Return the page for the documentation."""
    n_killed = sum(killed(noticed) for _, noticed in results)
    lines = [
        "# Mutation test of the cache",
        "",
        "Made by `python scripts/mutation_test.py --table docs/mutation-test.md`, in one run.",
        "Each row takes one wait, record, pin, stream choice or keep-alive out of `cache/` or",
        "`device/`, or plants a fault; the last column is the first check of",
        "`tests/mutation_suite.py` that it failed.",
        f"{n_killed} of {len(results)} were noticed.",
        "",
        "| where | change | noticed by |",
        "|---|---|---|",
    ]
    for mutant, noticed in results:
        verdict = noticed if killed(noticed) else f"**nothing** {noticed}"
        columns = [*cells(mutant), verdict.replace("|", "\\|")[:160].strip()]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the mutants and print one line for each, then one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--only", default="", help="run those whose file or change has this text (or one a line)"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="run N of them, evenly spread")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--table", type=Path, help="write the table to this file")
    options = parser.parse_args()
    wanted = options.only.splitlines() or [""]
    mutants = [
        m for m in all_mutants() if any(text in f"{m.file}:{m.line} {m.what}" for text in wanted)
    ]
    if options.sample:
        n = min(options.sample, len(mutants))
        mutants = [mutants[i * len(mutants) // n] for i in range(n)]
    if options.list:
        for m in mutants:
            print(f"{m.file}:{m.line} {m.what}")
        return
    [(_, noticed, took_s)] = run([None], 1)
    if noticed:
        raise SystemExit(f"error: the suite fails without any change: {noticed}")
    print(f"without any change: passes in {took_s:.0f} s", flush=True)
    results = {}
    for mutant, noticed, took_s in run(mutants, options.jobs):
        results[mutant] = noticed
        verdict = noticed if killed(noticed) else f"SURVIVED {noticed}"
        print(
            f"{mutant.file}:{mutant.line} {mutant.what}\n    {verdict[:150]} ({took_s:.0f} s)",
            flush=True,
        )
    ordered = [(m, results[m]) for m in mutants]
    if options.table:
        options.table.write_text(table(ordered), "utf-8")
    survived = [f"{m.file}:{m.line} {m.what}" for m, noticed in ordered if not killed(noticed)]
    print(
        json.dumps(
            {"mutants": len(ordered), "killed": len(ordered) - len(survived), "survived": survived}
        )
    )
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()
