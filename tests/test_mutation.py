"""The checks notice what they are there for: a sample here, every mutant with --slow."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "mutation_test.py"
SAMPLE = [
    "removed: self._link.stream.wait_event(written)",
    "removed: self._device.current_stream().wait_event(row.landed)",
    "removed: self._link.stream.wait_event(self._consumed[index])",
    "removed: self._ready[index].record(self._link.stream)",
    "keep-alive removed",
    "removed: device.register",
    "planted: the tail starts one row late",
    "planted: truncation keeps the host rows",
    "planted: a shared page is written in place",
    "planted: pieces of a slot overlap",
]


def run(*options: str) -> tuple[int, dict[str, object]]:
    """Run the script and return its exit code and its last line."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_sample_of_mutants_is_noticed():
    code, result = run("--only", "\n".join(SAMPLE))
    assert result == {"mutants": len(SAMPLE), "killed": len(SAMPLE), "survived": []}
    assert code == 0


def test_every_kind_of_call_is_found():
    spec = importlib.util.spec_from_file_location("mutation_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutation_test"] = module
    try:
        spec.loader.exec_module(module)
        mutants = module.all_mutants()
    finally:
        del sys.modules["mutation_test"]
    kinds = {mutant.what.partition(":")[0] for mutant in mutants}
    assert kinds == {
        "removed", "keep-alive removed", "other stream", "stream choice removed", "blocking",
        "not pinned", "never done", "always done", "one stream for all", "not called",
        "error not cleared", "planted",
    }  # fmt: skip
    assert sum(mutant.what.startswith("planted") for mutant in mutants) >= 10
    assert len({(m.file, m.line, m.what) for m in mutants}) == len(mutants)


@pytest.mark.slow
def test_every_mutant_is_noticed():
    code, result = run("--jobs", "2")
    assert result["survived"] == [] and code == 0
