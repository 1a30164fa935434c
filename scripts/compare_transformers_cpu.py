"""Decode and loading on the CPU beside transformers: same file and threads.

    python scripts/compare_transformers_cpu.py [--model smollm2-135m] [--threads N]
        [--weights fp32,int8,int4]

All load the GGUF file, once each, with the file in memory and everything imported: transformers to
float32, we to each of the weights asked for. All decode greedily after the same prompt, a step of
one and then a step of the next, so that a busy moment of the machine meets all of them; figures
are medians over the steps. The exit code is 0 only if transformers and our fp32 choose the same
tokens. Needs `transformers` and `accelerate`. A table, then one JSON object as the last line, with
the figures of each kind of weights under `weights` and those of the first on top: `decode_ratio` is
the median over the rounds of theirs over ours (above 1: ours is faster), `decode_ratio_quartiles`
says how far single rounds scatter, and `load_ratio` is theirs over ours.
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
THEIRS = "transformers"
WEIGHTS = ("fp32", "int8", "int4", "int4-g32")


class Ours:
    """This package: the engine without text, as in transformers' loop below."""

    def __init__(self, path: Path, weights: str) -> None:
        self._llm = LLM.load(str(path), device="cpu", dtype="float32", weights=weights)
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


def compare(path: Path, n_steps: int, weights: list[str]) -> dict[str, Any]:
    """Return medians and ratios of n_steps rounds; who goes first alternates."""
    path.read_bytes()
    load_s: dict[str, float] = {}
    engines: dict[str, Any] = {}
    for name in (THEIRS, *weights):
        start_s = time.perf_counter()
        engines[name] = Theirs(path) if name == THEIRS else Ours(path, name)
        load_s[name] = time.perf_counter() - start_s
    ids = engines[weights[0]].encode(PROMPT)
    for engine in engines.values():
        engine.prefill(ids)
    step_s: dict[str, list[float]] = {name: [] for name in engines}
    chosen: dict[str, list[int]] = {name: [] for name in engines}
    for i in range(WARM_UP_STEPS + n_steps):
        for name in list(engines)[:: 1 if i % 2 else -1]:
            start_s = time.perf_counter()
            chosen[name].append(engines[name].decode())
            if i >= WARM_UP_STEPS:
                step_s[name].append(time.perf_counter() - start_s)
    by_weights = {}
    for name in weights:
        pairs = zip(step_s[THEIRS], step_s[name], strict=True)
        quartiles = statistics.quantiles([theirs / ours for theirs, ours in pairs], n=4)
        by_weights[name] = {
            "decode_ratio": quartiles[1],
            "decode_ratio_quartiles": [quartiles[0], quartiles[2]],
            "load_ratio": load_s[THEIRS] / load_s[name],
            "tokens_agree": chosen[name] == chosen[THEIRS],
        }
    return {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "steps": n_steps,
        "decode_ms": {name: statistics.median(times) * 1e3 for name, times in step_s.items()},
        "fastest_ms": {name: min(times) * 1e3 for name, times in step_s.items()},
        "load_s": load_s,
        **by_weights[weights[0]],
        "weights": by_weights,
    }


def main() -> None:
    """Print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a short name")
    parser.add_argument("--steps", type=int, default=80, help="decode steps of each")
    parser.add_argument("--threads", type=int, help="torch's threads; its own choice if left out")
    parser.add_argument("--weights", default="fp32", help=f"ours, by commas: {', '.join(WEIGHTS)}")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    weights = options.weights.split(",")
    if not set(weights) <= set(WEIGHTS):
        parser.error(f"--weights takes {', '.join(WEIGHTS)}, got {options.weights}")
    checkpoint = open_checkpoint(options.model)
    path = checkpoint.path
    checkpoint.close()
    with torch.no_grad():
        result = compare(path, options.steps, weights)
    print(f"{path.name}, {result['machine']}, torch {result['torch']}")
    print(f"{'':<14}{'decode, ms':>11}{'fastest':>9}{'ratio':>7}{'loading, s':>12}{'ratio':>7}")
    for name in (THEIRS, *weights):
        found = result["weights"].get(name, {"decode_ratio": 1.0, "load_ratio": 1.0})
        print(
            f"{name:<14}{result['decode_ms'][name]:>11.2f}{result['fastest_ms'][name]:>9.2f}"
            f"{found['decode_ratio']:>7.2f}{result['load_s'][name]:>12.2f}"
            f"{found['load_ratio']:>7.2f}"
        )
    print(json.dumps(result))
    if not result["weights"].get("fp32", {"tokens_agree": True})["tokens_agree"]:
        raise SystemExit("error: the two engines chose different tokens")


if __name__ == "__main__":
    main()
