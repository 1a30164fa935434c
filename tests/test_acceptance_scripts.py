"""The scripts for a real card and for peers run, and say what they must."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run(name: str, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a script; its last line is one JSON object."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / name, *options], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    return done, json.loads(done.stdout.splitlines()[-1])


def test_the_simulated_card_is_accepted():
    done, result = run("gpu_acceptance.py", "--sim")
    assert done.returncode == 0 and result["passed"] and result["simulated"]
    assert all(result["checks"].values()) and len(result["checks"]) >= 14
    assert 20 < result["figures"]["h2d_pinned_gb_per_s"] < 24.1
    assert result["figures"]["overlap"] > 0.6


def test_without_a_card_the_acceptance_says_so_in_one_line():
    done = subprocess.run(
        [sys.executable, SCRIPTS / "gpu_acceptance.py", "--device", "cuda"],
        capture_output=True, text=True, check=False,
        env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 7
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_cache_whose_copies_block_is_not_accepted():
    """The report is complete, names what failed, and the exit code says so."""
    blocking = (
        "import runpy, sys\n"
        "from offload_llama.cache.link import Link\n"
        "def h2d(self, dst, src, *, pinned):\n"
        "    with self.device.use(self.stream):\n"
        "        dst.copy_(src)\n"
        "Link.h2d = h2d\n"
        "sys.argv = ['gpu_acceptance.py', '--sim']\n"
        f"runpy.run_path({str(SCRIPTS / 'gpu_acceptance.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocking], capture_output=True, text=True, check=False
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and not result["passed"]
    assert not result["checks"]["no hidden wait in a decode step"]
    assert result["checks"]["closing unpins everything"]


def test_transformers_chooses_the_same_tokens_and_loads_slower():
    """Other tests run beside this one, so the decode ratio is only kept from falling far."""
    done, result = run("compare_transformers_cpu.py", "--steps", "12")
    assert done.returncode == 0 and result["tokens_agree"] and result["load_ratio"] > 1
    assert result["decode_ratio"] > 0.7


@pytest.mark.slow
def test_decoding_on_the_cpu_is_at_least_as_fast_as_transformers():
    """On a quiet machine; single pairs of steps scatter by some 5 %."""
    _, result = run("compare_transformers_cpu.py")
    assert result["decode_ratio"] >= 1 and result["load_ratio"] > 1
