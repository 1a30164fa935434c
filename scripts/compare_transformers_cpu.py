"""Decode and loading on the CPU beside transformers: same file, dtype and threads.

    python scripts/compare_transformers_cpu.py [--model smollm2-135m] [--threads N]

Both load the GGUF file to float32, once each, with the file in memory and everything imported.
Both decode greedily after the same prompt, a step of one and then a step of the other, so that a
busy moment of the machine meets both; figures are medians over the steps. The exit code is 0 only
if both choose the same tokens. Needs `transformers` and `accelerate`. A table, then one JSON object
as the last line, in which `decode_ratio` and `load_ratio` are theirs over ours (above 1: ours is
faster) and `decode_ratio_quartiles` says how far single pairs of steps scatter.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from offload_llama import LLM
from offload_llama.checkpoint.open import open_checkpoint

PROMPT = "Once upon a time, in a small village by the sea,"
WARM_UP_STEPS = 4


class Ours:
    """This package: the engine without text, as in transformers' loop below."""

    def __init__(self, path: Path) -> None:
        self._llm = LLM.load(str(path), device="cpu", dtype="float32")
        self._next: list[int] = []

    def encode(self, text: str) -> list[int]:
        return self._llm.encode(text)

    def prefill(self, ids: list[int]) -> None:
        self._forward(ids)

    def _forward(self, ids: list[int]) -> None:
        cache = self._llm.cache
        with cache.step([0], [cache.lengths[0]], [len(ids)]) as step:
            logits = self._llm.model(step.upload(ids), step)
        self._next = logits.argmax(-1).tolist()

    def decode(self) -> int:
        self._forward(self._next)
        return self._next[0]


class Theirs:
    """transformers with its default cache and attention (sdpa)."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        ).eval()
        self._cache: Any = None
        self._next = torch.empty(0)

    def prefill(self, ids: list[int]) -> None:
        self._forward(torch.tensor([ids]))

    def _forward(self, ids: torch.Tensor) -> None:
        out = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        self._next = out.logits[:, -1].argmax(-1, keepdim=True)

    def decode(self) -> int:
        self._forward(self._next)
        return int(self._next)


def compare(path: Path, n_steps: int) -> dict[str, Any]:
    """Return medians and ratios of n_steps pairs of steps; who goes first alternates."""
    path.read_bytes()
    load_s: dict[str, float] = {}
    engines: dict[str, Ours | Theirs] = {}
    for name, kind in (("transformers", Theirs), ("ours", Ours)):
        start_s = time.perf_counter()
        engines[name] = kind(path)
        load_s[name] = time.perf_counter() - start_s
    ids = engines["ours"].encode(PROMPT)
    for engine in engines.values():
        engine.prefill(ids)
    step_s: dict[str, list[float]] = {name: [] for name in engines}
    chosen: dict[str, list[int]] = {name: [] for name in engines}
    for i in range(WARM_UP_STEPS + n_steps):
        for name in sorted(engines, reverse=i % 2 == 1):
            start_s = time.perf_counter()
            chosen[name].append(engines[name].decode())
            if i >= WARM_UP_STEPS:
                step_s[name].append(time.perf_counter() - start_s)
    decode_ms = {name: statistics.median(times) * 1e3 for name, times in step_s.items()}
    pairs = zip(step_s["transformers"], step_s["ours"], strict=True)
    quartiles = statistics.quantiles([theirs / ours for theirs, ours in pairs], n=4)
    return {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "steps": n_steps,
        "decode_ms": decode_ms,
        "decode_ratio": decode_ms["transformers"] / decode_ms["ours"],
        "decode_ratio_quartiles": [quartiles[0], quartiles[2]],
        "load_s": load_s,
        "load_ratio": load_s["transformers"] / load_s["ours"],
        "tokens_agree": chosen["ours"] == chosen["transformers"],
    }


def main() -> None:
    """Print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a short name")
    parser.add_argument("--steps", type=int, default=80, help="decode steps of each")
    parser.add_argument("--threads", type=int, help="torch's threads; its own choice if left out")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    checkpoint = open_checkpoint(options.model)
    path = checkpoint.path
    checkpoint.close()
    with torch.no_grad():
        result = compare(path, options.steps)
    print(f"{path.name}, float32, {result['machine']}, torch {result['torch']}")
    print(f"{'':<14}{'ours':>9}{'transformers':>14}{'ratio':>7}")
    for label, key, ratio in (
        ("decode, ms", "decode_ms", "decode_ratio"),
        ("loading, s", "load_s", "load_ratio"),
    ):
        ours, theirs = result[key]["ours"], result[key]["transformers"]
        print(f"{label:<14}{ours:>9.2f}{theirs:>14.2f}{result[ratio]:>7.2f}")
    print(json.dumps(result))
    if not result["tokens_agree"]:
        raise SystemExit("error: the two engines chose different tokens")


if __name__ == "__main__":
    main()
