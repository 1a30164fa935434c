"""Removes every wait, record, pin, stream choice and keep-alive in turn, and plants faults.

    python scripts/mutation_test.py [--jobs 2] [--only TEXT] [--table docs/mutation-test.md]

Finds the calls in `cache/` and `device/cuda.py` by their syntax tree, takes each out of the module
that holds it (in memory, in a process of its own) and runs `tests/mutation_suite.py`. A mutant that
no scenario notices survived: its call is either redundant, and to be deleted, or untested. The last
line is one JSON object.
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
FILES = (*sorted((PACKAGE / "cache").glob("*.py")), PACKAGE / "device" / "cuda.py")
LIMIT_S = 150

ORDERING = {"wait_event", "synchronize", "record", "register", "unregister"}
KEEPING = {"settle", "clear", "append", "add"}
KEEPERS = {"_departures", "_leaving"}


@dataclass(frozen=True)
class Mutant:
    """One change: where, what, and the module's text with it."""

    file: str
    line: int
    what: str
    source: str


def owner(call: ast.Call) -> str:
    """Return the name in front of a method call's dot: `_leaving` of `self._leaving.append(x)`."""
    if not isinstance(call.func, ast.Attribute):
        return ""
    value = call.func.value
    return value.attr if isinstance(value, ast.Attribute) else ast.unparse(value)


def replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a node may be replaced by: a description and the new node."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        keeps = name in KEEPING and owner(call) in KEEPERS
        if keeps and name == "add":
            # The tensors are not kept; the flush in the first argument still happens.
            yield f"keep-alive removed: {ast.unparse(call)}", ast.Expr(call.args[0])
        elif keeps or name in ORDERING:
            yield f"removed: {ast.unparse(call)}", ast.Pass()
        if name == "record" and call.args and "current_stream" not in ast.unparse(call.args[0]):
            bare = ast.Call(func=call.func, args=[], keywords=[])
            yield f"other stream: {ast.unparse(call)}", ast.Expr(bare)
    if isinstance(node, ast.With):
        what = ast.unparse(node.items[0].context_expr)
        if ".use(" in what:
            yield f"stream choice removed: with {what}", ast.If(ast.Constant(True), node.body, [])
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "non_blocking":
                rest = [k for k in node.keywords if k is not keyword]
                bare = ast.Call(func=node.func, args=node.args, keywords=rest)
                yield f"blocking: {ast.unparse(node)}", bare
            if keyword.arg == "pin_memory":
                rest = [k for k in node.keywords if k is not keyword]
                bare = ast.Call(func=node.func, args=node.args, keywords=rest)
                yield f"not pinned: {ast.unparse(node)}", bare
        text = ast.unparse(node)
        if text.endswith(".query()"):
            yield f"never done: {text}", ast.Constant(False)
            yield f"always done: {text}", ast.Constant(True)
        if text.startswith("torch.cuda.Stream("):
            bare = ast.parse("torch.cuda.current_stream(self.torch_device)", mode="eval").body
            yield f"one stream for all: {text}", bare
        if text.startswith("torch.cuda.stream("):
            bare = ast.parse("contextlib.nullcontext()", mode="eval").body
            yield f"stream choice removed: {text}", bare
        if text.startswith("_runtime().cudaHost"):
            yield f"not called: {text}", ast.Constant(0)
        if text.startswith("torch.ones(1, device"):
            yield f"error not cleared: {text}", ast.Constant(0)


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
                    yield Mutant(name, getattr(child, "lineno", 0), what, source)
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
        yield Mutant(
            f"offload_llama/cache/{file}", line, f"planted: {what}", text.replace(old, new)
        )


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
    signal.alarm(LIMIT_S)
    sys.path.insert(0, str(ROOT))
    if mutant is not None:
        sys.meta_path.insert(0, Substitute(mutant))
    noticed = ""
    try:
        from tests.mutation_suite import run_all

        run_all()
    except BaseException as error:
        noticed = f"{type(error).__name__}: {error}".partition("\n")[0]
    os.write(result, noticed.encode()[:4000])
    os._exit(0)


def run(mutants: Sequence[Mutant | None], jobs: int) -> Iterator[tuple[Mutant | None, str, float]]:
    """Yield each mutant with what noticed it ("" if nothing did) and the seconds it took."""
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
            noticed = f"the process ended with signal {status & 127}"
        yield mutant, noticed, time.monotonic() - start_s


def all_mutants() -> list[Mutant]:
    """Return the removals in file order, then the planted faults."""
    return [m for path in FILES for m in removals(path)] + list(planted())


def table(results: Sequence[tuple[Mutant, str]]) -> str:
    """Return the page for the documentation."""
    killed = sum(bool(noticed) for _, noticed in results)
    lines = [
        "# Mutation test of the cache",
        "",
        "Made by `python scripts/mutation_test.py --table docs/mutation-test.md`. Each row takes",
        "one wait, record, pin, stream choice or keep-alive out of `cache/` or `device/cuda.py`,",
        "or plants a fault; the last column is the check of `tests/mutation_suite.py` it failed.",
        f"{killed} of {len(results)} were noticed.",
        "",
        "| where | change | noticed by |",
        "|---|---|---|",
    ]
    for mutant, noticed in results:
        cells = [
            f"`{mutant.file.removeprefix('offload_llama/')}:{mutant.line}`",
            mutant.what.replace("|", "\\|"),
            (noticed or "**nothing**").replace("|", "\\|")[:160],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the mutants and print one line for each, then one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--only", default="", help="run those whose file or change has this text (or one a line)"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--table", type=Path, help="write the table to this file")
    options = parser.parse_args()
    wanted = options.only.splitlines() or [""]
    mutants = [
        m for m in all_mutants() if any(text in f"{m.file}:{m.line} {m.what}" for text in wanted)
    ]
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
        verdict = noticed or "SURVIVED"
        print(
            f"{mutant.file}:{mutant.line} {mutant.what}\n    {verdict[:150]} ({took_s:.0f} s)",
            flush=True,
        )
    ordered = [(m, results[m]) for m in mutants]
    if options.table:
        options.table.write_text(table(ordered), "utf-8")
    survived = [f"{m.file}:{m.line} {m.what}" for m, noticed in ordered if not noticed]
    print(
        json.dumps(
            {"mutants": len(ordered), "killed": len(ordered) - len(survived), "survived": survived}
        )
    )
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()
